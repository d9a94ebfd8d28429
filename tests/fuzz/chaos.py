"""Kills and freezes the processes of a small mesh and its Redis, then counts what was lost or done twice.

`python -m tests.fuzz.chaos --seconds 30 [--seed N] [--cut-tail] [--naive]` prints one JSON line; exit code 1 on any fault.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis

from services.controller.jobs import create, prepare
from services.controller.lifecycles.state import Group, Root, State, balanced
from shared.config.settings import Settings
from shared.weights import checkpoints
from shared.wire.client import answered, connect
from shared.wire.codec import pack, unpack
from shared.wire.envelope import Operator
from shared.wire.keys import GROUP
from shared.wire.server import RedisServer
from tests.fuzz import roles
from tests.fuzz.roles import Plan

FORK = multiprocessing.get_context("fork")
STAGES = ("rollout.policy", "rollout.policy", "rollout.policy", "reward.a", "reward.a", "reward.b", "reward.b")
ROLES: list[tuple[Callable[..., None], tuple[str, ...]]] = [
    *((roles.worker, (stage,)) for stage in STAGES),
    (roles.controller, ()),
    (roles.controller, ()),
    (roles.trainer, ()),
]
CONTROLLERS = [i for i, (role, _) in enumerate(ROLES) if role is roles.controller]
BAD = ("not drained", "lost", "dup", "trained twice", "trainer differs", "unbalanced", "left over", "crashed")


class Team:
    """One process per role, by pid. A process that ends by itself with an error is a fault of the run."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.crashed = plan, 0
        self.members: list[BaseProcess] = [self.spawn(i) for i in range(len(ROLES))]

    def spawn(self, index: int) -> BaseProcess:
        target, args = ROLES[index]
        process = FORK.Process(target=target, args=(self.plan, *args), daemon=True)
        process.start()
        return process

    def signal(self, index: int, number: int) -> None:
        process = self.members[index]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def respawn(self, index: int) -> None:
        self.signal(index, signal.SIGKILL)
        self.members[index].join()
        self.crashed += self.members[index].exitcode not in (0, -signal.SIGKILL)
        self.members[index] = self.spawn(index)

    def end(self) -> None:
        for index, process in enumerate(self.members):
            self.signal(index, signal.SIGKILL)
            process.join()
            self.crashed += process.exitcode not in (0, -signal.SIGKILL)


class Chaos:
    def __init__(self, team: Team, server: RedisServer, rng: random.Random, cut: bool) -> None:
        self.team, self.server, self.rng, self.cut = team, server, rng, cut
        self.counts: Counter[str] = Counter()
        self.order = itertools.count()
        self.down: set[int] = set()
        """Killed and not started again."""
        self.later: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.after(self.rng.uniform(1.5, 4), self.kill_redis)
        self.after(1, self.hurt_worker)
        while self.later and (time.monotonic() < end or self.server.process is None):
            at, _, act = heapq.heappop(self.later)
            time.sleep(max(0, at - time.monotonic()))
            act()
        for index in range(len(ROLES)):
            self.team.signal(index, signal.SIGCONT)
        for index in sorted(self.down):  # not by is_alive(): one that was killed a moment ago may still look alive
            self.team.respawn(index)

    def after(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.later, (time.monotonic() + delay, next(self.order), act))

    def hurt_worker(self) -> None:
        index = self.rng.choice(CONTROLLERS) if self.rng.random() < 0.2 else self.rng.randrange(len(ROLES))
        if self.rng.random() < 0.5:
            self.counts["kills"] += 1
            self.team.signal(index, signal.SIGKILL)
            self.down.add(index)
            self.after(self.rng.uniform(0, 0.4), lambda: self.back(index))
        else:
            self.counts["freezes"] += 1
            self.team.signal(index, signal.SIGSTOP)
            self.after(self.rng.uniform(0.6, 2), lambda: self.team.signal(index, signal.SIGCONT))
        self.after(0.25, self.hurt_worker)

    def back(self, index: int) -> None:
        self.down.discard(index)
        self.team.respawn(index)

    def kill_redis(self) -> None:
        self.counts["redis kills"] += 1
        self.server.kill()
        self.after(self.rng.uniform(0, 1), self.start_redis)

    def start_redis(self) -> None:
        if self.cut:
            self.counts["bytes cut"] += self.server.cut(self.rng.randint(1, 20000))
        self.server.start()
        self.after(self.rng.uniform(1.5, 4), self.kill_redis)


def job_document(model: Path) -> dict[str, Any]:
    return {
        "domain": "async_ar",
        "steps": 1_000_000,
        "model": {"path": str(model)},
        "data": {"source": {"name": "sorting"}, "batch_size": 4},
        "rollout": {"group_size": 2, "sampling": {"max_new_tokens": 4}},
        "reward": {"scorers": {"a": {"name": "exact_match"}, "b": {"name": "exact_match"}}},
        "algorithm": {"name": "grpo"},
        "schedule": {"max_staleness": 4, "max_reissues": 3},
        "train": {"optimizer": {"lr": 1.0}, "checkpoint_every": 5},
    }


