"""A trainer that samples by itself: its ranks fill slices with the weights as they are (layout trainside)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from services.trainer.world import World
from shared.engines.batching import BatchingEngine
from shared.engines.heads import filled
from shared.types.sample import Sample
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.codec import pack, unpack
from shared.wire.consumer import Consumer
from shared.wire.envelope import SliceHead, Span
from shared.wire.errors import BodyLost
from shared.wire.hops import Filled, Result, Suspended, Work, ref_of

log = logging.getLogger(__name__)


class Answer(msgspec.Struct, frozen=True):
    """A filled slice, or why it is none."""

    place: int
    error: str = ""
    head: SliceHead | None = None
    body: bytes = b""


class Sampler:
    """On every rank."""

    def __init__(
        self, engine: BatchingEngine, world: World, ready: Callable[[], AbstractContextManager[Any]], track: str, worker: str
    ) -> None:
        """`ready`: inside, the model can compute on this rank alone."""
        self.engine, self.world, self.ready, self.track, self.worker = engine, world, ready, track, worker
        self.computing = False

    def fill(self, requests: Sequence[bytes], version: int, alone: bool) -> dict[int, Answer]:
        """All ranks must call it, with the same requests; on rank 0 the answers by their places."""
        started, clock = time.time(), time.monotonic()
        self.engine.version = version
        own = range(self.world.rank, len(requests), self.world.size)
        with self.ready():
            self.computing = True
            try:
                outcomes = self.engine.now([codec.decode(requests[place], list[Sample]) for place in own], alone)
            finally:
                self.computing = False
        answers = []
        for place, outcome in zip(own, outcomes, strict=True):
            if isinstance(outcome, Exception):
                answers.append(Answer(place, f"{type(outcome).__name__}: {outcome}"))
                continue
            made = filled(outcome, (Span(f"rollout.{self.track}", self.worker, started, time.monotonic() - clock),))
            answers.append(Answer(place, head=made.head, body=b"".join(made.parts)))
        found = [unpack(data, tuple[Answer, ...]) for data in self.world.collect(pack(answers))]
        return {answer.place: answer for some in found for answer in some}

    def progressed(self) -> float:
        """Of this rank while it computes; while it waits for others, or trains, nothing is to be expected."""
        return self.engine.progressed() if self.computing else time.monotonic()


class Messages:
    """Rank 0's: what the stream has brought, until the loop comes to it."""

    def __init__(self, sampler: Sampler, bodies: BodyStore, incarnation: int, serve: Callable[[Messages], Consumer]) -> None:
        """`serve`: makes the consumer that brings them."""
        self.sampler, self.bodies, self.incarnation = sampler, bodies, incarnation
        self.consumer = serve(self)
        self.lock, self.arrived = threading.Lock(), threading.Event()
        self.waiting: list[tuple[Work, Future[Result]]] = []
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """From now on messages come."""
        self.thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.consumer.run()
        except BaseException as error:  # whatever it was, the trainer's own thread raises it
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def capacity(self) -> int:
        return self.sampler.engine.capacity() * self.sampler.world.size

    def progressed(self) -> float:
        return self.sampler.progressed()

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        pairs: list[tuple[Work, Future[Result]]] = [(work, Future()) for work in works]
        with self.lock:
            self.waiting += pairs
            self.arrived.set()
        return [future for _, future in pairs]

    def ready(self, version: int, patience_s: float) -> list[tuple[Work, Future[Result], bytes]]:
        """Those that this version of the weights can fill, with their bodies. Those for a later one wait for the log."""
        self.arrived.wait(patience_s)
        with self.lock:
            self.arrived.clear()
            pairs, self.waiting = self.waiting, []
        found, later = [], []
        for work, future in pairs:
            need = work.envelope.needs[self.sampler.track].version
            if work.envelope.incarnation == self.incarnation and need > version:
                later.append((work, future))
                continue
            try:
                if work.envelope.incarnation != self.incarnation or need < version:
                    raise ValueError(f"version {need} of incarnation {work.envelope.incarnation} is not to be had any more")
                found.append((work, future, bytes(work.inline or self.bodies.load(ref_of(work)))))
            except (BodyLost, ValueError) as error:
                future.set_exception(error)
        with self.lock:
            self.waiting = later + self.waiting
        return found

    def answer(self, taken: Sequence[tuple[Work, Future[Result], bytes]], answers: dict[int, Answer]) -> None:
        """In one go, so that they are committed together."""
        for place, (_, future, _) in enumerate(taken):
            made = answers[place]
            if made.head is None:
                future.set_exception(ValueError(made.error))
            else:
                future.set_result(Filled(made.head, [made.body]))

    def close(self) -> None:
        """What waits goes back to the stream: whoever comes next does it."""
        if self.thread is None:
            return
        self.consumer.stop()
        deadline = time.monotonic() + 10
        while self.thread.is_alive() and time.monotonic() < deadline:
            with self.lock:
                pairs, self.waiting = self.waiting, []
            for work, future in pairs:
                try:
                    body = work.inline or self.bodies.load(ref_of(work))
                    future.set_result(Suspended(work.envelope.head.spans, [body]))
                except BodyLost as error:
                    future.set_exception(error)
            self.thread.join(0.05)
