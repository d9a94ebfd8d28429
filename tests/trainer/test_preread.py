"""Reading ahead is a hint: whatever it does or misses, the trainer gets the same bodies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer import preread
from services.trainer.preread import Preread
from shared.engines.heads import filled
from shared.types import ARSamplingParams, Sample, Text, TextSegment
from shared.wire.bodies import BodyStore, DirectoryBodies
from shared.wire.codec import pack
from shared.wire.envelope import BodyRef, Envelope, Need, SliceHead
from shared.wire.keys import JobKeys

KEYS = JobKeys("j")
STREAM = KEYS.stage("reward.exact")


class Stage:
    """What rollouts commit to a reward stream."""

    def __init__(self, client: Any, folder: Path) -> None:
        self.client = client
        self.store = BodyStore(client, KEYS, DirectoryBodies(folder))

    def commit(self, name: str, inline: bool = True, large: bool = False, kind: Any = "train") -> BodyRef:
        sample = Sample.request([name], ARSamplingParams(max_new_tokens=4), n=2, track="policy", texts=["p"], tokens=[[1]])
        text = "x" * (100_000 if large else 1)
        segment = TextSegment(tokens=np.arange(4, dtype=np.int32), lengths=np.full(2, 2, np.int32))
        done = sample.fill(
            segment, primitives={"text": (Text(text),) * 2}, status=("ok", "ok"), output_version=np.zeros(2, np.int64)
        )
        made = filled([done], ())
        ref, small = self.store.place(0, name, made.parts)
        if small is not None:
            self.client.hset(KEYS.shelf(0), name, small)
        head = SliceHead(parts=made.head.parts, body=ref)
        needs = {"policy": Need("exactly", 0)}
        envelope = Envelope(
            id=name, job="j", incarnation=1, kind=kind, route=("rollout.policy", "reward"), position=1, scorers=("exact",),
            gid=f"{name}#0", shelf=0, slice=(0, 2), needs=needs, head=head,
        )  # fmt: skip
        self.client.xadd(STREAM, {"h": pack(envelope)} | ({"b": small} if inline and small is not None else {}))
        return ref


@pytest.fixture
def stage(client: Any, tmp_path: Path) -> Stage:
    return Stage(client, tmp_path)


@pytest.fixture
def ahead(stage: Stage, redis_url: str) -> Iterator[Preread]:
    from shared.wire.client import connect

    found = Preread(lambda: connect(redis_url), STREAM, stage.store)
    yield found
    found.close()
    assert not found.thread.is_alive()


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting(stage: Stage, ahead: Preread) -> None:
    """Until its read is blocked in Redis."""
    ahead.idle.set()
    until(lambda: stage.client.info("clients")["blocked_clients"] >= 1)


def test_bodies_of_every_kind_are_there_before_they_are_asked_for(stage: Stage, ahead: Preread) -> None:
    waiting(stage, ahead)
    refs = [stage.commit("a:0:0"), stage.commit("a:0:1", inline=False), stage.commit("a:0:2", large=True)]
    until(lambda: len(ahead.held) == 3)
    stage.client.xadd(STREAM, {"nonsense": "1"})
    stage.client.xadd(STREAM, {"h": b"\xc1"})
    until(lambda: stage.client.info("clients")["blocked_clients"] >= 1)
    refs.append(stage.commit("a:0:3"))
    until(lambda: len(ahead.held) == 4)
    stage.commit("e:0:0", kind="eval")
    found = ahead.take(refs)
    assert list(found) == [ref.uri for ref in refs] and ahead.take(refs) == {} and ahead.size == 0
    for ref, opened in found.items():
        again = stage.store.load(next(r for r in refs if r.uri == ref))
        assert bytes(opened.body) == bytes(again) and len(opened.decoded()[0].frontier) == 2


def test_nothing_is_read_while_the_trainer_works(stage: Stage, ahead: Preread) -> None:
    stage.commit("a:0:0")
    waiting(stage, ahead)
    ahead.idle.clear()
    stage.commit("a:0:1")
    time.sleep(0.2)
    assert ahead.held == {}
    time.sleep(preread.BLOCK_MS / 1000)
    waiting(stage, ahead)
    ref = stage.commit("a:0:2")
    until(lambda: list(ahead.held) == [ref.uri])


def test_what_is_held_has_a_limit(stage: Stage, ahead: Preread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preread, "MOST_BYTES", 300_000)
    waiting(stage, ahead)
    refs = [stage.commit(f"a:0:{i}", large=True) for i in range(3)]
    last = stage.commit("a:0:9")
    until(lambda: last.uri in ahead.held)
    assert len(ahead.take(refs)) == 1