def run(model: Path, seconds: float, seed: int = 1, cut_tail: bool = False, naive: bool = False) -> dict[str, Any]:
    """One run; the counts of BAD are all 0 if nothing was lost or done twice."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        server = RedisServer(folder / "redis")
        server.start()
        state = folder / "state"
        settings = Settings(server.url, state, (model.parent,), f"dir:{state / 'bodies'}", 1, None)
        client = connect(server.url)
        job = prepare(job_document(model), settings)
        plan = Plan(settings, create(client, job), "naive" if naive else "scripts", folder)
        team = Team(plan)
        chaos = Chaos(team, server, random.Random(seed), cut_tail)
        try:
            chaos.run(seconds)
            left = drain(client, plan, 10 if naive else 40)
            found = audit(client, plan)
        finally:
            team.end()
            server.kill()
    bad = {"not drained": len(left), "left": left[:8], "crashed": team.crashed}
    return {"seed": seed, "naive": naive, "cut": cut_tail} | found | dict(chaos.counts) | bad


def root_of(client: Any, plan: Plan) -> Root:
    packed = answered(lambda: client.hget(plan.keys.state, "snapshot"))
    return unpack(packed, Root) if packed else Root()


def drain(client: Any, plan: Plan, patience: float) -> list[str]:
    """Pauses admission and waits until less than a batch is left, and the trainer holds what the controller says.

    Returns what is still to come when the patience is over.
    """
    end = time.monotonic() + patience
    while True:
        root = root_of(client, plan)
        if not root.paused:
            answered(lambda: client.xadd(plan.keys.inbox, {"e": pack(Operator(command="pause"))}))
        time.sleep(0.3)
        streams = [plan.keys.stage(s) for s in sorted({*STAGES, "inbox"})]
        groups = [unpack(row, Group) for row in client.hvals(plan.keys.rows)]
        applied = sum(row["kind"] == "train" for row in roles.Applied(plan.folder / "applied").rows())
        left = [f"{name}: {n} entries" for name in streams if (n := client.xlen(name))]
        left += [f"group {g.gid} is not complete" for g in groups if g.slices is None]
        left += [f"record {r.seq} ({r.kind}) is not applied" for r in root.records]
        if applied != root.batches:  # a trainer that was just killed redoes its log; one that is ahead notices
            left.append(f"the trainer holds {applied} batches, the controller {root.batches}")
        if root.paused and not left:
            return []
        if time.monotonic() > end:
            return left or ["admission is not paused"]


def audit(client: Any, plan: Plan) -> dict[str, Any]:
    """What the audit stream, the ledger and the trainer's own file say; they must agree to the last group."""
    found: Counter[str] = Counter()
    root = root_of(client, plan)
    groups = {g.gid: g for g in (unpack(row, Group) for row in client.hvals(plan.keys.rows))}
    notes: dict[str, Counter[str]] = {stage: Counter() for stage in STAGES}
    for _, row in client.xrange(plan.keys.of("audit")):
        notes[row[b"stage"].decode()][(row[b"gid"] + b" " + row[b"incarnation"]).decode()] += 1
    for counts in notes.values():
        found["outputs"] += sum(counts.values())
        found["dup"] += sum(n - 1 for n in counts.values())
    rows = roles.Applied(plan.folder / "applied").rows()
    trained = Counter(r for row in rows for r in row["roots"])
    found["trained twice"] = sum(n - 1 for n in trained.values())
    found["trainer differs"] = int(sum(trained.values()) != root.trained) + int(
        sum(r["kind"] == "train" for r in rows) != root.batches
    )
    found["unbalanced"] = int(not balanced(State(root, groups)))
    issued_roots = {f"sorting:0:{draw}" for draw in range(root.draw)}
    known = set(trained) | {g.partition("#")[0] for g in groups} | {f"sorting:0:{d}" for d in root.dead_draws}
    known |= {f"sorting:0:{draw}" for draw, _ in root.again}
    found["lost"] = len(issued_roots - known)
    streams = [plan.keys.stage(s) for s in {*STAGES, "inbox"}]
    found["left over"] = sum(client.xlen(s) + _pending(client, s) for s in streams)
    hashes = {k.decode() for k in client.scan_iter(match=plan.keys.group("*"))}
    found["left over"] += len(hashes - {plan.keys.group(g) for g in groups})
    found |= {"issued": root.issued, "trained": root.trained, "dead": root.dead, "dropped": root.dropped_total}
    found["incarnation"] = root.incarnation
    found["checkpoints"] = len(checkpoints.found(plan.settings.checkpoints(plan.job)))
    for key, value in client.hgetall(plan.keys.counts).items():
        found[f"answer {key.decode()}"] = int(value)
    return dict(found)


def _pending(client: Any, stream: str) -> int:
    try:
        return int(client.xpending(stream, GROUP)["pending"])
    except redis.ResponseError:
        return 0  # never read


def faults(found: dict[str, Any]) -> dict[str, int]:
    return {name: found[name] for name in BAD if found.get(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cut-tail", action="store_true", help="cut 1-20000 bytes off the AOF at every Redis kill")
    parser.add_argument("--naive", action="store_true", help="control: separate calls")
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    args = parser.parse_args()
    found = run(args.model.resolve(), args.seconds, args.seed, args.cut_tail, args.naive)
    print(json.dumps(found))
    return int(bool(faults(found)))


if __name__ == "__main__":
    sys.exit(main())
