"""DPPO: a trust region by the divergence of single probabilities in place of a clipped ratio.

Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), the binary total-variation form;
golden topic 3.
"""

from __future__ import annotations

from torch import Tensor

from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.policy import CLAMP, PolicyLoss, kept_figures
from shared.config.algorithms import Dppo as Params


def dppo_keep(new: Tensor, old: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """1 where the token keeps its gradient: it moves back towards the old policy, or `|e^new - e^old| <= delta`."""
    ratio = (new - old).clamp(-CLAMP, CLAMP).exp()
    near = (new.exp() - old.exp()).abs() <= delta
    return ((advantages * (ratio - 1) <= 0) | near).to(new.dtype).detach()


class Dppo(PolicyLoss):
    """Token loss `-A r keep`, `r = exp(clip(new - old, -20, 20))`."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.delta = params.delta

    def token_losses(self, micro: Micro, advantages: Tensor, tally: Tally) -> Tensor:
        d = (micro.new - micro.anchor).clamp(-CLAMP, CLAMP)
        keep = self.keep(micro, advantages)
        kept_figures(tally, d.exp(), d, keep, micro.mask)
        return -advantages * d.exp() * keep

    def keep(self, micro: Micro, advantages: Tensor) -> Tensor:
        return dppo_keep(micro.new, micro.anchor, advantages, self.delta)
