"""GRPO: group-relative policy optimization (Shao et al., arXiv 2402.03300) with PPO's clipped surrogate.

Dr.GRPO (arXiv 2503.20783) is a recipe of it: `advantage.normalize: false`, `aggregation: seq-mean-token-sum-norm`. DAPO (arXiv
2503.14476) is another: `clip_range_high`, token-mean, `reward.truncation: soft`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.policy import Clipped, ratio_figures, surrogate
from shared.config.algorithms import Grpo as Params


class Grpo(Clipped):
    """Token losses `max(-A r, -A clip(r, 1 - low, 1 + high))`.

    With `dual_clip` c (Ye et al., arXiv 1912.09729), where A < 0 they are at most `-A c`.
    """

    def __init__(self, params: Params) -> None:
        super().__init__(params, params.clip_range, params.clip_range_high, params.clip_schedule)
        self.dual_clip = params.dual_clip

    def token_losses(self, micro: Micro, advantages: Tensor, tally: Tally) -> Tensor:
        low, high = self.bounds(micro)
        losses, ratio = surrogate(micro.new, micro.anchor, advantages, low, high)
        ratio_figures(tally, ratio, micro.new - micro.anchor, low, high, micro.mask)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            capped = (advantages < 0) & (losses > bound)
            tally.mean("dual_clip_fraction", capped.to(losses.dtype), micro.mask)
            losses = torch.where(capped, bound, losses)
        return losses
