"""Lineage ids: `root/0/2` is child 2 of child 0 of `root`. A group is the siblings of one parent; nothing else names it."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote


def root_id(source: str, epoch: int, row: int) -> str:
    """`{source}:{epoch}:{row}`; the source's name is percent-encoded, so the id never holds `/`, `#` or a second `:`."""
    return f"{quote(source, safe='')}:{epoch}:{row}"


def child_id(parent: str, index: int) -> str:
    return f"{parent}/{index}"


def parent_id(sample_id: str) -> str | None:
    """The id without its last segment; None for a root."""
    head, slash, _ = sample_id.rpartition("/")
    return head if slash else None


def branch_of(sample_id: str) -> int | None:
    """The sibling index; None for a root. ValueError if the last segment is not a number."""
    _, slash, last = sample_id.rpartition("/")
    if not slash:
        return None
    if not (last.isascii() and last.isdigit()):
        raise ValueError(f"sample id {sample_id!r}: its last segment must be a sibling number")
    return int(last)


def ancestor_id(sample_id: str, depth: int) -> str:
    """The first `depth + 1` segments (depth 0 is the root). ValueError if the id is not that deep."""
    segments = sample_id.split("/")
    if not 0 <= depth < len(segments):
        raise ValueError(f"depth {depth} of sample id {sample_id!r}: legal are 0 to {len(segments) - 1}")
    return "/".join(segments[: depth + 1])


def root_of(sample_id: str) -> str:
    return sample_id.partition("/")[0]


def fork_ids(parents: Iterable[str], n: int) -> tuple[str, ...]:
    """Children `0 … n-1` of each parent, siblings together."""
    if n < 1:
        raise ValueError(f"fork by {n}: must be at least 1")
    return tuple(child_id(parent, index) for parent in parents for index in range(n))


def group_id(root: str, issue: int) -> str:
    """`root#issue`: one issue of a prompt. Each ends in exactly one of trained, dropped, dead."""
    return f"{root}#{issue}"


def split_group_id(gid: str) -> tuple[str, int]:
    root, mark, issue = gid.rpartition("#")
    if not mark or not issue.isdigit():
        raise ValueError(f"group id {gid!r}: must be root#issue")
    return root, int(issue)
