"""From what a scorer returned to scores: anything that is no finite number is a failure, never a 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shared.types.rewards import RewardRequest, RewardResponse, is_score

Score = Callable[[Sequence[RewardRequest]], Any]


def verdict(score: Score, rows: Sequence[RewardRequest]) -> RewardResponse:
    """Scores all rows at once; if that raises, row by row, so that one bad row fails alone.

    A failed row has NaN and a reason: None, not a number, not finite, an exception, or a wrong number of scores.
    """
    try:
        values = score(rows)
    except Exception as error:  # the scorer is foreign code: whatever it raises is its verdict
        if len(rows) == 1:
            return RewardResponse(scores=(math.nan,), errors={0: _reason(error)})
        return _joined([verdict(score, [row]) for row in rows])
    return checked(values, len(rows))


def checked(values: Any, rows: int) -> RewardResponse:
    try:
        found = [v.item() if isinstance(v, np.generic) else v for v in values]
    except TypeError:
        return failed(rows, f"the scorer returned {type(values).__name__}, not a list of scores")
    if len(found) != rows:
        return failed(rows, f"the scorer returned {len(found)} scores for {rows} rows")
    errors = {i: f"the score is {v!r}, not a finite number" for i, v in enumerate(found) if not is_score(v)}
    return RewardResponse(scores=tuple(math.nan if i in errors else float(v) for i, v in enumerate(found)), errors=errors)


def failed(rows: int, reason: str) -> RewardResponse:
    return RewardResponse(scores=(math.nan,) * rows, errors=dict.fromkeys(range(rows), reason))


def _joined(parts: Sequence[RewardResponse]) -> RewardResponse:
    scores = tuple(s for part in parts for s in part.scores)
    return RewardResponse(scores=scores, errors={i: part.errors[0] for i, part in enumerate(parts) if part.errors})


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
