"""The trainer's loop, the same on every rank: one control word, then what it says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.trainer.backend import Backend
from services.trainer.base_stack import Stack, StepResult
from services.trainer.batch import Batch
from services.trainer.checkpoint import Saver
from services.trainer.link import POLL_MS, Link
from services.trainer.preread import Opened
from services.trainer.publisher import Publisher
from services.trainer.sampler import Messages, Sampler
from services.trainer.world import World
from shared.types.sample import Sample
from shared.weights import checkpoints
from shared.weights.checkpoints import Position
from shared.wire.bodies import Bodies
from shared.wire.codec import pack, unpack
from shared.wire.envelope import LogEntry, Measured, RolledBack, Saved, Span, Started, Trained
from shared.wire.errors import BodyLost

log = logging.getLogger(__name__)

SOON_S, LATER_S, BUSY_S = 0.002, 0.05, 2.0
"""How long a trainer that samples waits for messages before it looks for a record: for so long after it was busy, and later."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells all ranks."""

    kind: str
    """nop, record, generate, or quit (stop without an answer)."""
    entry: LogEntry | None = None
    publish: LogEntry | None = None
    """The publish record that follows this one: its snapshot can be taken before anything else is done."""
    bodies: tuple[bytes | None, ...] = ()
    """Bodies of the record that only rank 0 can read; None for those in files; empty with one rank."""
    requests: tuple[bytes, ...] = ()
    """generate: slices to fill, one body each."""
    alone: bool = False
    """generate: each of them by itself."""


