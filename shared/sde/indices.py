"""Which denoising steps draw noise: all, a window that wanders over the schedule (MixGRPO, arXiv 2507.21802), or a random few.

Numpy: the controller pins them in the request, by the number of the rollout. Golden topic 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pydantic


class Window(pydantic.BaseModel):
    """Windows start at `init + j (size - overlap)`, full ones only; each stays for a number of rollouts (its dwell)."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    strategy: Literal["all", "progressive", "decay", "exp_decay", "random"] = "all"
    """all: every step. random: a window anywhere, by the rollout's number. The others walk: their dwell is constant, or falls
    with the window's start, linearly or (from a threshold on) exponentially."""
    window_size: int = 4
    iters_per_window: int = 25
    init_timestep: int = pydantic.Field(0, ge=0)
    overlap_size: int = 0
    roll_back: bool = False
    """After the last window the first comes again; otherwise the last one stays."""
    max_iters_per_window: int | None = None
    min_iters_per_window: int | None = None
    """decay: the dwell of a window at the beginning and at the end."""
    exp_decay_threshold: float = 13
    exp_decay_k: float = 0.1

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Window:
        if self.strategy == "all":
            return self
        if self.window_size < 1:
            raise ValueError(f"window_size {self.window_size}: must be at least 1")
        if self.strategy == "random":
            return self
        if not 0 <= self.overlap_size < self.window_size:
            raise ValueError(f"overlap_size {self.overlap_size}: must be 0 to {self.window_size - 1}")
        low, high = self._dwells()
        if low < 1 or high < 1 or self.iters_per_window < 1:
            raise ValueError("iters_per_window, and its least and most: must be at least 1")
        if low > high:
            raise ValueError(f"min_iters_per_window {low}: must be at most max_iters_per_window {high}")
        return self

    def _dwells(self) -> tuple[int, int]:
        high = self.iters_per_window if self.max_iters_per_window is None else self.max_iters_per_window
        low = max(1, self.iters_per_window // 4) if self.min_iters_per_window is None else self.min_iters_per_window
        return (low, high) if self.strategy == "decay" else (1, max(1, high))

    def indices(self, steps: int, rollout: int = 0) -> tuple[int, ...]:
        """Ascending. Near the end of the schedule some may lie behind it: the caller's number of steps decides."""
        if self.strategy == "all":
            return tuple(range(steps))
        if self.strategy == "random":
            start = int(np.random.default_rng(rollout).integers(0, max(0, steps - self.window_size) + 1))
        else:
            start = self._walked(steps, rollout)
        return tuple(range(start, start + self.window_size))

    def _walked(self, steps: int, rollout: int) -> int:
        stride = self.window_size - self.overlap_size
        count = max(1, (steps - self.init_timestep - self.window_size) // stride + 1)
        starts = [self.init_timestep + j * stride for j in range(count)]
        dwells = [self._dwell(start, steps) for start in starts]
        place = rollout % sum(dwells) if self.roll_back else rollout
        for start, dwell in zip(starts, dwells, strict=True):
            if place < dwell:
                return start
            place -= dwell
        return starts[-1]

    def _dwell(self, start: int, steps: int) -> int:
        if self.strategy == "progressive":
            return self.iters_per_window
        if self.strategy == "decay":
            low, high = self._dwells()
            share = start / steps
            return max(low, int(high * (1 - share) + low * share))
        return math.ceil(self.iters_per_window * math.exp(-self.exp_decay_k * max(0.0, start - self.exp_decay_threshold)))


def fraction_range(value: float | Sequence[float]) -> tuple[float, float]:
    """(from, to) as shares of the schedule; a number means up to there. ValueError unless 0 <= from <= to <= 1."""
    pair = (0.0, value) if isinstance(value, int | float) else tuple(value)
    if len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= 1:
        raise ValueError(f"timestep_fraction {value}: must be a share, or two ascending ones, of 0 to 1")
    return float(pair[0]), float(pair[1])


def some_of(steps: int, rollout: int = 0, count: int | None = None, fraction: float | Sequence[float] = 1.0) -> tuple[int, ...]:
    """`count` random steps of a stretch of the schedule, ascending; None takes all of it. ValueError if it has fewer."""
    low, high = fraction_range(fraction)
    pool = range(int(steps * low), int(steps * high))
    if count is None:
        return tuple(pool)
    if not 0 <= count <= len(pool):
        raise ValueError(f"num_sde_steps {count}: must be 0 to {len(pool)}, the steps of that stretch")
    if count == len(pool):
        return tuple(pool)
    chosen: Any = np.random.default_rng(rollout).choice(np.asarray(pool, np.int64), size=count, replace=False) if count else ()
    return tuple(sorted(int(i) for i in chosen))
