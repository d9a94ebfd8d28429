"""Flow-GRPO: GRPO over the stochastic steps of a flow-matching sampler (Liu et al., arXiv 2505.05470).

DanceGRPO (arXiv 2505.07818) is a recipe of it (kernel dance), MixGRPO (arXiv 2507.21802) another (a window of such steps).
"""

from __future__ import annotations

from torch import Tensor

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.flow import FlowMicro, FlowPolicy, ratios
from services.trainer.algorithms.policy import scheduled, surrogate
from shared.config.algorithms import FlowGrpo as Params


class FlowGrpo(FlowPolicy):
    """Mean over samples and steps of `max(-A r, -A clip(r, 1 - c, 1 + c))`, plus `beta` times the KL to the reference."""

    def __init__(self, params: Params) -> None:
        super().__init__(params.beta)
        self.params = params

    def loss(self, micro: FlowMicro, tally: Tally) -> Tensor:
        if not micro.new.numel():
            return micro.new.sum()  # no step draws: nothing to learn from
        clip = scheduled(self.params.clip_range, self.params.clip_schedule, micro.progress)
        ratio = ratios(micro, tally)
        losses, _ = surrogate(micro.new, micro.anchor, micro.columns(), clip, clip)
        outside = (ratio.detach() - 1).abs() > clip
        tally.mean("clip_fraction", outside.float())
        return self.penalized(losses.mean(), micro, tally)
