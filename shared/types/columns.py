"""Row operations on a Part's columns: every column holds one entry a row, or is None for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from shared.types.arrays import Array, RawTensor, TensorRef

T = TypeVar("T")


def take(column: Array | None, rows: Sequence[int]) -> Array | None:
    """Rows of an array along its first axis. A TensorRef must have been loaded."""
    if column is None:
        return None
    if isinstance(column, TensorRef):
        raise ValueError(f"rows of {column.body} were asked for before it was loaded")
    if isinstance(column, RawTensor):
        return RawTensor(np.ascontiguousarray(column.data[list(rows)]), column.dtype)
    return column[list(rows)]


def concat_arrays(name: str, columns: Sequence[Array | None]) -> Array | None:
    """Rows of all, or None if all are None."""
    present = [c for c in columns if c is not None]
    if not present:
        return None
    if len(present) != len(columns):
        raise ValueError(f"{name}: some rows have it and some have not")
    first = present[0]
    if isinstance(first, RawTensor):
        return RawTensor(np.concatenate([c.data for c in present]), first.dtype)
    return np.concatenate(present)


def concat_tuples(name: str, columns: Sequence[tuple[T, ...] | None]) -> tuple[T, ...] | None:
    present = [c for c in columns if c is not None]
    if not present:
        return None
    if len(present) != len(columns):
        raise ValueError(f"{name}: some rows have it and some have not")
    return tuple(entry for column in present for entry in column)
