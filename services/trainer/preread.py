"""Reads and decodes filled slices while their rewards are still computed, so that a batch is there when its record comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import redis

from shared.types.sample import Sample
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.codec import Buffer, unpack
from shared.wire.envelope import BodyRef, Envelope
from shared.wire.errors import BodyLost, WireError

log = logging.getLogger(__name__)

BLOCK_MS = 1000
MOST_BYTES = 256 << 20
"""Held at once; what does not fit is read when its record comes."""
FAULTS = (redis.RedisError, OSError, WireError, BodyLost, msgspec.MsgspecError, KeyError, ValueError)


class Opened(NamedTuple):
    """A slice's body, and its Samples if they are decoded already."""

    body: Buffer
    samples: list[Sample] | None = None

    def decoded(self) -> list[Sample]:
        return codec.decode(self.body, list[Sample]) if self.samples is None else self.samples


class Preread:
    """Looks at a reward stream without being one of its workers: what it misses is read later, and nothing waits for it.

    Waits for: filled slices, while the trainer has nothing to do. Unblocked by: commits of rollouts, close().
    """

    def __init__(self, connect: Callable[[], Any], stream: str, store: BodyStore, files: bool = True) -> None:
        """`files` False: what is no key of Redis is left to the ranks that need it."""
        self.client, self.stream, self.store, self.files = connect(), stream, store, files
        self.held: dict[str, Opened] = {}
        """By uri; a body of that name never changes."""
        self.size = 0
        self.idle = threading.Event()
        """Set while the trainer waits: decoding takes time from nobody then."""
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="preread", daemon=True)
        self.thread.start()

    def take(self, refs: Iterable[BodyRef]) -> dict[str, Opened]:
        """Of these bodies, those that were read ahead, by their uri; everything that is held is forgotten."""
        held, self.held, self.size = self.held, {}, 0
        return {ref.uri: held[ref.uri] for ref in refs if ref.uri in held}

    def close(self) -> None:
        self.closed.set()
        self.idle.set()
        self.thread.join(2 * BLOCK_MS / 1000)

    def _run(self) -> None:
        last = "$"
        while not self.closed.is_set():
            if not self.idle.wait(BLOCK_MS / 1000):
                last = "$"  # what came meanwhile has been scored, or is read with its record
                continue
            try:
                answer = self.client.xread({self.stream: last}, count=64, block=BLOCK_MS)
                for entry_id, fields in answer[0][1] if answer else ():
                    last = entry_id
                    self._read(fields)
            except FAULTS as error:
                log.info("not read ahead: %s", error)
                self.closed.wait(0.1)

    def _read(self, fields: dict[bytes, bytes]) -> None:
        envelope = unpack(fields[b"h"], Envelope)
        ref = envelope.head.body
        if envelope.kind != "train" or ref is None or not (self.files or self.store.in_redis(ref)):
            return
        if self.size + ref.nbytes > MOST_BYTES or not self.idle.is_set():
            return
        body = fields.get(b"b") or self.store.load(ref)
        self.held[ref.uri] = Opened(body, codec.decode(body, list[Sample]))
        self.size += ref.nbytes
