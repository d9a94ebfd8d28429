"""The loop that drives one job: read the inbox, advance the lifecycle, commit everything in one compare-and-set."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import msgspec
import redis
import structlog

from services.controller.jobs import Job
from services.controller.lifecycles.admission import retained
from services.controller.lifecycles.core import advance, missing
from services.controller.lifecycles.state import (
    BadRecord,
    Command,
    Covered,
    Event,
    Gone,
    Group,
    Issue,
    Restore,
    Root,
    State,
    Tick,
)
from services.controller.messages import Writer, snapshot
from services.controller.pins import Pins
from services.controller.previews import Previews
from services.controller.records import Recorder, Records
from services.controller.restore import restored
from services.controller.tracking import Tracking
from shared import files
from shared.config.settings import Settings
from shared.files import no_space
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.client import AWAY, answered
from shared.wire.codec import unpack
from shared.wire.envelope import ENDED, Span, read_event
from shared.wire.errors import WireError
from shared.wire.keys import GROUP
from shared.wire.scripts import Entry, Scripts, Write, ensure_group, new_revision, no_group, text, xadd

log = logging.getLogger(__name__)

BATCH = 64
"""Most events of one commit."""
BLOCK_MS = 500
COMPUTING = threading.Lock()
PATIENCE_S = 0.2
GATHER_S = 0.0003
"""Results that come within so long are committed together, unless a batch is complete."""


@contextmanager
def in_turn() -> Iterator[None]:
    """Jobs compute one after the other, which costs nothing where threads share an interpreter: answers to requests wait for
    one of them, not for as many as there are jobs. One that reads slowly meanwhile (a data source, a disk) holds nobody up."""
    mine = COMPUTING.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        if mine:
            COMPUTING.release()


class Runner:
    """Owns a job while it holds the job's lease. Whatever it has not committed is only memory.

    Waits for: inbox entries, ticks. Unblocked by: commits of workers and the trainer, the API's commands, stop().
    """

    def __init__(self, connect: Callable[[], Any], job: Job, settings: Settings, lease_ms: int = 10_000) -> None:
        self.job, self.keys, self.settings = job, job.keys, settings
        self.client = connect()
        self.scripts = Scripts(self.client)
        self.token, self.lease_ms = uuid4().hex, lease_ms
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.backend = open_bodies(settings.bodies, job.doc.id)
        previews = Previews(settings.previews(job.doc.id))
        self.writer = Writer(job, BodyStore(self.client, self.keys, self.backend), previews)
        logging_section = job.recipe.logging
        self.recorder = Recorder(
            connect(),
            self.keys,
            BodyStore(connect(), self.keys, self.backend),
            Records(settings.records(job.doc.id)),
            previews,
            logging_section.texts,
            logging_section.keep_steps,
            settings.otlp,
        )
        self.pins = Pins(settings, job.doc.id, self.token, job.doc.plan.live)
        self.tracking = Tracking(connect(), job.doc, settings)
        self.sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        """Sweeping many files takes time that nobody should wait for."""
        self.stopping = threading.Event()
        self.beat = time.monotonic()
        self.claim_at = 0.0
        self.extend_at = 0.0
        self.gone: list[Gone] = []
        """Versions that are needed and not there: the next step's to know."""
        self.refused: list[str] = []
        self.full = ""
        """What was said last of a full disk."""

    def run(self) -> None:
        """Until the job has ended or stop(). Takes the lease whenever it is free."""
        structlog.contextvars.bind_contextvars(job=self.job.doc.id)
        try:
            while not self.stopping.is_set():
                self.beat = time.monotonic()
                try:
                    if self.scripts.lease(self.keys.lease, self.token, self.lease_ms, take=True) == "MINE":
                        with self.recorder.running(), self.tracking.running():
                            if self._hold():
                                return
                except AWAY as error:
                    log.warning("Redis is away (%s)", error)
                self.stopping.wait(0.2)
        finally:
            try:
                self.scripts.release(self.keys.lease, self.token)
            except redis.RedisError:
                log.warning("the lease runs out by itself")
            self.sweeper.shutdown()

    def stop(self) -> None:
        self.stopping.set()

    def _hold(self) -> bool:
        """Under the lease: from the durable state on, until a commit is refused (False) or the job has ended (True)."""
        revision, state = self._load()
        self.pins.forget()
        self.gone = []
        ensure_group(self.client, self.keys.inbox)
        waiting = list(self.scripts.claim(self.keys.inbox, self.token, 0, 1000))
        while not self.stopping.is_set():
            self.beat = time.monotonic()
            if state.root.phase in ENDED:
                self.sweeper.submit(self.backend.remove)
                return True
            if not waiting:
                with in_turn():
                    self.writer.prepare(state)
                waiting = self._read(missing(self.job.doc.plan, state))
            entries, waiting = waiting[:BATCH], waiting[BATCH:]
            try:
                done = self._step(revision, state, entries)
            except OSError as error:
                if not no_space(error):
                    raise
                self._wait_for_space(error)
                entries, waiting = [], [*entries, *waiting]
                continue
            if done is None:
                return False
            revision, state = done
        return False

    def _load(self) -> tuple[str, State]:
        revision, packed = self.client.hmget(self.keys.state, "revision", "snapshot")
        rows = self.client.hgetall(self.keys.rows)
        root = unpack(packed, Root) if packed else Root()
        groups = [unpack(row, Group) for row in rows.values()]
        groups.sort(key=lambda g: (g.kind, g.draw, g.issue))
        return (text(revision) if revision else ""), State(root, {g.gid: g for g in groups})

    def _read(self, missing: int) -> list[Entry]:
        """What is in the inbox. If results come and a batch lacks more of them, those that follow at once as well."""
        try:
            if time.monotonic() > self.claim_at:  # a frozen reader or a lost reply may swallow entries at any time
                self.claim_at = time.monotonic() + 2
                if found := self.scripts.claim(self.keys.inbox, self.token, 1000, BATCH):
                    return found
            entries = self._entries(BLOCK_MS)
            if len(entries) == 1 and missing > 1 and b"g" in entries[0].fields:
                if not (rest := self._entries(None)):  # what one pipeline of commits wrote is mostly there by now
                    time.sleep(GATHER_S)
                    rest = self._entries(None)
                entries += rest
            return entries
        except redis.ResponseError as error:
            if not no_group(error):
                raise
            ensure_group(self.client, self.keys.inbox)
            return []

    def _entries(self, block: int | None) -> list[Entry]:
        answer = self.client.xreadgroup(GROUP, self.token, {self.keys.inbox: ">"}, count=BATCH, block=block)
        return [Entry(self.keys.inbox, text(i), fields) for _, rows in answer or [] for i, fields in rows]

    def _step(self, revision: str, state: State, entries: Sequence[Entry]) -> tuple[str, State] | None:
        """One commit. None: it was refused, or the lease is gone; start again from the durable state."""
        now, clock = time.time(), time.monotonic()
        with in_turn():
            after, commands = self._advance(state, self._events(entries), now, uuid4().hex[:12])
        if any(isinstance(c, Restore) for c in commands):
            restored(self, state, next(c for c in commands if isinstance(c, Restore)), [e.id for e in entries], revision)
            return None
        if not entries and not commands and after.root is state.root:
            self.gone += self.pins.hold(state.root)
            return (revision, state) if self._extended() and self._current(revision) else None
        if any(isinstance(c, Covered) for c in commands):
            self.recorder.flush()
        with in_turn():
            writes = self.writer.writes(state, after, commands)
        for seq, nbytes in self.writer.retained:
            after = State(retained(after.root, seq, nbytes), after.groups)
        writes += [xadd(self.keys.events, {"at": f"{now:.3f}", "level": "warning", "text": t}) for t in self.refused]
        self.refused.clear()
        self.gone = self.pins.hold(after.root)
        done = self.commit(revision, after, [e.id for e in entries], writes)
        if done is not None:
            self.pins.release(after.root)
        if done is not None and (below := [c.below for c in commands if isinstance(c, Covered)]):
            self.sweeper.submit(self._sweep, max(below))
        if entries:
            self.writer.acts.append(Span("commit", self.name, now, time.monotonic() - clock))
        return done

    def _wait_for_space(self, error: OSError) -> None:
        """Nothing of the step was committed: it is made again, its events are still in hand."""
        text = f"controller: no space left: {error}; free some, and it goes on by itself"
        if self.full != text:
            self.client.xadd(self.keys.events, {"at": f"{time.time():.3f}", "level": "warning", "text": text})
        self.full = text
        self.stopping.wait(files.PAUSE_S)
        self._extended()

    def _sweep(self, below: int) -> None:
        """Bodies in files: what the commit unlinked in Redis, and what a controller that died in between had left."""
        try:
            self.backend.sweep(below)
        except OSError as error:
            log.warning("bodies below shelf %d are not swept yet: %s", below, error)

    def commit(self, revision: str, after: State, taken: Sequence[str], writes: Sequence[Write]) -> tuple[str, State] | None:
        fresh = new_revision(revision)

        def call() -> list[str]:
            self.beat = time.monotonic()  # also while Redis is away
            return self.scripts.commit_state(self.keys, self.token, revision, fresh, snapshot(after), taken, writes)

        answer = answered(call, self.stopping.is_set)
        if answer[0] != "OK":
            log.warning("commit answered %s; reloading", answer)
            return None
        if not self._extended():
            return None
        return fresh, after

    def _current(self, revision: str) -> bool:
        """Whether Redis still holds what this runner has in memory: one that lost power may have gone back."""
        held = self.client.hget(self.keys.state, "revision")
        return (text(held) if held else "") == revision

    def _extended(self) -> bool:
        if time.monotonic() < self.extend_at:
            return True
        self.extend_at = time.monotonic() + self.lease_ms / 4000
        return self.scripts.lease(self.keys.lease, self.token, self.lease_ms, take=False) == "MINE"

    def _advance(self, state: State, events: Sequence[Event], now: float, nonce: str) -> tuple[State, list[Command]]:
        """Advances; prompts that turn out unusable are events of the same commit."""
        plan, root_of = self.job.doc.plan, self.job.train.order.root
        after, commands = advance(plan, state, events, Tick(now), nonce, root_of)
        fresh = list(commands)
        while (bad := self.writer.bad_records(fresh)) or (not plan.route and any(isinstance(c, Issue) for c in fresh)):
            found: list[BadRecord] = bad  # without a route the batch that they make forms only now
            after, fresh = advance(plan, after, found, Tick(now), nonce, root_of)
            commands += fresh
        return after, commands

    def _events(self, entries: Sequence[Entry]) -> list[Event]:
        events: list[Event] = list(self.gone)
        for entry in entries:
            try:
                events.append(read_event(entry.fields))
            except (WireError, KeyError, msgspec.MsgspecError) as error:
                self.refused.append(f"unreadable inbox entry {entry.id}: {error}")
        return events
