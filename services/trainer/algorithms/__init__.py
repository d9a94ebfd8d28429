"""Algorithms by name; specs of the same names stand in shared.config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.trainer.algorithms.cppo import Cppo
from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.algorithms.diffusion_nft import DiffusionNft
from services.trainer.algorithms.diffusion_opd import DiffusionOpd
from services.trainer.algorithms.distillation import Distillation
from services.trainer.algorithms.dppo import Dppo
from services.trainer.algorithms.drpo import Drpo
from services.trainer.algorithms.flow_dppo import FlowDppo
from services.trainer.algorithms.flow_grpo import FlowGrpo
from services.trainer.algorithms.flow_matching import FlowMatching
from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.gspo import Gspo
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.unigrpo import FlowUniGrpo

ALGORITHMS: dict[str, Callable[[Any], Any]] = {
    "grpo": Grpo,
    "gspo": Gspo,
    "dppo": Dppo,
    "cppo": Cppo,
    "drpo": Drpo,
    "ppo": Ppo,
    "distillation": Distillation,
    "cross_entropy": CrossEntropy,
    "flow_grpo": FlowGrpo,
    "flow_dppo": FlowDppo,
    "flow_unigrpo": FlowUniGrpo,
    "flow_matching": FlowMatching,
    "diffusion_nft": DiffusionNft,
    "diffusion_opd": DiffusionOpd,
}
