"""Supervised flow matching: squared error of the velocity at random times (Lipman et al., arXiv 2210.02747). Topic 12."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from shared.config.algorithms import FlowMatching as Params


class FlowMatching:
    requires_advantages: ClassVar[bool] = False
    supports_multi_update: ClassVar[bool] = True
    anchor_fields: ClassVar[tuple[str, ...]] = ()
    recomputes_anchor: ClassVar[bool] = False
    requires_ema_rollout: ClassVar[bool] = False
    needs_reference = False

    def __init__(self, params: Params) -> None:
        self.params = params

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Times [count]: uniform, or the sigmoid of a normal; shifted, and kept off both ends by `sigma_min`."""
        p = self.params
        if p.timestep_sampling == "uniform":
            u = torch.rand(count, generator=generator)
        else:
            u = (torch.randn(count, generator=generator) * p.logit_std + p.logit_mean).sigmoid()
        return shifted(u, p.timestep_shift).clamp(p.sigma_min, 1 - p.sigma_min)

    def evaluation(self, seed: int, keys: Sequence[str], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Times [B] and noise [B, *shape] of held-out samples: by their keys alone, so that losses compare across steps."""
        times, noise = [], []
        for key in keys:
            generator = torch.Generator().manual_seed(eval_seed(seed, key))
            times.append(self.draw(1, generator))
            noise.append(torch.randn(tuple(shape), generator=generator))
        return torch.cat(times), torch.stack(noise)

    def loss(self, velocity: Tensor, clean: Tensor, noise: Tensor, tally: Tally) -> Tensor:
        errors = squared_errors(velocity, clean, noise)
        tally.mean("velocity_error", errors)
        return errors.mean()


def shifted(u: Tensor, shift: float) -> Tensor:
    """`shift u / (1 + (shift - 1) u)`."""
    return shift * u / (1 + (shift - 1) * u)


def eval_seed(seed: int, key: str) -> int:
    """First 8 bytes of SHA-256(`{seed}:{key}`), little-endian, its lowest 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "little") & ((1 << 63) - 1)


def squared_errors(velocity: Tensor, clean: Tensor, noise: Tensor) -> Tensor:
    """[B]: the mean over elements of `(velocity - (noise - clean))^2`."""
    return ((velocity - (noise - clean)) ** 2).flatten(1).mean(1)
