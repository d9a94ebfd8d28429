"""The denoising loop, written once: sampling keeps the points that training needs, replay scores them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared.sde.kernels import Kernel, step
from shared.sde.seeds import group_seed, step_seed
from shared.sde.solvers import Solver

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [B, *latent], sigma [B]) → noise - x0, guidance included."""
Noise = Callable[[int], Tensor]
"""What step number i draws, float32 [B, *latent]."""


class Trajectory(NamedTuple):
    latents: Tensor
    """[B, points, *latent] in the storage dtype."""
    positions: tuple[int, ...]
    """The schedule position of each point; the last is the end."""
    log_probs: Tensor | None
    """float32 [B, stochastic steps], in the order of the given indices; None without any."""

    @property
    def final(self) -> Tensor:
        return self.latents[:, -1]


class Replayed(NamedTuple):
    log_probs: Tensor
    """float32 [B, scored steps]."""
    means: Tensor
    """float32 [B, scored steps, *latent]: of the next sample."""
    velocities: Tensor
    """[B, scored steps, *latent]."""


def positions(sde_indices: Sequence[int], steps: int) -> tuple[int, ...]:
    """The points on both sides of each stochastic step, ascending."""
    return tuple(sorted({min(max(p, 0), steps) for i in sde_indices for p in (i, i + 1)}))


def sample(
    velocity: Velocity,
    initial: Tensor,
    sigmas: Tensor,
    kernel: Kernel,
    eta: float,
    sde_indices: Sequence[int],
    noise: Noise,
    storage: torch.dtype = torch.float32,
    solver: Solver | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Trajectory:
    """From noise to a clean latent.

    Args:
        initial: [B, *latent].
        sigmas: [T + 1], as the request pins them.
        sde_indices: steps that draw with `eta`; the others do not draw.
        storage: dtype in which every point is kept and goes on.
        solver: makes the deterministic steps (None: Euler). ValueError together with stochastic ones: its history would break.
    """
    steps = len(sigmas) - 1
    if solver is not None and sde_indices:
        raise ValueError(f"sde_indices {list(sde_indices)}: a multistep solver makes all steps, none may draw")
    wanted = set(positions(sde_indices, steps)) | {steps}
    x = initial.to(storage)
    kept = {0: x} if 0 in wanted else {}
    scores: dict[int, Tensor] = {}
    for i in range(steps):
        tick()
        v = velocity(x, sigmas[i].expand(len(x)))
        if solver is not None:
            x = solver.step(i, x, v).to(storage)
        else:
            own = eta if i in sde_indices else 0.0
            drawn = noise(i) if i in sde_indices else None
            done = step(kernel, x, v, sigmas[i], sigmas[i + 1], own, sigmas[1], drawn)
            x = done.sample.to(storage)
            if done.log_prob is not None:
                scores[i] = done.log_prob
        if i + 1 in wanted:
            kept[i + 1] = x
    found = tuple(sorted(kept))
    log_probs = torch.stack([scores[i] for i in sde_indices], 1) if scores else None
    return Trajectory(torch.stack([kept[p] for p in found], 1), found, log_probs)


def replay(
    velocity: Velocity,
    latents: Tensor,
    at: Sequence[int],
    sigmas: Tensor,
    kernel: Kernel,
    eta: float,
    sde_indices: Sequence[int],
    batched: bool = False,
) -> Replayed:
    """Scores stored transitions on the live model.

    Args:
        latents: [B, points, *latent] at the schedule positions `at`.
        sde_indices: the steps to score, in any order.
        batched: all of them in one forward pass: faster where memory allows, for models whose rows do not touch each other.
    """
    place = {position: k for k, position in enumerate(at)}
    missing = [i for i in sde_indices if i not in place or i + 1 not in place]
    if missing:
        raise ValueError(f"steps {missing}: their points are not among the stored positions {list(at)}")
    if batched and len(sde_indices) > 1:
        return _at_once(velocity, latents, place, sigmas, kernel, eta, sde_indices)
    scores, means, velocities = [], [], []
    for i in sde_indices:
        x = latents[:, place[i]]
        v = velocity(x, sigmas[i].expand(len(x)))
        done = step(kernel, x, v, sigmas[i], sigmas[i + 1], eta, sigmas[1], given=latents[:, place[i + 1]])
        assert done.log_prob is not None
        scores.append(done.log_prob)
        means.append(done.mean)
        velocities.append(v)
    return Replayed(torch.stack(scores, 1), torch.stack(means, 1), torch.stack(velocities, 1))


def _at_once(
    velocity: Velocity,
    latents: Tensor,
    place: dict[int, int],
    sigmas: Tensor,
    kernel: Kernel,
    eta: float,
    sde_indices: Sequence[int],
) -> Replayed:
    """Steps as further rows, step by step: row k B + b is sample b at step number k."""
    count, batch = len(sde_indices), len(latents)
    x = torch.cat([latents[:, place[i]] for i in sde_indices])
    after = torch.cat([latents[:, place[i + 1]] for i in sde_indices])
    s = torch.cat([sigmas[i].expand(batch) for i in sde_indices])
    s_next = torch.cat([sigmas[i + 1].expand(batch) for i in sde_indices])
    v = velocity(x, s)
    done = step(kernel, x, v, s, s_next, eta, sigmas[1], given=after)
    assert done.log_prob is not None
    log_probs = done.log_prob.reshape(count, batch).T
    means, velocities = (t.reshape(count, batch, *latents.shape[2:]).transpose(0, 1) for t in (done.mean, v))
    return Replayed(log_probs, means, velocities)


def initial_noise(base: int, groups: Sequence[str], shape: Sequence[int]) -> Tensor:
    """float32 [len(groups), *shape] on the CPU: one draw for each id, the same for equal ids, whoever draws."""
    drawn = {group: _randn(group_seed(base, group), shape) for group in dict.fromkeys(groups)}
    return torch.stack([drawn[group] for group in groups])


def step_noise(base: int, index: int, sample_ids: Sequence[str], shape: Sequence[int]) -> Tensor:
    """What stochastic step `index` draws for each sample, float32 on the CPU."""
    return torch.stack([_randn(step_seed(base, index, i), shape) for i in sample_ids])


def _randn(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