@dataclass
class Trainer:
    """One track's stack, its checkpoints and its publisher. `link` is rank 0's alone."""

    track: str
    stack: Stack
    backend: Backend
    world: World
    saver: Saver
    incarnation: int
    link: Link | None
    publisher: Publisher
    stopping: Any
    """Callable: whether SIGTERM has come to this rank; then all stop between two words."""
    base: str = ""
    """The checkpoint that the incarnation began with."""
    document: bytes = b""
    """The job's, as checkpoints keep it."""
    files: Bodies | None = None
    """Where this rank opens those bodies of its rows that are files."""
    opened: Sequence[Opened | None] = ()
    """Of the record, as far as rank 0 has them."""
    taken: Sequence[Any] = ()
    """Messages that are being answered."""
    busy: float = 0.0
    """When something was last to be done."""
    handed: int = -1
    """Version of the newest snapshot."""
    tick: Callable[[], None] = lambda: None
    """Called at every sign of progress."""
    sampler: Sampler | None = None
    """Of a trainer that rolls out by itself."""
    messages: Messages | None = None
    """Of its rank 0."""

    def run(self) -> None:
        """Waits for: records of the log (rank 0), control words (the others). Unblocked by: the controller's commit."""
        if self.messages is not None:
            self.messages.begin()
        while not self.world.any(self.stopping()):
            self.tick()
            word = unpack(self.world.share(pack(self._next()) if self.link is not None else None), Word)
            if word.kind == "quit":
                break
            if word.kind == "generate":
                self._generate(word)
            if word.entry is not None:
                if word.bodies:
                    self.opened = [None if body is None else Opened(body) for body in word.bodies]
                try:
                    going = self._apply(word.entry, word.publish)
                except BodyLost as error:  # on all ranks, before any of them trained
                    self._lost(word.entry, error)
                    break
                if not going:
                    break
        if self.messages is not None:
            self.messages.close()
        self.publisher.flush(self.handed)
        self.saver.wait()

    def _generate(self, word: Word) -> None:
        assert self.sampler is not None
        answers = self.sampler.fill(word.requests, self.stack.progress.version, word.alone)
        if self.messages is not None:
            self.messages.answer(self.taken, answers)

    def _next(self) -> Word:
        assert self.link is not None
        self.publisher.check()
        self.saver.check()
        if self.messages is not None:
            self.messages.check()
        entry = self.link.next(POLL_MS if self.messages is None else None)
        if entry is None:
            return self._asked()
        if isinstance(entry, RolledBack):
            self.link.report(entry)
            return Word(kind="quit")
        try:
            with self.link.timed("read") if entry.slices else nullcontext():
                self.opened = self.link.bodies(entry, self.world.size == 1)
        except BodyLost as error:
            self._lost(entry, error)
            return Word(kind="quit")
        bodies = tuple(o and bytes(o.body) for o in self.opened) if self.world.size > 1 else ()
        return Word(kind="record", entry=entry, publish=self.link.publish_follows(), bodies=bodies)

    def _asked(self) -> Word:
        """What is to be sampled now that the log has nothing more."""
        if self.messages is not None:
            patience = SOON_S if time.monotonic() - self.busy < BUSY_S else LATER_S
            self.taken = self.messages.ready(self.stack.progress.version, patience)
            if self.taken:
                self.busy = time.monotonic()
                requests = tuple(body for _, _, body in self.taken)
                return Word(kind="generate", requests=requests, alone=self.taken[0][0].envelope.deterministic)
        return Word(kind="nop")

    def _lost(self, entry: LogEntry, error: BodyLost) -> None:
        if self.link is not None:
            self.link.report(RolledBack(seq=entry.seq, detail=f"redo material is gone: {error}"))

    def _apply(self, entry: LogEntry, publish: LogEntry | None) -> bool:
        """One record; False after `stop`."""
        self.busy = time.monotonic()
        match entry.kind:
            case "train":
                self._train(entry, publish)
            case "evaluate":
                self._evaluate(entry)
            case "publish":
                self.publish(entry.pinned)
            case "checkpoint":
                self._save(entry)
        if self.link is not None:
            self.link.applied(entry)
        return entry.kind != "stop"

    def _train(self, entry: LogEntry, publish: LogEntry | None) -> None:
        structlog.contextvars.bind_contextvars(step=entry.step)
        with self.link.timed("train") if self.link is not None else nullcontext():
            result = self.stack.train_track(self._batch(entry))
        if publish is not None:
            self.publish(publish.pinned)
        if self.link is not None:
            self.link.report(self._trained(entry, result, self.link.told()))

    def _batch(self, entry: LogEntry) -> Batch:
        opened, files = self.opened, self.files

        def samples(index: int) -> list[Sample]:
            known, ref = opened[index], entry.slices[index].head.body
            if known is None:
                assert files is not None and ref is not None
                known = Opened(files.get(ref))
            return known.decoded()

        return self.stack.batch(entry.slices, self.track, samples)

    def _evaluate(self, entry: LogEntry) -> None:
        """The loss of held-out targets, under the weights that would be published."""
        started = time.monotonic()
        with self.stack.averaged():
            found = self.stack.measure(self._batch(entry))
        if self.link is None:
            return
        log.info("measured %d records in %.2f s", found.rows, time.monotonic() - started)
        versions = {self.track: self.stack.progress.version}
        self.link.report(Measured(seq=entry.seq, id=entry.id, versions=versions, **found._asdict()))

    def _trained(self, entry: LogEntry, result: StepResult, spans: tuple[Span, ...]) -> Trained:
        return Trained(
            seq=entry.seq,
            id=entry.id,
            versions={self.track: self.stack.progress.version},
            updates={self.track: result.updates},
            metrics=result.metrics,
            reason=result.reason,
            spans=spans,
        )

    def publish(self, pinned: bool = False) -> None:
        """A snapshot now, the writing in the publisher's thread; once for each version."""
        version = self.stack.progress.version
        if version == self.handed:
            if pinned:
                self.publisher.pin(version)
            return
        self.handed = version
        with self.stack.averaged():
            weights = self.backend.weights()
        self.publisher.publish(version, weights, pinned)

    def _save(self, entry: LogEntry) -> None:
        """A copy now, its files by a thread; the marker waits for the publishes before it."""
        words = self.link.words() if self.link is not None else ()
        versions = {self.track: self.stack.progress.version}
        position = Position(self.incarnation, entry.seq, entry.id, versions, entry.step, words, self.base)
        files = {checkpoints.STATE_FILE: entry.state, checkpoints.JOB_FILE: self.document}
        handed = self.handed

        def before() -> None:
            self.publisher.flush(handed)

        def after() -> None:
            assert self.link is not None
            self.link.report(Saved(seq=entry.seq))

        with self.link.timed("checkpoint") if self.link is not None else nullcontext():
            self.saver.save(position, self.stack.state(), files, before, after)

    def resume(self) -> Position | None:
        """Loads the checkpoint that this incarnation goes on from, on all ranks; None without one."""
        place = checkpoints.newest(self.saver.folder, self.incarnation, self.base) if self.world.first else None
        name = self.world.share(str(place or "").encode() if self.world.first else None).decode()
        if not name:
            return None
        folder = Path(name)
        self.stack.load(folder)
        position = checkpoints.position(folder)
        self.stack.progress.version = position.versions[self.track]
        return position

    def start(self) -> None:
        """From the checkpoint on; the incarnation's first version is in the store before anything asks for it."""
        if self.world.first:
            checkpoints.sweep(self.saver.folder)
        position, store = self.resume(), self.publisher.store
        if self.world.first:
            store.drop_parts(self.incarnation)
            store.drop_damaged(self.incarnation)
        version = self.stack.progress.version
        needed = self.world.share(bytes([store.newest(self.incarnation) is None]) if self.world.first else None)
        if needed == b"\x01":
            self.publish()
        if self.link is None:
            return
        self.publisher.flush(self.handed)
        if position is not None:
            self.link.resume(position, self.incarnation)
        newest = store.newest(self.incarnation)
        self.link.report(
            Started(
                applied_seq=self.link.seq,
                versions={self.track: version},
                published={} if newest is None else {self.track: newest},
                world_size=self.world.size,
            )
        )
