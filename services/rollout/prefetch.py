"""Reads a new version into host memory as soon as it is published, while the engine still works or waits for requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import redis

from shared.weights.store import WeightsDamaged, WeightStore
from shared.wire.codec import Buffer
from shared.wire.keys import JobKeys

log = logging.getLogger(__name__)

POLL_S = 1.0


class Prefetch:
    """Waits for: announcements of the trainer. They are hints: whoever asks for a version that was not read ahead reads it.

    Unblocked by: the trainer's publish, close().
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        keys: JobKeys,
        store: WeightStore,
        load: Callable[[Sequence[tuple[str, Buffer]]], Any],
        holder: str,
    ) -> None:
        """`load` makes tensors of a version's files; `holder` names the leases under which they are read."""
        self.store, self.load, self.holder = store, load, holder
        self.channel = keys.published(store.track)
        self.lock = threading.Lock()
        self.hinted = threading.Event()
        self.staged: tuple[tuple[int, int], Any] | None = None
        self.taken = (0, -1)
        """(incarnation, version) that was asked for last: a hint that comes late says nothing new."""
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(connect(),), name="prefetch", daemon=True)
        self.thread.start()

    def take(self, incarnation: int, version: int) -> Any:
        """The version in host memory, read ahead or now. FileNotFoundError, WeightsDamaged as of the store."""
        with self.lock:
            staged, self.staged = self.staged, None
            self.taken = incarnation, version
            if staged is not None and staged[0] == self.taken:
                return staged[1]
            return self._read(incarnation, version)

    def wait(self, seconds: float) -> None:
        """Until a version is announced, or so long."""
        self.hinted.wait(seconds)
        self.hinted.clear()

    def close(self) -> None:
        self.closed.set()
        self.thread.join(2 * POLL_S)

    def _read(self, incarnation: int, version: int) -> Any:
        with self.store.leased(incarnation, version, self.holder):
            return self.load(self.store.read(incarnation, version))

    def _run(self, client: Any) -> None:
        while not self.closed.is_set():
            try:
                with client.pubsub(ignore_subscribe_messages=True) as hints:
                    hints.subscribe(self.channel)
                    while not self.closed.is_set():
                        if (hint := hints.get_message(timeout=POLL_S)) is not None:
                            self._stage(hint["data"])
            except redis.RedisError:
                self.closed.wait(POLL_S)

    def _stage(self, data: bytes) -> None:
        try:
            place = msgspec.msgpack.decode(data, type=tuple[int, int])
            self.hinted.set()
            with self.lock:  # whoever takes this version meanwhile waits for it
                if place > self.taken:
                    self.staged = place, self._read(*place)
        except (msgspec.MsgspecError, OSError, WeightsDamaged) as error:
            log.warning("a version was not read ahead: %s", error)
