"""CPPO: DPPO's mask (arXiv 2602.04879) with a budget that a sequence uses up from its beginning, so that early tokens, which
all later ones stand on, are held closer. The formula below is golden topic 3's, of UniRL 0.2.0; it is another method than the
pruning of completions that is called CPPO too (arXiv 2503.22342)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.algorithms.base import Micro
from services.trainer.algorithms.dppo import Dppo
from services.trainer.algorithms.policy import CLAMP
from shared.config.algorithms import Cppo as Params


def cppo_keep(
    new: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor, delta: float, least_weight: float, delta_b: float
) -> Tensor:
    """1 where the token keeps its gradient: `A (r - 1) <= 0` or `Z_t <= c_t`.

    In a sequence of T tokens `w_t = 1 - (1 - w_min)(t - 1)/max(T - 1, 1)`, `D_t = |e^new - e^old|`, `Z_t = w_t D_t`,
    `b = clip(q90(D), delta_b, 2 delta_b)`, `c_t = min(delta, delta + b sum_{u<t} w_u - sum_{u<t} Z_u)`. The loss mask
    takes no part.
    """
    d = (new - old).clamp(-CLAMP, CLAMP)
    back = advantages * (d.exp() - 1) <= 0
    divergence = (new.exp() - old.exp()).abs()
    within: list[Tensor] = []
    for part in torch.split(divergence.detach(), lengths.tolist()):
        if not len(part):
            continue
        steps = torch.arange(len(part), dtype=part.dtype, device=part.device)
        weight = 1 - (1 - least_weight) * steps / max(len(part) - 1, 1)
        z = weight * part
        b = torch.quantile(part, 0.9).clamp(delta_b, 2 * delta_b)
        before = b * (weight.cumsum(0) - weight) - (z.cumsum(0) - z)
        within.append(z <= (delta + before).clamp(max=delta))
    inside = torch.cat(within) if within else torch.zeros_like(back)
    return (back | inside).to(new.dtype).detach()


class Cppo(Dppo):
    """Token loss `-A r keep`, as DPPO."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.params = params

    def keep(self, micro: Micro, advantages: Tensor) -> Tensor:
        p = self.params
        return cppo_keep(micro.new, micro.anchor, advantages, micro.lengths, p.delta, p.least_weight, p.delta_b)
