"""Flow-DPPO: no clipped ratio; steps whose transition has moved too far are left out where that would push it further."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.flow import FlowMicro, FlowPolicy, ratios, step_kl
from shared.config.algorithms import FlowDppo as Params


class FlowDppo(FlowPolicy):
    """`-A r`, but 0 where `not K < threshold` and (`r > 1` with `A > 0`, or `r < 1` with `A < 0`).

    K is the KL of the new transition to the old one, with the step's std or (without `add_kl_coefficient`) with 1. The mean is
    over all entries, those left out too.
    """

    anchor_fields: ClassVar[tuple[str, ...]] = ("anchor", "anchor_means")

    def __init__(self, params: Params) -> None:
        super().__init__(params.beta)
        self.params = params

    def loss(self, micro: FlowMicro, tally: Tally) -> Tensor:
        if micro.anchor_means is None:
            raise ValueError("flow_dppo needs the old policy's means")
        ratio, advantages = ratios(micro, tally), micro.columns()
        stds = micro.stds if self.params.add_kl_coefficient else torch.ones_like(micro.stds)
        moved = step_kl(micro.means.detach(), micro.anchor_means.detach(), stds)
        r = ratio.detach()
        further = ((r > 1) & (advantages > 0)) | ((r < 1) & (advantages < 0))
        left_out = ~(moved < self.params.kl_mask_threshold) & further
        tally.mean("kl_new_old", moved)
        tally.mean("masked_fraction", left_out.float())
        return self.penalized(torch.where(left_out, 0.0, -advantages * ratio).mean(), micro, tally)
