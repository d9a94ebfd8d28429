"""Which rows go into which update, rank and micro-batch. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def chunks(items: Sequence[T], size: int | None) -> list[Sequence[T]]:
    """Contiguous chunks of at most `size`; None: all at once."""
    if not items:
        return []
    return [items[i : i + (size or len(items))] for i in range(0, len(items), size or len(items))]


def updates(rows: int, count: int) -> list[range]:
    """Equal contiguous mini-batches. ValueError unless `count` divides `rows`."""
    if count < 1 or rows % count:
        raise ValueError(f"num_updates_per_batch {count}: must divide the batch of {rows} rows")
    size = rows // count
    return [range(i * size, (i + 1) * size) for i in range(count)]


def of_rank(rows: Sequence[T], rank: int, size: int) -> Sequence[T]:
    """The rank's contiguous share; shares differ by at most one row."""
    base, extra = divmod(len(rows), size)
    low = rank * base + min(rank, extra)
    return rows[low : low + base + (rank < extra)]
