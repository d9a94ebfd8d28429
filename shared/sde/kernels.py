"""One denoising step as a Gaussian transition: drawn in sampling, scored in replay, both in float32. Golden topic 5.

`x_s = (1 - s) x0 + s noise`, velocity `v = noise - x0`; sigma falls from `s` to `s'`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kernel = Literal["flow", "dance", "cps"]
KERNELS: tuple[Kernel, ...] = ("flow", "dance", "cps")
DETERMINISTIC = 1e-7
"""Below this eta a step draws nothing and has no log-prob."""


class Step(NamedTuple):
    sample: Tensor
    """[B, *latent] float32: the drawn or the given next sample; after a stochastic step rounded to the storage dtype."""
    log_prob: Tensor | None
    """float32 [B], the mean over latent elements; None for a deterministic step."""
    mean: Tensor
    """float32 [B, *latent]."""
    std: Tensor
    """float32, of the step's Gaussian, shaped as sigma."""


def transition_std(kernel: Kernel, sigma: Tensor, sigma_next: Tensor, eta: float, sigma_max: Tensor | float) -> Tensor:
    """Of the step's Gaussian; ValueError for an unknown kernel.

    flow (Flow-GRPO, arXiv 2505.05470): `eta sqrt(s / (1 - s~)) sqrt(s - s')`, where `s~` is `sigma_max` if s is 1, else s.
    dance (DanceGRPO, arXiv 2505.07818): `eta sqrt(s - s')`.
    cps (coefficients-preserving sampling, arXiv 2509.05952): `s' sin(eta pi/2)`.
    """
    if kernel == "cps":
        return sigma_next * math.sin(eta * math.pi / 2)
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: legal are {', '.join(KERNELS)}")
    return _diffusion(kernel, sigma, eta, sigma_max) * (sigma - sigma_next).sqrt()


def _diffusion(kernel: Kernel, sigma: Tensor, eta: float, sigma_max: Tensor | float) -> Tensor:
    if kernel == "dance":
        return torch.full_like(sigma, eta)
    top = torch.as_tensor(sigma_max, dtype=sigma.dtype, device=sigma.device)
    return eta * (sigma / (1 - torch.where(sigma == 1, top, sigma))).sqrt()


def step(
    kernel: Kernel,
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: float,
    sigma_max: Tensor | float,
    noise: Tensor | None = None,
    given: Tensor | None = None,
) -> Step:
    """One transition, whatever the dtypes of its inputs in float32.

    Args:
        sample: [B, *latent]; its dtype is that in which the next sample is stored, and so scored.
        sigma, sigma_next: 0-d or [B].
        sigma_max: the schedule's second entry.
        noise: sampling: what is drawn. Not used when `given` is there.
        given: replay: the next sample as it was stored.
    """
    storage = sample.dtype
    x, v = sample.float(), velocity.float()
    s, s_next = _shaped(sigma, x), _shaped(sigma_next, x)
    std = transition_std(kernel, s, s_next, eta, sigma_max if isinstance(sigma_max, float) else _shaped(sigma_max, x))
    mean = _mean(kernel, x, v, s, s_next, std, eta, sigma_max)
    drawn = mean if noise is None else mean + std * noise.float()
    after = drawn if given is None else given.float()
    shape = sigma.shape if sigma.dim() else ()
    if eta < DETERMINISTIC:
        return Step(after, None, mean, std.reshape(shape))
    after = after.to(storage).float()
    log_prob = -((after.detach() - mean) ** 2)
    if kernel != "cps":
        log_prob = log_prob / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return Step(after, log_prob.flatten(1).mean(1), mean, std.reshape(shape))


def _mean(
    kernel: Kernel, x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, std: Tensor, eta: float, sigma_max: Tensor | float
) -> Tensor:
    if kernel == "cps":
        clean, noise = x - s * v, x + (1 - s) * v
        return (1 - s_next) * clean + (s_next**2 - std**2).sqrt() * noise
    g2 = _diffusion(kernel, s, eta, sigma_max if isinstance(sigma_max, float) else _shaped(sigma_max, x)) ** 2
    dt = s_next - s
    return x * (1 + g2 / (2 * s) * dt) + v * (1 + g2 * (1 - s) / (2 * s)) * dt


def _shaped(value: Tensor, x: Tensor) -> Tensor:
    """float32, so that it multiplies [B, *latent]."""
    value = value.to(x.device, torch.float32)
    return value if value.dim() == 0 else value.reshape(-1, *[1] * (x.dim() - 1))
