"""Supervised fine-tuning: cross-entropy of the targets at temperature 1. Golden topic 12, `sft`."""

from __future__ import annotations

from torch import Tensor

from services.trainer.aggregation import aggregate
from services.trainer.algorithms.base import Micro, Tally
from shared.config.builtin import CrossEntropy as Params


class CrossEntropy:
    idle_without_advantage = False

    def __init__(self, params: Params) -> None:
        self.aggregation = params.aggregation

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        tally.mean("target_probability", micro.new.detach().exp(), micro.mask)
        return aggregate(-micro.new, micro.lengths, micro.mask, self.aggregation)
