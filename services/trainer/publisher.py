"""Publishing: a snapshot in host memory is written by a thread, so that training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from shared.weights.store import WeightStore
from shared.wire.envelope import Published

Snapshot = dict[str, Tensor]


class Publisher:
    """One track. Waits for: snapshots. Unblocked by: publish(). Tells `report` of every version that is complete."""

    def __init__(
        self, store: WeightStore, incarnation: int, keep: int, replace: bool, report: Callable[[Published], None]
    ) -> None:
        """`replace`: a newer snapshot replaces an older one that is not written yet (no request demands exactly it)."""
        self.store, self.incarnation, self.keep, self.replace, self.report = store, incarnation, keep, replace, report
        self.waiting: list[tuple[int, Snapshot]] = []
        self.error: BaseException | None = None
        self.change = threading.Condition()
        self.busy = False
        self.thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.thread.start()

    def publish(self, version: int, snapshot: Snapshot) -> None:
        with self.change:
            if self.replace:
                self.waiting.clear()
            self.waiting.append((version, snapshot))
            self.change.notify_all()

    def flush(self) -> None:
        """Until everything is written. Raises what writing raised (a full disk)."""
        with self.change:
            self.change.wait_for(lambda: self.error is not None or (not self.waiting and not self.busy))
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while True:
            with self.change:
                self.change.wait_for(lambda: bool(self.waiting))
                version, snapshot = self.waiting.pop(0)
                self.busy = True
            try:
                self._write(version, snapshot)
            except OSError as error:
                self.error = error
            with self.change:
                self.busy = False
                self.change.notify_all()
            if self.error is not None:
                return

    def _write(self, version: int, snapshot: Snapshot) -> None:
        started = time.monotonic()

        def write(folder: Path) -> None:
            save_file(snapshot, folder / "model.safetensors")

        size = self.store.publish(self.incarnation, version, write)
        seconds = time.monotonic() - started
        self.report(Published(track=self.store.track, version=version, nbytes=size, seconds=seconds))
        self.store.collect(self.incarnation, self.keep)
