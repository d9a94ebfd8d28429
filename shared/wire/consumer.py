"""The one consumer loop: every service that works on a stage's stream runs it."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import redis

from shared.files import waiting_for_space, when_there_is_space
from shared.wire.bodies import BodyStore
from shared.wire.client import AWAY, BLOCK_MS, answered
from shared.wire.codec import pack
from shared.wire.envelope import Dead, Failure
from shared.wire.errors import Fatal, Poison, WireError
from shared.wire.hops import Commit, Handler, Result, Work, commit, read_work, send_all
from shared.wire.keys import GROUP, JobKeys
from shared.wire.scripts import Entry, Scripts, Write, ensure_group, no_group, text

log = logging.getLogger(__name__)

TOGETHER = 32
"""Commits in one script."""
GATHER_S = 0.0003
"""The first of several messages wakes a blocked read; after so long the others are there too, and are worked on together."""


@dataclass(frozen=True)
class Policy:
    """Leases and limits of a stage."""

    lease_s: float = 15.0
    heartbeat_s: float = 3.0
    stall_s: float = 120.0
    """Without progress for so long a lease is no longer renewed."""
    deadline_s: float = 3600.0
    """Longest time that one message may be in hand."""
    max_errors: int = 3
    max_lost: int = 10
    min_losers: int = 2
    """A message is poison by lost leases only if at least so many consumers lost it."""
    grace_s: float = 30.0
    """Longest drain after stop()."""


class Consumer:
    """Takes messages of a stage of one job (or of several), hands them to the handler, commits what comes back.

    Waits for: new entries, expired leases, finished futures. Unblocked by: a producer's commit, the handler, stop().
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        keys: JobKeys,
        stage: str,
        handler: Handler,
        store: BodyStore | None,
        policy: Policy | None = None,
        notes: Callable[[Work], Sequence[Write]] = lambda _: (),
        aside: Sequence[str] = (),
        wanted: Callable[[Scripts, str], bool] = lambda scripts, stage: True,
    ) -> None:
        """
        Args:
            notes: further writes of each commit, made or left out with it (an audit trail).
            aside: stages that are served besides, and first.
            wanted: whether messages of this stage are to be taken now; asked before each read.
        """
        self.keys, self.stage, self.handler, self.store = keys, stage, handler, store
        self.stages = {keys.stage(name): name for name in (*aside, stage)}
        """By stream."""
        self.wanted = wanted
        self.policy, self.notes = policy or Policy(), notes
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"  # never reused: a restart is a new consumer
        self.client = connect()
        self.scripts = Scripts(self.client)
        self.in_hand: dict[Future[Result], Work] = {}
        self.claim_at = 0.0
        self.stopping = threading.Event()
        self.answers: dict[str, int] = {}
        self._lease_scripts = Scripts(connect())
        self._closed = threading.Event()

    def run(self) -> None:
        """Until stop() and nothing is in hand (or the grace period is over)."""
        keeper = threading.Thread(target=self._keep_leases, name=f"leases {self.stage}", daemon=True)
        keeper.start()
        self._ensure_groups()
        try:
            while not self.stopping.is_set():
                self._commit_finished()
                self._take()
            self._drain()
        finally:
            self._closed.set()
            keeper.join()

    def stop(self) -> None:
        self.stopping.set()

    def getting_on(self) -> bool:
        """Whether nothing is in hand, or it makes progress, or waits to be committed."""
        stalled = time.monotonic() - self.handler.progressed() > self.policy.stall_s
        return not stalled or waiting_for_space() or all(future.done() for future in list(self.in_hand))

    def held(self, stage: str) -> int:
        """Messages of this stage in hand."""
        return sum(self.stages[work.entry.stream] == stage for work in list(self.in_hand.values()))

    def _ensure_groups(self) -> None:
        for stream in self.stages:
            answered(lambda: ensure_group(self.client, stream))  # noqa: B023

    # taking ---------------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        room = self.handler.capacity() - len(self.in_hand)
        if room <= 0:
            wait(self.in_hand, timeout=0.5, return_when=FIRST_COMPLETED)
            return
        try:
            streams = [stream for stream, stage in self.stages.items() if self.wanted(self.scripts, stage)]
            entries = self._expired(room, streams) or self._fresh(room, streams)
        except AWAY:
            self.claim_at = time.monotonic() + 2 * self.policy.heartbeat_s  # leases aged while Redis was away
            time.sleep(0.1)
            return
        except redis.ResponseError as error:
            if not no_group(error):
                raise
            self._ensure_groups()
            return
        if works := [work for entry in entries if (work := self._accept(entry)) is not None]:
            for work, future in zip(works, self.handler.submit(works), strict=True):
                self.in_hand[future] = work
        elif self.in_hand:
            wait(self.in_hand, timeout=0.3, return_when=FIRST_COMPLETED)
        elif not streams:
            time.sleep(0.1)

    def _expired(self, room: int, streams: Sequence[str]) -> Sequence[Entry]:
        if time.monotonic() < self.claim_at:
            return []
        self.claim_at = time.monotonic() + self.policy.lease_s / 3 * random.uniform(0.7, 1.3)
        found: list[Entry] = []
        for stream in streams:
            self.scripts.reap(stream, int(20 * self.policy.lease_s * 1000))
            if (left := min(room, 16) - len(found)) > 0:
                found += self.scripts.claim(stream, self.name, int(self.policy.lease_s * 1000), left)
        return found

    def _fresh(self, room: int, streams: Sequence[str]) -> Sequence[Entry]:
        if self.in_hand or not streams:
            return self._read(room, None, streams)
        found = self._read(room, min(BLOCK_MS, int(self.policy.lease_s * 250)), streams)
        if len(found) != 1 or room == 1:
            return found
        rest = self._read(room - 1, None, streams)  # what one commit wrote is all there by now
        if not rest:
            time.sleep(GATHER_S)
            rest = self._read(room - 1, None, streams)
        return found + rest

    def _read(self, count: int, block: int | None, streams: Sequence[str]) -> list[Entry]:
        """Up to `count` of each stream."""
        if not streams:
            return []
        answer = self.client.xreadgroup(GROUP, self.name, dict.fromkeys(streams, ">"), count=count, block=block)
        return [Entry(text(stream), text(i), fields) for stream, rows in answer or [] for i, fields in rows]

    def _accept(self, entry: Entry) -> Work | None:
        """The message to work on; None if it went to the dead letters instead."""
        try:
            work = read_work(entry, time.monotonic())
        except (WireError, KeyError) as error:
            self._refuse(entry, f"unreadable message: {error}", limit=0)
            return None
        if entry.previous is not None:
            lost, losers = answered(lambda: self.scripts.lost(entry, self.name, self._group(entry), self._slot(entry)))
            if lost >= self.policy.max_lost and losers >= self.policy.min_losers:
                self._refuse(entry, f"{lost} leases lost by {losers} workers: the message may kill them", limit=0)
                return None
        return work

    # committing -----------------------------------------------------------------------------------------------------------

    def _commit_finished(self) -> None:
        done = [future for future in self.in_hand if future.done()]
        if not done:
            return
        works = [(self.in_hand[future], future) for future in done]
        good = [(work, future.result()) for work, future in works if future.exception() is None]
        for work, future in works:
            if (error := future.exception()) is not None:
                self._failed(work, error)
        for low in range(0, len(good), TOGETHER):  # in pieces: the next stage starts on the first while others are packed
            self._commit_all(good[low : low + TOGETHER])
        for future in done:
            self.in_hand.pop(future)

    def _commit_all(self, good: Sequence[tuple[Work, Result]]) -> None:
        made = [(work, self._made(work, result)) for work, result in good]
        for stream in self.stages:
            if own := [(work, commit) for work, commit in made if work.entry.stream == stream]:
                self._send(own)

    def _send(self, made: Sequence[tuple[Work, Commit]]) -> None:
        try:
            answers = answered(lambda: send_all(self.scripts, self.keys, self.name, [commit for _, commit in made]))
        except redis.ResponseError as error:
            if len(made) == 1:
                self._failed(made[0][0], error)
                return
            for one in made:  # the others are not to suffer for it
                self._send([one])
            return
        for answer in answers:
            self._count(answer)

    def _made(self, work: Work, result: Result) -> Commit:
        """The commit, its body written. While the disk has no room, the results wait in memory, their leases renewed."""
        extra = self.notes(work)
        stage = self.stages[work.entry.stream]
        make = lambda: commit(self.keys, stage, work, result, self.store, extra)  # noqa: E731
        return when_there_is_space(make, self.say)

    def say(self, warning: str) -> None:
        """A warning for the job's people."""
        log.warning("%s: %s", self.stage, warning, extra={"job": self.keys.job})
        event = Failure(origin=self.stage, error=warning, fatal=False)
        answered(lambda: self.client.xadd(self.keys.inbox, {"e": pack(event)}))

    def _failed(self, work: Work, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))[-4000:]
        log.warning("%s failed: %s", self.stage, trace, extra={"job": self.keys.job, "gid": work.envelope.gid})
        self._refuse(work.entry, trace, limit=0 if isinstance(error, Poison | Fatal | WireError) else None)
        if isinstance(error, Fatal):
            event = Failure(origin=self.stage, error=str(error), fatal=True)
            answered(lambda: self.client.xadd(self.keys.inbox, {"e": pack(event)}))

    def _refuse(self, entry: Entry, error: str, limit: int | None) -> None:
        slot, last = self._slot(entry), error.strip().splitlines()[-1][:300]
        event = pack(Dead(gid=entry.gid, stage=self.stages[entry.stream], error=last))
        most = self.policy.max_errors if limit is None else limit
        answer = answered(lambda: self.scripts.nack(self.keys, entry, self.name, slot, most, error, event))
        if answer == "AGAIN":
            self.claim_at = min(self.claim_at, time.monotonic() + 0.2)
        self._count(answer)

    def _drain(self) -> None:
        deadline = time.monotonic() + self.policy.grace_s
        while self.in_hand and time.monotonic() < deadline:
            wait(self.in_hand, timeout=0.2, return_when=FIRST_COMPLETED)
            self._commit_finished()

    def _count(self, answer: str) -> None:
        self.answers[answer] = self.answers.get(answer, 0) + 1

    def _group(self, entry: Entry) -> str:
        return self.keys.group(entry.gid)

    def _slot(self, entry: Entry) -> str:
        return f"{self.stages[entry.stream]}:{entry.low}"

    # leases ---------------------------------------------------------------------------------------------------------------

    def _keep_leases(self) -> None:
        """Renews what is in hand while the handler makes progress. Runs beside a busy handler, with its own connection."""
        while not self._closed.wait(self.policy.heartbeat_s):
            try:
                self._renew()
            except redis.RedisError as error:
                log.warning("leases of %s were not renewed: %s", self.stage, error)

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self.handler.progressed() > self.policy.stall_s:
            return
        held = [w for w in list(self.in_hand.values()) if now - w.since < self.policy.deadline_s]
        for stream in self.stages:
            if own := {work.entry.id: work for work in held if work.entry.stream == stream}:
                for entry_id in self._lease_scripts.renew(stream, self.name, list(own)):
                    own[entry_id].cancelled.set()
