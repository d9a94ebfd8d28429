"""On-policy distillation of a denoising policy: the student's transitions on its own trajectories follow a teacher's."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.flow import FlowMicro, step_kl
from shared.config.algorithms import DiffusionOpd as Params


class DiffusionOpd:
    """Mean over samples and steps of KL(student means, teacher means), with the step's std or 1. The teacher of a batch is the
    one of its domain."""

    requires_advantages: ClassVar[bool] = False
    supports_multi_update: ClassVar[bool] = True
    anchor_fields: ClassVar[tuple[str, ...]] = ()
    recomputes_anchor: ClassVar[bool] = False
    requires_ema_rollout: ClassVar[bool] = False
    needs_reference = True
    joint: ClassVar[bool] = False

    def __init__(self, params: Params) -> None:
        self.params = params

    def teacher(self, domains: list[str | None]) -> str:
        """The name of the batch's teacher. ValueError for a batch of several domains, of none, or of one without a teacher."""
        names = set(domains)
        if len(names) != 1 or None in names:
            raise ValueError(f"domains {sorted(map(str, names))}: a batch has exactly one")
        [name] = names
        if name not in self.params.teachers:
            raise ValueError(f"domain {name!r}: its teacher is not among {', '.join(self.params.teachers)}")
        return str(name)

    def loss(self, micro: FlowMicro, tally: Tally) -> Tensor:
        if micro.reference_means is None:
            raise ValueError("diffusion_opd needs its teacher's means")
        stds = micro.stds if self.params.add_kl_coefficient else torch.ones_like(micro.stds)
        kl = step_kl(micro.means, micro.reference_means.detach(), stds)
        tally.mean("distill_loss", kl)
        return kl.mean()
