"""What policy-gradient losses share: the surrogate, clip ranges, truncated importance sampling, a KL penalty, figures."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.aggregation import aggregate, per_sequence
from services.trainer.algorithms.base import Micro, Tally
from shared.config.algorithms import Policy as Params

CLAMP = 20.0
"""Log-ratios of losses without a clipped ratio are kept within so much."""


def surrogate(new: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(token losses, ratios): `max(-A r, -A clip(r, 1 - low, 1 + high))` with `r = exp(new - old)` (PPO, arXiv 1707.06347)."""
    ratio = (new - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)), ratio


def scheduled(value: float, schedule: str, progress: float) -> float:
    """A clip range at a share of the training: constant, linear_decay `c (1 - 0.5 p)`, cosine_decay `c (1 + cos(pi p)) / 2`."""
    if schedule == "linear_decay":
        return value * (1 - 0.5 * progress)
    if schedule == "cosine_decay":
        return value * 0.5 * (1 + math.cos(math.pi * progress))
    return value


def select_active(values: Tensor, mask: Tensor | None) -> Tensor:
    """Entries with mask > 0; all of them if none has."""
    if mask is None or not bool((mask > 0).any()):
        return values
    return values[mask > 0]


def kl_estimate(new: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(new || reference) from sampled tokens (Schulman, "Approximating KL divergence", 2020).

    With `d = reference - new`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`. k1 and k3 have the KL as their mean; as a loss
    k2 has its gradient, and k3's variance is the least near 0.
    """
    d = reference - new
    if estimator == "k1":
        return -d
    return 0.5 * d**2 if estimator == "k2" else d.exp() - d - 1


def drift(new: Tensor, rollout: Tensor, mask: Tensor | None) -> dict[str, float]:
    """How far replayed log-probs are from the engine's.

    |new - rollout| mean and max, and k3 = `expm1(d) - d` (d within 20): mean, max, from two tokens on the 0.90
    and 0.99 quantiles.
    """
    d = select_active((new - rollout).detach(), mask)
    k3 = torch.expm1(d.clamp(-CLAMP, CLAMP)) - d.clamp(-CLAMP, CLAMP)
    out = {"rollout_gap": float(d.abs().mean()), "rollout_gap_max": float(d.abs().max())}
    out |= {"k3_mean": float(k3.mean()), "k3_max": float(k3.max())}
    if len(k3) > 1:
        marks = torch.quantile(k3.double(), torch.tensor([0.9, 0.99], dtype=torch.float64, device=k3.device))
        out |= {"k3_p90": float(marks[0]), "k3_p99": float(marks[1])}
    return out


def correction(micro: Micro, params: Params, tally: Tally) -> Tensor | None:
    """Truncated importance weights [tokens] of the trainer's old policy over the engine's; None without that option.

    `w = exp(anchor - rollout)`, by token or as the product over a sequence; beyond the cap it is clamped to it, or masked. A
    constant of the gradient. (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.)
    """
    if params.correction is None or micro.rollout is None:
        return None
    log_weight = (micro.anchor.detach() - micro.rollout) * (micro.mask > 0)
    if params.correction == "sequence":
        log_weight = micro.per_token(per_sequence(log_weight, micro.lengths))
    weight = log_weight.clamp(-CLAMP, CLAMP).exp()
    beyond = weight > params.correction_cap
    tally.mean("correction", weight, micro.mask)
    tally.mean("correction_beyond_cap", beyond.to(weight.dtype), micro.mask)
    if params.correction_mode == "mask":
        return torch.where(beyond, torch.zeros_like(weight), weight)
    return weight.clamp(max=params.correction_cap)


class PolicyLoss:
    """Token losses of a subclass, weighted, reduced, with the penalties that the recipe asks for."""

    requires_advantages: ClassVar[bool] = True
    supports_multi_update: ClassVar[bool] = True
    anchor_fields: ClassVar[tuple[str, ...]] = ("anchor",)
    recomputes_anchor: ClassVar[bool] = True
    requires_ema_rollout: ClassVar[bool] = False

    def __init__(self, params: Params) -> None:
        self.common = params
        self.aggregation: str = params.aggregation
        self.needs_reference = params.kl_coef > 0
        self.needs_entropy = params.entropy or params.entropy_coef != 0
        self.idle_without_advantage = not (self.needs_reference or self.needs_entropy)

    def token_losses(self, micro: Micro, advantages: Tensor, tally: Tally) -> Tensor:
        """[tokens], before weights and mask. `advantages` [tokens]."""
        raise NotImplementedError

    def advantages(self, micro: Micro) -> Tensor:
        assert micro.advantages is not None
        return micro.per_token(micro.advantages)

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        losses = self.token_losses(micro, self.advantages(micro), tally)
        weights = correction(micro, self.common, tally)
        if weights is not None:
            losses = losses * weights
        return self.reduced(losses, micro) + self.penalties(micro, tally)

    def reduced(self, losses: Tensor, micro: Micro) -> Tensor:
        return aggregate(losses, micro.lengths, micro.mask, self.aggregation, self.common.horizon)

    def penalties(self, micro: Micro, tally: Tally) -> Tensor | float:
        """The KL to the reference, and the entropy bonus."""
        out: Tensor | float = 0.0
        if micro.reference is not None and self.common.kl_coef:
            kl = kl_estimate(micro.new, micro.reference, self.common.kl_estimator)
            tally.mean("kl_reference", kl, micro.mask)
            out = out + self.common.kl_coef * self.reduced(kl, micro)
        if micro.entropy is not None:
            tally.mean("entropy", micro.entropy, micro.mask)
            if self.common.entropy_coef:
                out = out - self.common.entropy_coef * self.reduced(micro.entropy, micro)
        return out


class Clipped(PolicyLoss):
    """Losses with a clip range."""

    def __init__(self, params: Params, clip_range: float, clip_range_high: float | None, schedule: str) -> None:
        super().__init__(params)
        self.low, self.schedule = clip_range, schedule
        self.high = clip_range if clip_range_high is None else clip_range_high

    def bounds(self, micro: Micro) -> tuple[float, float]:
        """(low, high) at this point of the training."""
        return scheduled(self.low, self.schedule, micro.progress), scheduled(self.high, self.schedule, micro.progress)


def ratio_figures(tally: Tally, ratio: Tensor, log_ratio: Tensor, low: float, high: float, mask: Tensor) -> None:
    """Ratio mean, std, min, max; what lies beyond either bound; `approx_kl = mean (new - old)^2 / 2`."""
    ratio, log_ratio = ratio.detach(), log_ratio.detach()
    above, below = ratio - 1 > high, 1 - ratio > low
    tally.spread("ratio", ratio, mask)
    tally.mean("clipfrac_gt_one", above.to(ratio.dtype), mask)
    tally.mean("clipfrac_lt_one", below.to(ratio.dtype), mask)
    tally.mean("clip_fraction", (above | below).to(ratio.dtype), mask)
    tally.mean("approx_kl", 0.5 * log_ratio**2, mask)


def kept_figures(tally: Tally, ratio: Tensor, d: Tensor, keep: Tensor | None, mask: Tensor) -> None:
    """Of losses that mask tokens: `approx_kl = mean (r - 1 - d)`, the masked share, the ratio."""
    tally.spread("ratio", ratio.detach(), mask)
    tally.mean("approx_kl", (ratio - 1 - d).detach(), mask)
    if keep is not None:
        tally.mean("masked_fraction", 1 - keep.to(ratio.dtype), mask)
