"""What losses over denoising steps share: rows are samples, columns the stochastic steps that are scored. Golden topic 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from shared.sde.kernels import Kernel, transition_std


@dataclass
class FlowMicro:
    """One micro-batch of denoising trajectories."""

    new: Tensor
    """float32 [B, S]: log-probs on the live weights, means over latent elements."""
    anchor: Tensor
    """[B, S] of the frozen old policy."""
    means: Tensor
    """float32 [B, S, *latent]: means of the next sample on the live weights."""
    stds: Tensor
    """float32 [S] of the steps' Gaussians."""
    advantages: Tensor
    """[B]."""
    anchor_means: Tensor | None = None
    reference_means: Tensor | None = None
    """Of the frozen reference or teacher."""
    velocities: Tensor | None = None
    """[B, S, *latent]."""
    reference_velocities: Tensor | None = None
    gaps: Tensor | None = None
    """float32 [S]: `sigma - sigma'` of each step."""
    rollout: Tensor | None = None
    """[B, S] as the engine reported them."""
    progress: float = 0.0
    """Share of all optimizer steps that is done, 0 … 1."""

    def columns(self) -> Tensor:
        """Advantages as [B, S]."""
        return self.advantages[:, None].expand_as(self.new)


def step_stds(kernel: Kernel, sigmas: Tensor, indices: Sequence[int], eta: float) -> Tensor:
    """float32 [len(indices)]: the std of each of these steps' Gaussians."""
    places = torch.as_tensor(list(indices), dtype=torch.long, device=sigmas.device)
    return transition_std(kernel, sigmas[places], sigmas[places + 1], eta, sigmas[1])


def columns_of(field: Tensor, indices: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """The columns of `field` [B, len(indices), …] that belong to the wanted steps. ValueError names one that is not there."""
    places = {step: k for k, step in enumerate(indices)}
    missing = [step for step in wanted if step not in places]
    if missing:
        raise ValueError(f"steps {missing}: not among those that were kept ({list(indices)})")
    return field[:, [places[step] for step in wanted]]


def gaussian_kl(p: Tensor, q: Tensor, stds: Tensor) -> Tensor:
    """`(p - q)^2 / (2 std^2)` elementwise: KL of Gaussians [B, S, *latent] with these means and one std a step."""
    return (p - q) ** 2 / (2 * stds.reshape(1, -1, *[1] * (p.dim() - 2)) ** 2)


def step_kl(p: Tensor, q: Tensor, stds: Tensor) -> Tensor:
    """[B, S]: the mean of gaussian_kl over latent elements."""
    return gaussian_kl(p, q, stds).flatten(2).mean(2)


class FlowPolicy:
    """What losses of stochastic steps declare, and their penalty: `beta mean KL(new means || reference means)`."""

    requires_advantages: ClassVar[bool] = True
    supports_multi_update: ClassVar[bool] = True
    anchor_fields: ClassVar[tuple[str, ...]] = ("anchor",)
    recomputes_anchor: ClassVar[bool] = True
    requires_ema_rollout: ClassVar[bool] = False
    joint: bool = False
    """Whether the loss needs all stochastic steps of a sample together."""

    def __init__(self, beta: float) -> None:
        self.beta, self.needs_reference = beta, beta > 0

    def penalized(self, loss: Tensor, micro: FlowMicro, tally: Tally) -> Tensor:
        if not self.beta:
            return loss
        if micro.reference_means is None:
            raise ValueError("a KL to the reference needs the reference's means")
        kl = step_kl(micro.means, micro.reference_means.detach(), micro.stds)
        tally.mean("kl_reference", kl)
        return loss + self.beta * kl.mean()


def ratios(micro: FlowMicro, tally: Tally) -> Tensor:
    """`exp(new - anchor)` [B, S], with its figures."""
    change = micro.new - micro.anchor
    ratio = change.exp()
    mask = torch.ones_like(ratio)
    tally.spread("ratio", ratio, mask)
    tally.mean("approx_kl", 0.5 * change.detach() ** 2)
    return ratio
