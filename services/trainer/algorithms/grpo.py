"""GRPO: group-relative policy optimization (Shao et al., arXiv 2402.03300) with PPO's clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.aggregation import aggregate
from services.trainer.algorithms.base import Micro, Tally
from shared.config.builtin import Grpo as Params


def surrogate(new: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(token losses, ratios): `max(-A r, -A clip(r, 1 - low, 1 + high))` with `r = exp(new - old)`."""
    ratio = (new - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)), ratio


class Grpo:
    idle_without_advantage = True

    def __init__(self, params: Params) -> None:
        self.params = params
        self.aggregation: str = params.aggregation
        self.low = params.clip_range
        self.high = params.clip_range if params.clip_range_high is None else params.clip_range_high

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        assert micro.advantages is not None
        advantages = micro.per_token(micro.advantages)
        losses, ratio = surrogate(micro.new, micro.anchor, advantages, self.low, self.high)
        self._figures(micro, ratio.detach(), tally)
        return aggregate(losses, micro.lengths, micro.mask, self.aggregation, self.params.horizon)

    def _figures(self, micro: Micro, ratio: Tensor, tally: Tally) -> None:
        mask = micro.mask
        above, below = ratio - 1 > self.high, 1 - ratio > self.low
        tally.mean("ratio", ratio, mask)
        tally.peak("ratio_max", ratio, mask)
        tally.mean("clip_fraction", (above | below).to(ratio.dtype), mask)
        tally.mean("approx_kl", 0.5 * (micro.new.detach() - micro.anchor) ** 2, mask)
