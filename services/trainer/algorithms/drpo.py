"""DRPO: a quadratic penalty on the ratio in place of a clip.

Yao et al. 2026, "Rethinking the Divergence Regularization in LLM RL" (arXiv 2606.09821); golden topic 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.policy import CLAMP, PolicyLoss, kept_figures
from shared.config.algorithms import Drpo as Params


class Drpo(PolicyLoss):
    """Token loss `-A r + |A| u (r - 1)^2 / (2 eps)`, `u = e^old` if weighted by it, else 1."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.epsilon, self.weighted = params.epsilon, params.weighted

    def token_losses(self, micro: Micro, advantages: Tensor, tally: Tally) -> Tensor:
        d = (micro.new - micro.anchor).clamp(-CLAMP, CLAMP)
        ratio = d.exp()
        old = micro.anchor.detach().exp()
        weight = old if self.weighted else torch.ones_like(old)
        penalty = advantages.abs() * weight * (ratio - 1) ** 2 / (2 * self.epsilon)
        kept_figures(tally, ratio, d, None, micro.mask)
        reach = self.epsilon / weight  # infinite where the old probability is 0
        tally.mean("clipfrac_upper", (ratio > 1 + reach).to(ratio.dtype), micro.mask)
        tally.mean("clipfrac_lower", (ratio < 1 - reach).to(ratio.dtype), micro.mask)
        tally.mean("drpo_penalty", penalty, micro.mask)
        return -advantages * ratio + penalty
