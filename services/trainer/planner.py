"""Which rows go into which update, rank and micro-batch. Every rank computes the same plan. Golden topic 10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

T = TypeVar("T")
Cost = Literal["dense", "sum"]
SPREAD = 0.05
"""Shards that differ by less of their mean are left in their order."""


class Size(NamedTuple):
    """Tokens of one row."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


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


def shuffled(rows: int, seed: int, step: int) -> list[int]:
    """The order of rows over several updates: a permutation by a CPU generator seeded `(seed + step) mod 2^32`."""
    generator = torch.Generator().manual_seed((seed + step) % 2**32)
    order: list[int] = torch.randperm(rows, generator=generator).tolist()
    return order


def shuffled_aligned(coarse: Sequence[str], fine: Sequence[str], seed: int, step: int) -> tuple[list[int], list[int]]:
    """One order of two Parts: that of the coarse one's rows, each followed by all of its children among the fine ones.

    ValueError if a row's parent (its id without the last segment) is no row of the coarse Part.
    """
    order = shuffled(len(coarse), seed, step)
    children: dict[str, list[int]] = {name: [] for name in coarse}
    for place, name in enumerate(fine):
        parent = name.rpartition("/")[0]
        if parent not in children:
            raise ValueError(f"row {name!r} has no parent among the rows of the other Part, such as {coarse[0]!r}")
        children[parent].append(place)
    return order, [place for i in order for place in children[coarse[i]]]


def cost(micro: Sequence[Size], kind: Cost) -> int:
    """dense: `(longest prompt + longest response) × rows`, what padded tensors hold. sum: the tokens, what packed ones hold."""
    if not micro:
        return 0
    if kind == "sum":
        return sum(size.total for size in micro)
    return (max(s.prompt for s in micro) + max(s.response for s in micro)) * len(micro)


def first_fit_decreasing(sizes: Sequence[Size], budget: int, kind: Cost) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens: the longest rows first, each into the first that has room. A row that is longer
    than the budget is alone."""
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens: must be at least 1")
    micros: list[list[int]] = []
    held: list[list[Size]] = []
    for index in _longest_first(sizes):
        for micro, members in zip(micros, held, strict=True):
            if cost([*members, sizes[index]], kind) <= budget:
                micro.append(index)
                members.append(sizes[index])
                break
        else:
            micros.append([index])
            held.append([sizes[index]])
    return micros


def balance_into(sizes: Sequence[Size], count: int, kind: Cost) -> list[list[int]]:
    """Exactly `count` micro-batches: the longest rows open them, each other one goes where the cost after adding it is least.

    ValueError for more micro-batches than rows.
    """
    if not 1 <= count <= len(sizes):
        raise ValueError(f"{count} micro-batches of {len(sizes)} rows: must be 1 to {len(sizes)}")
    micros: list[list[int]] = []
    for index in _longest_first(sizes):
        if len(micros) < count:
            micros.append([index])
            continue
        after = [cost([sizes[i] for i in [*micro, index]], kind) for micro in micros]
        micros[after.index(min(after))].append(index)
    return micros


def _longest_first(sizes: Sequence[Size]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i].total, i))


def clean(prompt: int, response: int) -> Size:
    """A row costs at least one token."""
    return Size(max(0, prompt), max(1, response))


def shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Equal shares of the rows with like sums of `lengths`: longest processing time first (Graham, 1969).

    Each row goes to the share with the least that is not full. ValueError unless `count` divides the rows.
    """
    if count < 1 or len(lengths) % count:
        raise ValueError(f"{count} shares: must divide {len(lengths)} rows")
    size = len(lengths) // count
    out: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min((s for s in range(count) if len(out[s]) < size), key=lambda s: (sums[s], s))
        out[target].append(index)
        sums[target] += lengths[index]
    return out


def spread(sums: Sequence[int]) -> float:
    """`(most - least) / mean`, 0 if all are 0."""
    mean = sum(sums) / len(sums)
    return (max(sums) - min(sums)) / mean if mean else 0.0


def of_rank(rows: Sequence[int], lengths: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """The rank's share of an update's rows.

    With equal shares and lengths that differ: shares of like sums; otherwise contiguous ones, which differ by at most one row.
    """
    if size > 1 and len(rows) % size == 0:
        step = len(rows) // size
        own = [lengths[row] for row in rows]
        if spread([sum(own[i * step : (i + 1) * step]) for i in range(size)]) >= SPREAD:
            return sorted(rows[i] for i in shares(own, size)[rank])
    base, extra = divmod(len(rows), size)
    low = rank * base + min(rank, extra)
    return rows[low : low + base + (rank < extra)]
