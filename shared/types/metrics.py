"""Figures of several steps as one. Golden topic 12, `average_metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def average_metrics(found: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """For each key the plain mean over those that have it. Truth values count as 0 or 1, lists of numbers and arrays as their
    mean; a value of another kind (a text, None, an empty list) is as if it were not there.
    """
    values: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            number = _number(value)
            if number is not None:
                values.setdefault(name, []).append(number)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value)
    if isinstance(value, list | tuple | np.ndarray):
        array = np.asarray(value)
        return float(array.astype(np.float64).mean()) if array.size and array.dtype.kind in "biuf" else None
    return None
