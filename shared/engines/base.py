"""What an engine is: slices in, filled slices out. It never sees a message, a lease or a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from shared.types.sample import Sample
from shared.wire.codec import Buffer

Slice = list[Sample]
Outcome = Slice | Exception
Done = Callable[[Sequence[tuple[int, Outcome]]], None]


class Engine(Protocol):
    def submit(self, slices: Sequence[Slice], done: Done, alone: bool = False, pinned: bool = True) -> None:
        """Fills the slices, in batches with whatever else was submitted; goes on with those that are partly filled.

        Args:
            done: called from the engine's thread with (place in `slices`, filled slice or what went wrong) of those that have
                ended, several at a time; once for each slice.
            alone: each slice is computed by itself, so that its result depends on it alone.
            pinned: no other version of the weights may have a share in it.
        """
        ...

    def capacity(self) -> int:
        """Most slices that it wants at once."""
        ...

    def load(self, files: Sequence[tuple[str, Buffer]]) -> Any:
        """Makes tensors of a version's files (names and bytes), in any thread, beside the work that goes on."""
        ...

    def adopt(self, track: str, version: int, loaded: Any) -> None:
        """From now on computes with a version that `load` returned. Waits for what has been submitted, or where it may, changes
        between two tokens. After an error it may hold a mixture of two versions, until the next one is adopted."""
        ...

    suspending: bool
    """Whether it was told to, and can."""

    def suspend(self) -> None:
        """Hands back soon what it has, unfinished where it is; nothing more is submitted. An engine that cannot goes on."""
        ...

    def probe(self) -> float | None:
        """The log-prob of a fixed text under the weights that it holds; None while it has other work."""
        ...

    def progressed(self) -> float:
        """time.monotonic() of the last token."""
        ...

    def close(self) -> None: ...


def fill(engine: Engine, slices: Sequence[Slice], alone: bool = False) -> list[Slice]:
    """Submits and waits. Raises what went wrong with the first slice that failed."""
    found: SimpleQueue[Sequence[tuple[int, Outcome]]] = SimpleQueue()
    engine.submit(slices, found.put, alone)
    by_place: dict[int, Outcome] = {}
    while len(by_place) < len(slices):
        by_place.update(found.get())
    out = []
    for place in range(len(slices)):
        outcome = by_place[place]
        if isinstance(outcome, Exception):
            raise outcome
        out.append(outcome)
    return out
