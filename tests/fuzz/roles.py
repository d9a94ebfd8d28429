"""The processes of the fuzz: the real runner, consumer loop and trainer link around handlers that only wait."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import redis

from services.controller.jobs import load_doc, open_job
from services.controller.runner import Runner
from services.trainer.link import Link
from shared.agent.process import die_with_parent
from shared.config.settings import Settings
from shared.types import Sample, Text, TextSegment
from shared.weights import checkpoints
from shared.weights.checkpoints import Position
from shared.wire import codec
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.client import AWAY, answered, connect
from shared.wire.consumer import Consumer, Policy
from shared.wire.envelope import (
    LogEntry,
    PartHead,
    Published,
    RolledBack,
    Saved,
    ScoreHead,
    SliceHead,
    Started,
    Trained,
)
from shared.wire.errors import Poison
from shared.wire.hops import Filled, Result, Work, hop_writes
from shared.wire.keys import GROUP, JobKeys, assignment
from shared.wire.scripts import Write, xadd
from tests.conftest import saving

LEASE_MS = 600
POLICY = Policy(lease_s=LEASE_MS / 1000, heartbeat_s=0.15, stall_s=5, max_errors=5, max_lost=40, grace_s=1)


@dataclass(frozen=True)
class Plan:
    """What every process of a run needs; `mode` is scripts or naive."""

    settings: Settings
    job: str
    mode: str
    folder: Path

    @property
    def keys(self) -> JobKeys:
        return JobKeys(self.job)

    def connect(self) -> Any:
        return connect(self.settings.redis_url)

    def store(self) -> BodyStore:
        return BodyStore(self.connect(), self.keys, open_bodies(self.settings.bodies, self.job), redis_limit=400)


class Dawdler:
    """Finishes each message after a while, in a thread of its own; some fail, some are poison, some hang their progress."""

    def __init__(self, stage: str) -> None:
        self.stage, self.random = stage, random.Random(os.getpid())
        self.hung = self.random.random() < 0.05

    def capacity(self) -> int:
        return 4

    def progressed(self) -> float:
        return 0.0 if self.hung else time.monotonic()

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        return [self._one(work) for work in works]

    def _one(self, work: Work) -> Future[Result]:
        luck, future = self.random.random(), Future[Result]()
        low, high = (0.7, 1.2) if luck < 0.03 else (0.005, 0.08)
        threading.Timer(self.random.uniform(low, high), self._finish, (work, future)).start()
        return future

    def _finish(self, work: Work, future: Future[Result]) -> None:
        row = int(work.envelope.gid.partition("#")[0].rpartition(":")[2])
        if self.stage == "rollout.policy" and row % 50 == 37:
            future.set_exception(Poison("never generable"))
        elif self.random.random() < 0.03:
            future.set_exception(RuntimeError("handler failed"))
        else:
            future.set_result(self._result(work))

    def _result(self, work: Work) -> Result:
        if self.stage != "rollout.policy":
            return ScoreHead(scores=(0.0, 1.0))
        need = work.envelope.needs["policy"].version
        assert work.inline is not None
        [sample] = codec.decode(work.inline, list[Sample])
        segment = TextSegment.of([list(range(30)), [1, 2]])
        versions = np.full(2, need, np.int64)
        sample = sample.fill(segment, primitives={"text": (Text("a"), Text("b"))}, output_version=versions)
        head = PartHead(
            ids=sample.frontier.sample_ids, track="policy", lengths=(30, 2), versions=(need, need), status=("ok", "ok")
        )
        return Filled(SliceHead(parts=(head,)), codec.encode_parts([sample]))


class NaiveConsumer(Consumer):
    """At least once, as usually written: outputs first, then the acknowledgement, in separate calls."""

    def _commit_all(self, good: Sequence[tuple[Work, Result]]) -> None:
        for work, result in good:
            answered(lambda: self._naive(work, result))  # noqa: B023

    def _naive(self, work: Work, result: Result) -> None:
        keys, gid, low = self.keys, work.envelope.gid, work.envelope.slice[0]
        if isinstance(result, ScoreHead):
            group = keys.group(gid)
            self.client.hset(group, f"s:{self.stage.removeprefix('reward.')}:{low}", codec.pack(result))
            all_fields = self.client.hgetall(group)
            slots = {k: v for k, v in all_fields.items() if k[:2] in (b"s:", b"h:")}
            if sum(k[:2] == b"s:" for k in slots) == int(all_fields.get(b"need", b"-1")):
                self.client.xadd(keys.inbox, {"g": gid} | slots)
        else:
            assert self.store is not None and isinstance(result, Filled)
            self._write(hop_writes(keys, work, result, self.store))
        self._write(self.notes(work))
        self.client.xack(work.entry.stream, GROUP, work.entry.id)
        self.client.xdel(work.entry.stream, work.entry.id)

    def _write(self, writes: Sequence[Write]) -> None:
        for write in writes:
            if write.command == "HSET":
                self.client.hset(write.key, mapping=dict(zip(write.args[::2], write.args[1::2], strict=True)))
            else:
                fields = write.args[1:]
                self.client.xadd(write.key, dict(zip(fields[::2], fields[1::2], strict=True)))


def worker(plan: Plan, stage: str) -> None:
    die_with_parent()
    kind = Consumer if plan.mode == "scripts" else NaiveConsumer

    def note(work: Work) -> list[Write]:
        return [
            xadd(plan.keys.of("audit"), {"stage": stage, "gid": work.envelope.gid, "incarnation": work.envelope.incarnation})
        ]

    kind(plan.connect, plan.keys, stage, Dawdler(stage), plan.store(), POLICY, note).run()


def controller(plan: Plan) -> None:
    die_with_parent()
    doc = answered(lambda: load_doc(plan.connect(), plan.job))
    assert doc is not None
    Runner(plan.connect, open_job(doc, plan.settings), plan.settings, LEASE_MS).run()


class Applied:
    """What a trainer holds outside Redis: a file of applied records, cut back to the last checkpoint when the log went back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def cut_back(self, position: Position | None) -> None:
        """To the newest complete checkpoint, as a real trainer's model would be."""
        rows = self.rows()
        while rows and (position is None or rows[-1]["id"] != position.entry_id):
            rows.pop()
        temporary = self.path.with_suffix(".new")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in rows))
        temporary.rename(self.path)


