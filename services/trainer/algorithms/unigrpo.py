"""UniGRPO's image side: Flow-GRPO whose log-ratio is centred by how far the means have moved, for batches of one sample."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.flow import FlowMicro
from services.trainer.algorithms.flow_grpo import FlowGrpo
from services.trainer.algorithms.policy import surrogate
from shared.config.algorithms import FlowUniGrpo as Params


class FlowUniGrpo(FlowGrpo):
    """Without `ratio_norm` Flow-GRPO. With it the log-ratio of a step is `s ((new - old) + d2 / (2 s^2))`, `d2` the mean
    squared distance of the means, `s` the step's std; `grad_reweight` weighs the losses of the steps by `1 / (sigma - sigma')`,
    divided by their mean. `mse_weight` adds the mean squared distance of the velocities to the reference's.
    """

    anchor_fields: ClassVar[tuple[str, ...]] = ("anchor", "anchor_means")

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.own, self.joint = params, params.grad_reweight
        self.needs_reference = params.beta > 0 or params.mse_weight > 0

    def loss(self, micro: FlowMicro, tally: Tally) -> Tensor:
        loss = self._normed(micro, tally) if self.own.ratio_norm else super().loss(micro, tally)
        if not self.own.mse_weight:
            return loss
        if micro.velocities is None or micro.reference_velocities is None:
            raise ValueError("mse_weight needs velocities, and the reference's")
        distance = ((micro.velocities - micro.reference_velocities.detach()) ** 2).mean()
        tally.mean("mse_reference", distance)
        return loss + self.own.mse_weight * distance

    def _normed(self, micro: FlowMicro, tally: Tally) -> Tensor:
        if micro.anchor_means is None:
            raise ValueError("ratio_norm needs the old policy's means")
        d2 = ((micro.anchor_means.detach() - micro.means) ** 2).flatten(2).mean(2)
        change = micro.stds * ((micro.new - micro.anchor) + d2 / (2 * micro.stds**2))
        clip = self.params.clip_range
        losses, ratio = surrogate(change, change.detach() * 0, micro.columns(), clip, clip)
        tally.mean("ratio_mean", ratio)
        tally.mean("clip_fraction", ((ratio.detach() - 1).abs() > clip).float())
        if self.own.grad_reweight:
            if micro.gaps is None:
                raise ValueError("grad_reweight needs the steps' gaps")
            weights = 1 / micro.gaps
            losses = losses * (weights / weights.mean())
        return losses.mean()
