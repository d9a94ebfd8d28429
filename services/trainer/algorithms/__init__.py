"""Algorithms by name; specs of the same names stand in shared.config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.trainer.algorithms.base import Algorithm
from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.algorithms.grpo import Grpo

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {"grpo": Grpo, "cross_entropy": CrossEntropy}
