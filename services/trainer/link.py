"""Rank 0's line to Redis: the train log in, words to the controller out, every one of them fenced."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import redis

from services.trainer.preread import Opened, Preread
from shared.weights.checkpoints import Position
from shared.wire.bodies import BodyStore
from shared.wire.client import AWAY, answered
from shared.wire.codec import pack, unpack
from shared.wire.envelope import Failure, LogEntry, Measured, Message, RolledBack, Saved, Span, Trained
from shared.wire.errors import BodyLost
from shared.wire.keys import JobKeys, assignment
from shared.wire.scripts import Scripts, text

POLL_MS = 1000
AHEAD = 4
"""Records read at once: a batch and the control words behind it."""


class Fenced(SystemExit):
    """A newer trainer has the job."""


class Link:
    """Reads the log from `applied_seq` on. No consumer group: what has been applied is the checkpoint's to know."""

    def __init__(
        self,
        client: Any,
        keys: JobKeys,
        store: BodyStore,
        agent: str,
        packed_assignment: bytes,
        preread: Preread | None = None,
    ) -> None:
        """`preread` reads bodies before their record comes."""
        self.client, self.keys, self.store, self.preread = client, keys, store, preread
        self.scripts = Scripts(client)
        self.lock = threading.Lock()
        self.fence = uuid4().hex
        self.seq, self.entry_id = 0, ""
        self.ahead: deque[tuple[bytes, dict[bytes, bytes]]] = deque()
        self.recent: deque[tuple[Message, bytes]] = deque(maxlen=16)
        """What was reported lately: a Redis that comes back without it is told again."""
        self.looked = 0.0
        """When the log was last compared with what was applied of it."""
        self.worker = agent
        self.spans: list[Span] = []
        """What this rank did, and no word has told of yet."""
        self.run_id = self._server()
        answer = answered(lambda: self.scripts.run("fence", [assignment(agent), keys.meta], packed_assignment, self.fence))
        if text(answer) != "OK":
            raise Fenced("the assignment is no longer this worker's")

    @property
    def incarnation(self) -> int:
        return int(answered(lambda: self.client.hget(self.keys.meta, "incarnation")))

    def report(self, *events: Message) -> None:
        """Into the controller's inbox, if this is still the job's trainer."""
        packed = [pack(event) for event in events]
        self._send(packed)
        self.recent.extend(zip(events, packed, strict=True))

    def warn(self, text: str) -> None:
        """For people; the job goes on."""
        self.report(Failure(origin="trainer", error=text, fatal=False))

    def announce(self, track: str, incarnation: int, version: int) -> None:
        """Tells rollouts that they may read a version ahead. A hint: nobody waits for it."""
        with contextlib.suppress(redis.RedisError):
            self.client.publish(self.keys.published(track), pack((incarnation, version)))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes the time for the next word on a trained record."""
        start, clock = time.time(), time.monotonic()
        try:
            yield
        finally:
            self.spans.append(Span(name, self.worker, start, time.monotonic() - clock))

    def told(self) -> tuple[Span, ...]:
        """The spans so far, which are then told."""
        found, self.spans = self.spans, []
        return tuple(found)

    def words(self) -> tuple[bytes, ...]:
        """What a checkpoint keeps of what was reported: the records that nobody will redo after it."""
        return tuple(packed for event, packed in list(self.recent) if isinstance(event, Trained | Measured))

    def resume(self, position: Position, incarnation: int) -> None:
        """Goes on after a checkpoint. Whether the controller has heard of its records is unknown, so it is told again."""
        if position.incarnation != incarnation:  # the controller came here itself, and begins a log of its own
            self.seq, self.entry_id = position.seq, ""
            return
        self.seq, self.entry_id = position.seq, position.entry_id
        words: list[Trained | Measured] = [unpack(word, Trained | Measured) for word in position.words]  # type: ignore[arg-type]
        self.report(*words, Saved(seq=position.seq))

    def _send(self, packed: Sequence[bytes]) -> None:
        with self.lock:
            answer = answered(lambda: self.scripts.report(self.keys, self.fence, packed))
        if answer != "OK":
            raise Fenced("a newer trainer has the job")

    def _server(self) -> str:
        """Identifies the Redis process: another one may have lost what the last one had acknowledged."""
        return str(answered(lambda: self.client.info("server"))["run_id"])

    def next(self, block_ms: int | None = POLL_MS) -> LogEntry | RolledBack | None:
        """The next record; None after so long without one; RolledBack if the log is not the one that was applied."""
        if not self.ahead:
            try:
                answer = self._read(block_ms)
                if not answer:
                    if time.monotonic() - self.looked < POLL_MS / 1000:
                        return None
                    self.looked = time.monotonic()
                    return self._lost()
            except AWAY:
                return None
            self.ahead.extend(answer[0][1])
        entry_id, fields = self.ahead.popleft()
        entry = unpack(fields[b"e"], LogEntry)
        if text(entry_id) != f"{self.seq + 1}-0" or entry.previous != self.entry_id:
            detail = f"record {entry.seq} follows {entry.previous!r}, applied was {self.seq} {self.entry_id!r}"
            return RolledBack(seq=self.seq, detail=detail)
        return entry

    def _read(self, block_ms: int | None) -> Any:
        if self.preread is None:
            return self.client.xread({self.keys.log: f"{self.seq}-0"}, count=AHEAD, block=block_ms)
        self.preread.idle.set()
        try:
            return self.client.xread({self.keys.log: f"{self.seq}-0"}, count=AHEAD, block=block_ms)
        finally:
            self.preread.idle.clear()

    def publish_follows(self) -> LogEntry | None:
        """The record after the one just returned, if it is known and a publish."""
        following = unpack(self.ahead[0][1][b"e"], LogEntry) if self.ahead else None
        return following if following is not None and following.kind == "publish" else None

    def _lost(self) -> RolledBack | None:
        """On an idle poll: the record applied last must still be there, or lie below the trimmed part."""
        if (server := self._server()) != self.run_id:
            self.run_id = server
            self._send([packed for _, packed in list(self.recent)])
        if not self.entry_id:
            return None  # nothing of this log has been applied
        found = self.client.xrange(self.keys.log, f"{self.seq}-0", f"{self.seq}-0")
        if found:
            entry = unpack(found[0][1][b"e"], LogEntry)
            same = entry.id == self.entry_id
            return None if same else RolledBack(seq=self.seq, detail=f"record {self.seq} is now {entry.id!r}")
        newest = self._newest()
        if newest >= self.seq:
            return None  # trimmed: a complete checkpoint covers it
        return RolledBack(seq=self.seq, detail=f"the log ends at {newest}, record {self.seq} was applied")

    def _newest(self) -> int:
        if not self.client.exists(self.keys.log):
            return 0
        info = self.client.xinfo_stream(self.keys.log)
        return int(text(info["last-generated-id"]).partition("-")[0])

    def applied(self, entry: LogEntry) -> None:
        self.seq, self.entry_id = entry.seq, entry.id

    def bodies(self, entry: LogEntry, alone: bool = True) -> list[Opened | None]:
        """Of all slices, in order. BodyLost if one is gone.

        Where this rank is not `alone`, None for those in files, which each rank opens for its own rows.
        """
        refs = [piece.head.body for piece in entry.slices]
        known = [ref for ref in refs if ref is not None]
        if len(known) != len(refs):
            raise BodyLost(f"record {entry.seq} names a slice without a body")
        held = {} if self.preread is None or not known else self.preread.take(known)
        wanted = [alone or self.store.in_redis(ref) for ref in known]
        asked = [ref for ref, load in zip(known, wanted, strict=True) if load and ref.uri not in held]
        loaded = iter(answered(lambda: self.store.load_many(asked)) if asked else ())
        return [
            None if not load else held[ref.uri] if ref.uri in held else Opened(next(loaded))
            for ref, load in zip(known, wanted, strict=True)
        ]
