"""Publishing: a snapshot in host memory is written by a thread, so that training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shared.files import when_there_is_space
from shared.models.lora import CONFIG
from shared.models.tensors import decode, encode
from shared.weights.store import WeightStore
from shared.wire.codec import Buffer
from shared.wire.envelope import Published

log = logging.getLogger(__name__)

Snapshot = dict[str, Tensor]


@dataclass(frozen=True)
class Adapted:
    """What a version that holds an adapter alone says beside its tensors."""

    base: str
    """Folder of the weights that it applies to."""
    config: str
    """adapter_config.json."""


SHARD_BYTES = 1 << 30
"""Tensors are written in shards of about so much."""


class Publisher:
    """One track. Waits for: snapshots. Unblocked by: publish(). Tells `report` of every version that is complete."""

    def __init__(
        self,
        store: WeightStore,
        incarnation: int,
        keep: int,
        replace: bool,
        report: Callable[[Published], None],
        announce: Callable[[str, int, int], None] = lambda track, incarnation, version: None,
        timed: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        say: Callable[[str], None] = lambda text: None,
        adapter: Adapted | None = None,
        source: str = "live",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """
        Args:
            replace: a newer snapshot replaces an older one that is not written yet (no request demands exactly it).
            report: tells the controller of a complete version.
            announce: tells whoever may want to read it ahead, first.
            timed: notes how long a version took.
            say: tells people why it takes so long.
            source: `ema` if snapshots are moving averages.
            adapter: snapshots hold an adapter alone, and versions are folders that PEFT reads.
            rank, ranks: each rank writes its share; rank 0 completes the version when all are there, and tells of it.
        """
        self.store, self.incarnation, self.keep, self.replace = store, incarnation, keep, replace
        self.report, self.announce, self.timed, self.say = report, announce, timed, say
        self.adapter, self.source, self.rank, self.ranks = adapter, source, rank, ranks
        self.waiting: list[tuple[int, Snapshot, bool]] = []
        self.error: BaseException | None = None
        self.change = threading.Condition()
        self.written = -1
        """The newest version that is complete, or was left out for a newer one."""
        self.thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.thread.start()

    def publish(self, version: int, snapshot: Snapshot, pinned: bool = False) -> None:
        """`pinned`: exactly this version will be asked for."""
        with self.change:
            if self.replace:
                self.waiting = [held for held in self.waiting if held[2]]
            self.waiting.append((version, snapshot, pinned))
            self.change.notify_all()

    def pin(self, version: int) -> None:
        """As `publish` with `pinned`, of a version that was handed over before."""
        with self.change:
            self.waiting = [(v, held, pinned or v == version) for v, held, pinned in self.waiting]

    def flush(self, version: int) -> None:
        """Until this version, if it was handed over, is written or a newer one is in its place. Raises what writing raised."""
        with self.change:
            self.change.wait_for(lambda: self.error is not None or self.written >= version)
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while True:
            with self.change:
                self.change.wait_for(lambda: bool(self.waiting))
                version, snapshot, _ = self.waiting.pop(0)
            try:
                self._write(version, snapshot)
            except BaseException as error:  # whatever it was, the trainer's own thread raises it
                self.error = error
            with self.change:
                self.written = version
                self.change.notify_all()
            if self.error is not None:
                return

    def _write(self, version: int, snapshot: Snapshot) -> None:
        started = time.monotonic()
        if self.rank and self.ranks == 1:
            return  # nothing of it is this rank's
        if self.store.has(self.incarnation, version):
            try:
                self._again(version, snapshot)
            except Exception as error:  # it is a comparison for people: nothing depends on it
                log.info("version %d is not compared: %s", version, error)
        if self.rank:
            files = list(shards(snapshot, rank=self.rank, ranks=self.ranks))
            share = (self.incarnation, version, self.rank)
            when_there_is_space(lambda: self.store.contribute(*share, files), lambda text: self.store.waiting(*share, text))
            return
        with self.timed(f"publish v{version}"):
            size = when_there_is_space(lambda: self._publish(version, snapshot), self.say)
        if size is None:
            return  # another rank had left it out for a newer one, which comes next
        self.announce(self.store.track, self.incarnation, version)
        seconds = time.monotonic() - started
        self.report(Published(track=self.store.track, version=version, nbytes=size, seconds=seconds))
        self.store.collect(self.incarnation, self.keep)

    def _again(self, version: int, snapshot: Snapshot) -> None:
        """A batch that was trained again after a crash: rollouts hold what it made at first, which stays as it is."""
        stored = self.store.read(self.incarnation, version)
        before = {n: v for name, data in stored if name.endswith(".safetensors") for n, v in decode(data).items()}
        gap = max((float((value - before[n]).abs().max()) for n, value in snapshot.items() if value.numel()), default=0.0)
        if gap:
            self.say(
                f"version {version}, trained again, differs from the published one: redo_gap {gap:.3g} (largest of a weight)"
            )

    def _publish(self, version: int, snapshot: Snapshot) -> int | None:
        about: dict[str, Any] = {"source": self.source, "ranks": self.ranks, "say": self.say}
        if self.adapter is None:
            return self.store.publish(self.incarnation, version, shards(snapshot, ranks=self.ranks), **about)
        config: tuple[str, list[Buffer]] = (CONFIG, [self.adapter.config.encode()])
        files = [config, *shards(snapshot, "adapter_model")]
        return self.store.publish(self.incarnation, version, files, kind="lora", base=self.adapter.base, **about)


def shards(snapshot: Snapshot, stem: str = "model", rank: int = 0, ranks: int = 1) -> Iterator[tuple[str, list[Buffer]]]:
    """(file name, bytes in pieces) in safetensors' format; a single one is called `model.safetensors`."""
    pieces: list[Snapshot] = []
    size = SHARD_BYTES
    for name, value in snapshot.items():
        if not pieces or size + value.nbytes > SHARD_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = value
        size += value.nbytes
    of_rank = "" if ranks == 1 else f"-rank{rank:05}"
    for index, piece in enumerate(pieces, 1):
        suffix = "" if len(pieces) == 1 else f"-{index:05}-of-{len(pieces):05}"
        yield f"{stem}{of_rank}{suffix}.safetensors", encode(piece)
