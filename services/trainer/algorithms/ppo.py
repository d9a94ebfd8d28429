"""PPO with a critic (Schulman et al., arXiv 1707.06347): the clipped surrogate on GAE advantages, and a clipped value loss."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.aggregation import aggregate
from services.trainer.algorithms.base import MOMENTS, Micro, Tally
from services.trainer.algorithms.policy import Clipped, correction, ratio_figures, surrogate
from shared.config.algorithms import Ppo as Params


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """`0.5 max((V - R)^2, (V0 + clip(V - V0, -c, c) - R)^2)` per token, in float32 at least."""
    if values.dtype.itemsize < 4:
        values, old, returns = values.float(), old.float(), returns.float()
    near = old + (values - old).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


class Ppo(Clipped):
    """Policy loss + `vf_coef` × value loss, both over the tokens that count. The stack makes advantages per token (GAE)."""

    anchor_fields: ClassVar[tuple[str, ...]] = ("anchor", "values")
    requires_advantages: ClassVar[bool] = False

    def __init__(self, params: Params) -> None:
        super().__init__(params, params.clip_range, params.clip_range_high, params.clip_schedule)
        self.params = params
        self.idle_without_advantage = False

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        a, new_values, old_values, returns = micro.token_advantages, micro.values, micro.old_values, micro.returns
        if a is None or new_values is None or old_values is None or returns is None:
            raise ValueError("ppo needs values, returns and advantages of every token: the stack prepares them")
        low, high = self.bounds(micro)
        active = (micro.mask > 0).to(micro.new.dtype)
        losses, ratio = surrogate(micro.new, micro.anchor, a, low, high)
        ratio_figures(tally, ratio, micro.new - micro.anchor, low, high, active)
        weights = correction(micro, self.common, tally)
        if weights is not None:
            losses = losses * weights
        errors = value_losses(new_values, old_values, returns, self.params.cliprange_value)
        self._figures(new_values.detach(), old_values, returns, active, tally)
        mode, horizon = self.aggregation, self.common.horizon
        policy = aggregate(losses, micro.lengths, active, mode, horizon)
        value = aggregate(errors, micro.lengths, active, mode, horizon)
        tally.mean("value_loss", errors, active)
        return policy + self.params.vf_coef * value + self.penalties(micro, tally)

    def _figures(self, values: Tensor, old: Tensor, returns: Tensor, active: Tensor, tally: Tally) -> None:
        tally.mean("value_clip_fraction", ((values - old).abs() > self.params.cliprange_value).to(values.dtype), active)
        for name, column in (("returns", returns), ("errors", returns - values)):
            tally.mean(f"critic{MOMENTS}{name}", column.double(), active)
            tally.mean(f"critic{MOMENTS}{name}2", column.double() ** 2, active)
