"""What an engine is: slices in, filled slices out. It never sees a message, a lease or a stream."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from shared.types.sample import Sample

Slice = list[Sample]


class Engine(Protocol):
    def submit(self, samples: Slice, alone: bool = False, more: bool = False) -> Future[Slice]:
        """The filled slice.

        Args:
            alone: computed by itself, so that its result depends on it alone.
            more: another submit follows at once; the engine may wait for it.
        """
        ...

    def capacity(self) -> int:
        """Most slices that it wants at once."""
        ...

    def load(self, shards: Sequence[Path]) -> Any:
        """Brings a version into host memory, in any thread, beside the work that goes on."""
        ...

    def adopt(self, track: str, version: int, loaded: Any) -> None:
        """From now on computes with a version that `load` returned. Waits for what has been submitted."""
        ...

    def progressed(self) -> float:
        """time.monotonic() of the last token."""
        ...

    def close(self) -> None: ...
