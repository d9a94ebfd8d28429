"""DiffusionNFT: reinforcement on the forward process (Zheng et al., arXiv 2509.16117): no log-prob, any sampler."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from shared.config.algorithms import DiffusionNft as Params


class Noised(NamedTuple):
    """Clean samples at one time of the forward process: `x_t = (1 - t) x0 + t noise`."""

    clean: Tensor
    """[B, *latent]."""
    at: Tensor
    """0-d, or [B]."""
    noisy: Tensor

    @classmethod
    def of(cls, clean: Tensor, at: Tensor, noise: Tensor) -> Noised:
        t = at.reshape(-1, *[1] * (clean.dim() - 1)) if at.dim() else at
        return cls(clean, at, (1 - t) * clean + t * noise)


class DiffusionNft:
    """With `r = clip(A, -c, c) / (2 c) + 1/2`, `v+ = beta new + (1 - beta) old`, `v- = (1 + beta) old - beta new`:
    `c mean((r e+ + (1 - r) e-) / beta)`, where e is the squared error of `x_t - t v` to x0, divided by its own size with
    `use_adaptive_weight`; plus `ref_deviation_coef` times the squared distance to the reference. Rollouts come from a moving
    average: `old`.
    """

    requires_advantages: ClassVar[bool] = True
    supports_multi_update: ClassVar[bool] = True
    anchor_fields: ClassVar[tuple[str, ...]] = ()
    recomputes_anchor: ClassVar[bool] = False
    requires_ema_rollout: ClassVar[bool] = True

    def __init__(self, params: Params) -> None:
        self.params = params
        self.needs_reference = params.ref_deviation_coef > 0

    def times(self, sigmas: Tensor) -> Tensor:
        """The schedule without a last 0, of that the first `training_timestep_fraction`; one random time if none is left."""
        held = sigmas[:-1] if float(sigmas[-1]) == 0 else sigmas
        share = self.params.training_timestep_fraction
        if share >= 1:
            return held
        count = int(len(held) * share)
        return held[:count] if count else torch.rand(1) * share

    def loss(
        self, noised: Noised, new: Tensor, old: Tensor, reference: Tensor | None, advantages: Tensor, tally: Tally
    ) -> Tensor:
        """Of one time. Velocities [B, *latent] of the live model, of the average, and of the reference. ValueError if the
        advantages are not one a sample."""
        p = self.params
        if len(advantages) != len(new):
            raise ValueError(f"{len(advantages)} advantages for {len(new)} samples")
        c, old = p.adv_std_saturate, old.detach()
        r = advantages.clamp(-c, c) / (2 * c) + 0.5
        better = self._error(noised, p.beta * new + (1 - p.beta) * old)
        worse = self._error(noised, (1 + p.beta) * old - p.beta * new)
        loss = c * ((r * better + (1 - r) * worse) / p.beta).mean()
        tally.mean("positive_loss", better)
        tally.mean("negative_loss", worse)
        if p.ref_deviation_coef:
            if reference is None:
                raise ValueError("ref_deviation_coef needs the reference's velocities")
            distance = ((new - reference.detach()) ** 2).mean()
            tally.mean("reference_deviation", distance)
            loss = loss + p.ref_deviation_coef * distance
        return loss

    def _error(self, noised: Noised, velocity: Tensor) -> Tensor:
        """[B]."""
        t = noised.at.reshape(-1, *[1] * (velocity.dim() - 1)) if noised.at.dim() else noised.at
        gap = (noised.noisy - t * velocity - noised.clean).flatten(1)
        error = (gap**2).mean(1)
        if not self.params.use_adaptive_weight:
            return error
        return error / gap.detach().abs().mean(1).clamp(min=1e-5)
