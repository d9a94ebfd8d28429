"""Between messages and the engine: bodies in, the right weights adopted, filled bodies out."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from queue import Empty, SimpleQueue

from services.rollout.prefetch import Prefetch
from shared.engines.base import Engine, Outcome, Slice
from shared.engines.heads import filled
from shared.types.sample import Sample
from shared.weights.store import WeightStore
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.envelope import Envelope, Need, Span
from shared.wire.errors import BodyLost
from shared.wire.hops import Filled, Result, Suspended, Work, ref_of

log = logging.getLogger(__name__)

LEFT_BEHIND_S = 10.0
"""A shared folder may show an older version later than a newer one, but not so late."""
POLL_S = 0.05
QUIET_S, OVERDUE_S = 0.25, 10.0
"""The probe runs when nothing has come for so long; after the second time without one, in the first gap of POLL_S."""
KEPT_SPANS = 16
"""Of a message that is suspended again and again: heads have a limit."""
ALIKE = 3
"""So many changes of version in a row must not leave the probe's answer as it is."""
Pair = tuple[Work, "Future[Result]"]


class VersionMissing(RuntimeError):
    """The weights that a message needs did not appear in the store."""


class Leaving(Exception):
    """The worker is to stop: what has not begun goes back."""


class RolloutHandler:
    """Works in order of arrival; messages are issued in version order, so versions only rise (but for pinned evaluations)."""

    def __init__(
        self,
        engine: Engine,
        weights: WeightStore,
        prefetch: Prefetch,
        bodies: BodyStore,
        track: str,
        worker: str,
        patience_s: float = 3600,
        most: int | None = None,
    ) -> None:
        """`patience_s`: longest wait for a version that is still to be published. `most`: messages in hand, if fewer than the
        engine takes.
        """
        self.engine, self.weights, self.prefetch, self.bodies = engine, weights, prefetch, bodies
        self.track, self.worker, self.patience_s, self.most = track, worker, patience_s, most
        self.adopted: list[Span] = []
        """Adoptions that no result has told of yet."""
        self.closing, self.suspending = threading.Event(), threading.Event()
        self.held: tuple[int, int] | None = None
        """(incarnation, version) that the engine has; None while that is not certain: then the next one is loaded in full."""
        self.probed: tuple[tuple[int, int], str, float] | None = None
        """A version that the engine was asked about when it had nothing to do: the digest of its bytes, and the answer."""
        self.probed_at = 0.0
        self.alike, self.alarmed = 0, False
        """Versions in a row that should have answered otherwise; whether equal ones that did were told of."""
        self.say: Callable[[str], None] = log.warning
        """Tells people of the job."""
        self.queue: SimpleQueue[list[Pair] | None] = SimpleQueue()
        self.progress = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self.thread.start()

    def capacity(self) -> int:
        return self.engine.capacity() if self.most is None else min(self.most, self.engine.capacity())

    def progressed(self) -> float:
        return max(self.progress, self.engine.progressed())

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        self.progress = time.monotonic()
        pairs: list[Pair] = [(work, Future()) for work in works]
        self.queue.put(pairs)
        return [future for _, future in pairs]

    def suspend(self) -> None:
        """Told to stop: what the engine can hand back unfinished goes to others."""
        self.engine.suspend()
        if self.engine.suspending:
            self.suspending.set()

    def close(self) -> None:
        self.closing.set()
        self.queue.put(None)
        self.thread.join(5)
        self.prefetch.close()
        self.engine.close()

    def _run(self) -> None:
        """Waits for works; adopts what they need, one version after the other."""
        while (pairs := self._next()) is not None:
            for (incarnation, need), same in groupby(pairs, lambda pair: self._need(pair[0].envelope)):
                opened = [(work, future, self._open(work, future)) for work, future in same]
                good = [(work, future, samples) for work, future, samples in opened if samples is not None]
                try:
                    if self.suspending.is_set():
                        raise Leaving
                    self._adopt(incarnation, need, [work for work, _, _ in good])
                except Leaving:
                    for work, future, samples in good:
                        future.set_result(Suspended(work.envelope.head.spans, codec.encode_parts(samples)))
                    continue
                except Exception as error:  # the thread's outer loop: the version is missing, damaged or does not fit
                    for _, future, _ in good:
                        future.set_exception(error)
                    continue
                for alone, some in groupby(good, lambda piece: piece[0].envelope.deterministic):
                    self._start(list(some), alone, alone or need.how == "exactly")

    def _next(self) -> list[Pair] | None:
        """In a gap between messages the engine is asked what it makes of weights that it was not asked about yet."""
        while self.held is not None and (self.probed is None or self.probed[0] != self.held):
            overdue = time.monotonic() - self.probed_at > OVERDUE_S
            try:
                return self.queue.get(timeout=POLL_S if overdue else QUIET_S)
            except Empty:
                self._probe(self.held)
        return self.queue.get()

    def _probe(self, held: tuple[int, int]) -> None:
        """Other bytes must make another answer in the end, and the same ones the same: else the engine does not take them.
        Not while it has other work."""
        try:
            digest = self.weights.digest(*held)
            found = self.engine.probe()
        except Exception as error:  # collected meanwhile, or a model that cannot answer: nothing depends on it
            log.info("version %d is not probed: %s", held[1], error)
            found, digest = math.nan, ""
        if found is None:
            return
        before, self.probed, self.probed_at = self.probed, (held, digest, found), time.monotonic()
        if before is None or not digest or not before[1]:
            return
        same = math.isclose(before[2], found, rel_tol=1e-9)
        self.alike = self.alike + 1 if same and before[1] != digest else 0
        if self.alike == ALIKE:  # one step of a warm-up may move so little that no answer shows it
            what = f"{ALIKE + 1} versions with other bytes each, up to {held[1]}, give the same answer to a fixed text"
            self.say(f"{self.worker}: {what}: does the engine take them?")
        if before[1] == digest and not same and not self.alarmed:
            self.alarmed = True
            what = f"version {held[1]} has the same bytes as {before[0][1]}, but gives another answer to a fixed text"
            self.say(f"{self.worker}: {what}")

    def _need(self, envelope: Envelope) -> tuple[int, Need]:
        return envelope.incarnation, envelope.needs[self.track]

    def _adopt(self, incarnation: int, need: Need, works: Sequence[Work]) -> None:
        """Pulls the version that is needed, unless it is held."""
        if self.held is not None and self.held[0] == incarnation:
            version = self.held[1]
            if version == need.version or (need.how == "at_least" and version > need.version):
                return
        wanted = self._wait(incarnation, need, works)
        started = time.time()
        self.held = None  # an error in the middle leaves a mixture
        self.engine.adopt(self.track, wanted, self.prefetch.take(incarnation, wanted))
        self.adopted.append(Span(f"adopt v{wanted}", self.worker, started, time.time() - started))
        self.held = (incarnation, wanted)
        self.progress = time.monotonic()

    def _wait(self, incarnation: int, need: Need, works: Sequence[Work]) -> int:
        """The version to take: exactly the needed one, or the newest that is at least it.

        Messages may come before the version that they need is complete, so this waits for the trainer as long as it takes; but
        not for a version that newer ones have left behind, nor for messages that have been given to others or withdrawn.
        """
        began = time.monotonic()
        while True:
            if need.how == "exactly" and self.weights.has(incarnation, need.version):
                return need.version
            newest = self.weights.newest(incarnation)
            if need.how == "at_least" and newest is not None and newest >= need.version:
                return newest
            left_behind = newest is not None and newest > need.version
            if (waited := time.monotonic() - began) > (LEFT_BEHIND_S if left_behind else self.patience_s):
                why = f"the store has {newest}" if left_behind else f"did not appear within {waited:.0f} s"
                raise VersionMissing(f"version {need.version} of {self.track}: {why}")
            if self.suspending.is_set():
                raise Leaving
            if self.closing.is_set() or all(work.cancelled.is_set() for work in works):
                raise VersionMissing(f"nobody waits for version {need.version} of {self.track} any more")
            self.progress = time.monotonic()
            self.prefetch.wait(POLL_S)

    def _open(self, work: Work, future: Future[Result]) -> Slice | None:
        """The request's Samples; None if the future has its error."""
        try:
            return codec.decode(work.inline or self.bodies.load(ref_of(work)), list[Sample])
        except (BodyLost, ValueError) as error:
            future.set_exception(error)
            return None

    def _start(self, pieces: Sequence[tuple[Work, Future[Result], Slice]], alone: bool, pinned: bool) -> None:
        started, clock = time.time(), time.monotonic()

        def done(outcomes: Sequence[tuple[int, Outcome]]) -> None:
            own = Span(f"rollout.{self.track}", self.worker, started, time.monotonic() - clock)
            results = [(pieces[place][1], self._result(outcome, pieces[place][0], own)) for place, outcome in outcomes]
            for future, result in results:  # in one go, so that they are committed together
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

        self.engine.submit([samples for _, _, samples in pieces], done, alone, pinned)

    def _result(self, outcome: Outcome, work: Work, own: Span) -> Filled | Suspended | Exception:
        if isinstance(outcome, Exception):
            return outcome
        adopted, self.adopted = self.adopted, []
        spans = (*work.envelope.head.spans, *adopted, own)
        if not all(sample.frontier.filled for sample in outcome):
            begun = any(sample.frontier.segment is not None for sample in outcome)
            return Suspended(spans[-KEPT_SPANS:] if begun else work.envelope.head.spans, codec.encode_parts(outcome))
        try:
            return filled(outcome, spans)
        except ValueError as error:
            return error
