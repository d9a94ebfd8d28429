"""Supervised fine-tuning: cross-entropy of the targets at temperature 1, `-sum_t m_t log p(y_t) / sum_t m_t`.

Maximum likelihood, as in the first stage of Ouyang et al. 2022 (arXiv 2203.02155). Golden topic 12, `sft`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.aggregation import aggregate, per_sequence
from services.trainer.algorithms.base import Micro, Tally
from shared.config.algorithms import CrossEntropy as Params


class CrossEntropy:
    requires_advantages: ClassVar[bool] = False
    supports_multi_update: ClassVar[bool] = True
    anchor_fields: ClassVar[tuple[str, ...]] = ()
    recomputes_anchor: ClassVar[bool] = False
    requires_ema_rollout: ClassVar[bool] = False
    idle_without_advantage = False
    needs_reference = False
    needs_entropy = False

    def __init__(self, params: Params) -> None:
        self.aggregation: str = params.aggregation
        self.horizon = params.horizon

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        tally.mean("target_probability", micro.new.detach().exp(), micro.mask)
        if self.aggregation == "seq-mean-token-mean":
            return _sequence_means(-micro.new, micro)
        return aggregate(-micro.new, micro.lengths, micro.mask, self.aggregation, self.horizon)

    def measure(self, micro: Micro) -> tuple[float, float]:
        """Sum of the losses and the weight that divides it, in float64, so that means over a whole set come out right whatever
        its batches: tokens, or the sequences that have any (unlike in training, where the others count as 0).
        """
        nll, mask = -micro.new.detach().double(), micro.mask.double()
        if self.aggregation == "token-mean":
            return float((nll * mask).sum()), float(mask.sum())
        sums, weights = per_sequence(nll * mask, micro.lengths), per_sequence(mask, micro.lengths)
        held = weights > 0
        divisors = weights[held] if self.aggregation == "seq-mean-token-mean" else float(self.horizon)
        return float((sums[held] / divisors).sum()), float(held.sum())


def _sequence_means(nll: Tensor, micro: Micro) -> Tensor:
    """Mean over all sequences of `sum(nll m) / sum(m)`; unlike the policy losses, fractional weights divide as they are."""
    sums, weights = per_sequence(nll * micro.mask, micro.lengths), per_sequence(micro.mask, micro.lengths)
    return torch.where(weights > 0, sums / weights.clamp(min=torch.finfo(weights.dtype).tiny), 0.0).mean()
