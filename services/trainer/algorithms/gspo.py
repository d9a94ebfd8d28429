"""GSPO: group sequence policy optimization (Zheng et al., arXiv 2507.18071)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.aggregation import per_sequence
from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.policy import Clipped, correction, ratio_figures, surrogate
from shared.config.algorithms import Gspo as Params

MOST = 10.0
"""Bound of a sequence's log-ratio from above."""


class Gspo(Clipped):
    """One ratio a sequence: `d_s = sum(m (new - old)) / max(sum m, 1)`, at most 10; loss `mean_s S(d_s)` over all sequences.

    Those without a token that counts add 0 and stay in the mean.
    """

    def __init__(self, params: Params) -> None:
        super().__init__(params, params.clip_range, params.clip_range_high, params.clip_schedule)
        self.aggregation = "seq-mean-token-mean"

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        assert micro.advantages is not None
        low, high = self.bounds(micro)
        count = per_sequence(micro.mask, micro.lengths)
        total = per_sequence(micro.mask * (micro.new - micro.anchor), micro.lengths)
        d = (total / count.clamp(min=1)).clamp(max=MOST)
        losses, ratio = surrogate(d, torch.zeros_like(d), micro.advantages, low, high)
        valid = (count > 0).to(losses.dtype)
        weights = correction(micro, self.common, tally)
        if weights is not None:  # one weight a sequence: the mean over its tokens, which are equal under `sequence`
            losses = losses * per_sequence(weights * micro.mask, micro.lengths) / count.clamp(min=1)
        ratio_figures(tally, ratio, d, low, high, valid)
        return (losses * valid).mean() + self.penalties(micro, tally)
