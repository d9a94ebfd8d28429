"""Evaluations beside training: some of the workers take them, and none of those leaves a version half evaluated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from services.rollout.seat import Seat
from shared.wire.bodies import BodyStore, DirectoryBodies
from shared.wire.client import connect
from shared.wire.codec import pack
from shared.wire.consumer import Consumer
from shared.wire.envelope import Envelope, Need, PartHead, SliceHead, envelope_fields
from shared.wire.hops import Filled, Result, Work, eval_stage, meta_fields
from shared.wire.keys import JobKeys
from shared.wire.scripts import Scripts

TRACK = "policy"
TRAINING, EVALUATING = "rollout.policy", eval_stage("rollout.policy")
HEAD = SliceHead(parts=(PartHead(ids=("g/0",), track=TRACK),))


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys(uuid4().hex[:8])


def issue(client: Any, keys: JobKeys, kind: Any, count: int) -> None:
    route = (TRAINING if kind == "train" else EVALUATING, "reward")
    for number in range(count):
        gid = f"{kind}:{number}#0"
        client.zadd(keys.open, {gid: 0})
        client.hset(keys.group(gid), mapping={"need": 1, "have": 0})
        envelope = Envelope(
            id=uuid4().hex,
            job=keys.job,
            incarnation=1,
            kind=kind,
            route=route,
            position=0,
            scorers=("a",),
            gid=gid,
            shelf=0,
            slice=(0, 1),
            needs={TRACK: Need("exactly", 0)},
            head=HEAD,
        )
        client.xadd(keys.stage(route[0]), envelope_fields(envelope, b"body"))


def until(check: Callable[[], Any], patience_s: float = 10) -> None:
    deadline = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Worker:
    """A consumer with a seat, maybe, and a handler that takes its time."""

    def __init__(self, redis_url: str, keys: JobKeys, folder: Path, share: float, slots: int = 2) -> None:
        self.slots, self.futures, self.mixed = slots, list[tuple[str, Future[Result]]](), False
        self.done: list[str] = []
        self.seat = Seat(keys, TRACK, uuid4().hex, share, lambda stage: self.consumer.held(stage))
        client = connect(redis_url)
        store = BodyStore(client, keys, DirectoryBodies(folder))
        aside, wanted = [EVALUATING], self.seat.wanted
        self.consumer = Consumer(lambda: connect(redis_url), keys, TRAINING, self, store, aside=aside, wanted=wanted)
        self.thread = threading.Thread(target=self.consumer.run, daemon=True)
        self.thread.start()

    def capacity(self) -> int:
        return self.slots

    def progressed(self) -> float:
        return time.monotonic()

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        evaluating = any(kind == "eval" for kind, _ in self.futures)
        self.mixed |= evaluating and any(work.envelope.kind == "train" for work in works)
        made: list[tuple[str, Future[Result]]] = [(work.envelope.kind, Future()) for work in works]
        self.futures += made
        threading.Timer(0.02, self.finish, [made]).start()
        return [future for _, future in made]

    def finish(self, made: Sequence[tuple[str, Future[Result]]]) -> None:
        for kind, future in made:
            self.futures.remove((kind, future))
            self.done.append(kind)
            future.set_result(Filled(HEAD, [b"filled"]))

    def stop(self) -> None:
        self.consumer.stop()
        self.thread.join(20)


@pytest.mark.parametrize(("share", "seats"), [(0.5, 2), (0.26, 1), (0.01, 1), (1.0, 4)])
def test_a_share_of_the_workers_evaluates(redis_url: str, keys: JobKeys, tmp_path: Path, share: float, seats: int) -> None:
    client = connect(redis_url)
    client.hset(keys.meta, mapping=meta_fields(1, ("rollout.policy", "reward"), ("a",)))
    issue(client, keys, "train", 160)
    workers = [Worker(redis_url, keys, tmp_path, share) for _ in range(4)]
    try:
        until(lambda: share == 1 or client.zcard(keys.present(TRACK)) == 4)
        until(lambda: share == 1 or client.zcard(keys.seats(TRACK)) == seats, 20)
        issue(client, keys, "eval", 16)
        until(lambda: sum(worker.done.count("eval") for worker in workers) == 16, 30)
        assert client.xlen(keys.stage(TRAINING)), "there is no more for training: everybody may evaluate"
        assert sum("eval" in worker.done for worker in workers) <= seats
        until(lambda: client.xlen(keys.stage(TRAINING)) == 0, 60)
    finally:
        for worker in workers:
            worker.stop()
    assert not any(worker.mixed for worker in workers), "training was taken while evaluations were in hand"
    assert sum(worker.done.count("train") for worker in workers) == 160
    assert client.xlen(keys.stage("reward.a")) == 176


def test_seats_pass_on(redis_url: str, keys: JobKeys) -> None:
    """One that does not ask again loses its place; without training everybody has one; fewer workers, fewer seats."""
    client = connect(redis_url)
    scripts = Scripts(client)

    def ask(name: str, share: float = 0.5, ttl_ms: int = 60_000) -> bool:
        return scripts.seat(keys, TRACK, name, ttl_ms, share)

    assert ask("a", ttl_ms=1) and ask("b") and ask("c")  # nothing to train
    client.xadd(keys.stage(TRAINING), {"h": pack(1)})
    assert [ask("a"), ask("b"), ask("c"), ask("d")] == [False, False, True, True]
    assert [ask(name) for name in "abcd"] == [False, False, True, True]
    client.zrem(keys.present(TRACK), "a", "b")
    client.zadd(keys.seats(TRACK), {"c": 1})
    assert [ask("d"), ask("c")] == [True, False]
    client.zadd(keys.present(TRACK), {"d": 1})
    client.zadd(keys.seats(TRACK), {"d": 1})
    assert ask("c", share=0.01) and not ask("e", share=0.01)


def test_who_may_not_evaluate_wakes_up_for_it(redis_url: str, keys: JobKeys) -> None:
    """Without anything that it wants a consumer neither blocks nor spins."""
    asked: list[str] = []

    def wanted(scripts: Scripts, stage: str) -> bool:
        asked.append(stage)
        return False

    nobody: Callable[[], Any] = lambda: connect(redis_url)  # noqa: E731
    consumer = Consumer(nobody, keys, TRAINING, IDLE, None, wanted=wanted)
    thread = threading.Thread(target=consumer.run, daemon=True)
    thread.start()
    time.sleep(1)
    consumer.stop()
    thread.join(5)
    assert 2 <= len(asked) <= 30


class Idle:
    def capacity(self) -> int:
        return 1

    def progressed(self) -> float:
        return time.monotonic()

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        raise AssertionError("nothing was to be taken")


IDLE = Idle()
