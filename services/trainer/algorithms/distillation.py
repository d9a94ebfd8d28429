"""On-policy distillation (Agarwal et al., arXiv 2306.13649): the student samples, a frozen teacher scores every token."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.policy import Clipped, ratio_figures, surrogate
from shared.config.algorithms import Distillation as Params


class Distillation(Clipped):
    """Policy gradient on the reverse KL: each token's advantage is `teacher - old`, a constant, in the clipped surrogate.

    At its first update that is the gradient of E[log student - log teacher] on the sampled tokens.
    """

    requires_advantages: ClassVar[bool] = False

    def __init__(self, params: Params) -> None:
        super().__init__(params, params.clip_range, None, "constant")
        self.needs_reference = True
        self.idle_without_advantage = False

    def advantages(self, micro: Micro) -> Tensor:
        assert micro.reference is not None
        return (micro.reference - micro.anchor).detach()

    def token_losses(self, micro: Micro, advantages: Tensor, tally: Tally) -> Tensor:
        low, high = self.bounds(micro)
        losses, ratio = surrogate(micro.new, micro.anchor, advantages, low, high)
        ratio_figures(tally, ratio, micro.new - micro.anchor, low, high, micro.mask)
        tally.mean("teacher_kl", -advantages, micro.mask)
        return losses