def trainer(plan: Plan) -> None:
    """Applies the log like the real one: from its last checkpoint on, redo included, nothing twice."""
    die_with_parent()
    while True:
        try:
            _train(plan, Applied(plan.folder / "applied"))
        except SystemExit:
            pass
        except AWAY:
            time.sleep(0.05)
        except redis.ResponseError:
            time.sleep(0.05)


def _train(plan: Plan, applied: Applied) -> None:
    folder = checkpoints.newest(plan.settings.checkpoints(plan.job))
    position = checkpoints.position(folder) if folder is not None else None
    applied.cut_back(position)  # a process that starts knows only what its checkpoint holds
    client, packed = plan.connect(), f"fuzz-{uuid4().hex}".encode()
    answered(lambda: client.set(assignment("fuzz"), packed))
    link = Link(client, plan.keys, plan.store(), "fuzz", packed)
    version = sum(r["kind"] == "train" for r in applied.rows())
    if position is not None:
        link.resume(position, link.incarnation)
    published = {"policy": version}
    link.report(Started(applied_seq=link.seq, versions=published, published=published, world_size=1))
    while True:
        entry = link.next()
        if isinstance(entry, RolledBack):
            link.report(entry)
            time.sleep(0.3)
            return
        if entry is not None:
            version = _apply(plan, applied, link, entry, version)


def _apply(plan: Plan, applied: Applied, link: Link, entry: LogEntry, version: int) -> int:
    if entry.kind == "train":
        link.bodies(entry)
    gids = sorted({i.rpartition("/")[0] for piece in entry.slices for p in piece.head.parts for i in p.ids})
    applied.add({"id": entry.id, "kind": entry.kind, "roots": gids})
    time.sleep(0.01)
    if entry.kind == "train":
        version += 1
        link.report(Trained(seq=entry.seq, id=entry.id, versions={"policy": version}, updates={"policy": 1}))
    elif entry.kind == "publish":
        link.report(Published(track="policy", version=version))
    elif entry.kind == "checkpoint":
        position = Position(entry.incarnation, entry.seq, entry.id, {"policy": version}, entry.step, link.words())
        with saving(plan.settings.checkpoints(plan.job), position) as folder:
            (folder / checkpoints.STATE_FILE).write_bytes(entry.state)
        link.report(Saved(seq=entry.seq))
    link.applied(entry)
    return version
