"""Workers without models, on the real consumer loop and the real trainer link: a job runs on them as on a mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

import numpy as np

from services.trainer.link import Link
from shared.config.sections import scorers_of
from shared.config.settings import Settings
from shared.engines.heads import filled
from shared.types import Sample, Text, TextSegment
from shared.wire import codec
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.client import connect
from shared.wire.consumer import Consumer
from shared.wire.envelope import LogEntry, Published, Saved, ScoreHead, Span, Started, Trained
from shared.wire.errors import Poison
from shared.wire.hops import Result, Work, eval_stage
from shared.wire.keys import JobKeys, assignment

Poisonous = Callable[[int], bool]


class Instant:
    """Fills or scores at once, or after `delay` seconds."""

    def __init__(self, stage: str, delay: float, poison: Poisonous, text: str) -> None:
        self.stage, self.delay, self.poison, self.text = stage, delay, poison, text

    def capacity(self) -> int:
        return 256

    def progressed(self) -> float:
        return time.monotonic()

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        time.sleep(self.delay)
        out = []
        for work in works:
            future: Future[Result] = Future()
            row = int(work.envelope.gid.partition("#")[0].rpartition(":")[2])
            if self.stage.startswith("rollout") and work.envelope.kind == "train" and self.poison(row):
                future.set_exception(Poison("poison"))
            else:
                future.set_result(self._result(work))
            out.append(future)
        return out

    def made_by(self, work: Work) -> int:
        """The version that fills it."""
        return work.envelope.needs["policy"].version

    def span(self) -> Span:
        return Span(self.stage, "simulated", time.time() - self.delay, self.delay)

    def _result(self, work: Work) -> Result:
        rows = work.envelope.slice[1] - work.envelope.slice[0]
        if self.stage.startswith("reward"):
            return ScoreHead(scores=tuple(float(i % 2) for i in range(rows)), span=self.span())
        assert work.inline is not None
        [sample] = codec.decode(work.inline, list[Sample])
        segment = TextSegment(
            tokens=np.arange(3 * rows, dtype=np.int32),
            lengths=np.full(rows, 3, np.int32),
            log_probs=np.zeros(3 * rows, np.float32),
        )
        version = np.full(rows, self.made_by(work), np.int64)
        sample = sample.fill(
            segment,
            primitives={"text": (Text(self.text),) * rows},
            status=("ok",) * rows,
            output_version=version,
        )
        return filled([sample], (self.span(),))


def aside_of(stage: str) -> list[str]:
    """Where its evaluations are."""
    return [found] if (found := eval_stage(stage)) != stage else []


class Simulated:
    """One worker per stage and, unless the test brings its own, one trainer, as threads, for the length of a `with` block."""

    def __init__(
        self,
        settings: Settings,
        job: str,
        delay: float = 0.0,
        poison: Poisonous = lambda row: False,
        trains: bool = True,
        text: str = "abc",
    ) -> None:
        """`text`: of every completion; a long one makes bodies that lie on the disk."""
        self.settings, self.job, self.keys = settings, job, JobKeys(job)
        self.train_s = 0.0
        """Seconds that a batch takes."""
        self.stopping = threading.Event()
        document = codec.unpack(self.connect().get(self.keys.doc), dict)
        scorers = [f"reward.{name}" for name in scorers_of(document["recipe"])]
        store = self.store()
        self.consumers = [
            Consumer(self.connect, self.keys, stage, Instant(stage, delay, poison, text), store, aside=aside_of(stage))
            for stage in ["rollout.policy", *scorers]
        ]
        self.threads = [threading.Thread(target=c.run, daemon=True) for c in self.consumers]
        if trains:
            self.threads.append(threading.Thread(target=self.train, daemon=True))

    def connect(self) -> Any:
        return connect(self.settings.redis_url)

    def store(self) -> BodyStore:
        return BodyStore(self.connect(), self.keys, open_bodies(self.settings.bodies, self.job))

    def __enter__(self) -> Simulated:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for consumer in self.consumers:
            consumer.stop()
        for thread in self.threads:
            thread.join(20)

    def train(self) -> None:
        """Applies records at once and opens every body."""
        client, value, name = self.connect(), uuid4().hex.encode(), f"simulated-{self.job}"
        client.set(assignment(name), value)
        link = Link(client, self.keys, self.store(), name, value)
        versions = {"policy": 0}
        link.report(Started(applied_seq=0, versions=versions, published=versions, world_size=1))
        while not self.stopping.is_set():
            entry = link.next()
            if isinstance(entry, LogEntry):
                versions = self.apply(link, entry, versions)
                link.applied(entry)

    def apply(self, link: Link, entry: LogEntry, versions: dict[str, int]) -> dict[str, int]:
        if entry.kind == "train":
            with link.timed("train"):
                link.bodies(entry)
                time.sleep(self.train_s)
            versions = {"policy": versions["policy"] + 1}
            updates, metrics = {"policy": 1}, {"loss": 0.5}
            link.report(
                Trained(seq=entry.seq, id=entry.id, versions=versions, updates=updates, metrics=metrics, spans=link.told())
            )
        elif entry.kind == "publish":
            link.report(Published(track="policy", version=versions["policy"], nbytes=1))
        elif entry.kind == "checkpoint":
            link.report(Saved(seq=entry.seq))
        elif entry.kind == "stop":
            self.stopping.set()
        return versions
