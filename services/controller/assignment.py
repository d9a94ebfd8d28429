"""Who works for which job: a pure decision over registrations, and the loop that writes it down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import redis

from shared.agent.registry import Assignment, Service, Worker
from shared.wire import keys as names
from shared.wire.client import AWAY
from shared.wire.codec import pack, unpack
from shared.wire.errors import WireError
from shared.wire.scripts import Scripts

log = logging.getLogger(__name__)

LEASE = "unimesh:registry-lease"


class Wanted(msgspec.Struct, frozen=True):
    """Places of one kind to be filled for a job."""

    job: str
    role: Service
    track: str
    component: str = ""
    """What the worker must be able to run; empty: anything."""
    ranks: int = 1
    """Processes of its child; on a host with devices each needs one."""
    count: int | None = 1
    """How many places; None: as many as there are workers for."""
    priority: int = 0
    """Among the places beyond each job's first, those of a higher one come first."""


class Place(NamedTuple):
    """One of the places that a Wanted stands for."""

    wanted: Wanted
    number: int

    @property
    def key(self) -> tuple[str, Service, str]:
        return self.wanted.job, self.wanted.role, self.wanted.track


class Decision(NamedTuple):
    changes: dict[str, Assignment | None]
    """Worker → its new assignment, or None to take it away."""
    unfilled: dict[str, str]
    """Job → why one of its places has nobody."""


def assign(
    workers: Sequence[Worker],
    held: Mapping[str, Assignment],
    wanted: Sequence[Wanted],
    fresh_id: Callable[[], str],
    storage: str = "",
) -> Decision:
    """A place keeps its worker while that is alive and has its devices.

    Open places are filled in the order of `in_turn`: by a free worker (of several the one that registered first), or a rollout
    by one that works in another job's place further down, beyond its first. A job without a trainer gets no rollouts. Workers
    that drain or wait for a device get nothing new, nor do those that keep their files elsewhere than this controller
    (`storage`).
    """
    alive = {w.name: w for w in workers}
    places = in_turn(wanted, workers)
    holders: dict[tuple[str, Service, str], list[Worker]] = {}
    for name, had in held.items():
        if name in alive and alive[name].state != "waiting":
            holders.setdefault((had.job, had.role, had.track), []).append(alive[name])
    taken = {place: holders[place.key].pop(0) for place in places if holders.get(place.key)}
    staying = {worker.name for worker in taken.values()}
    changes: dict[str, Assignment | None] = {name: None for name in held if name not in staying}
    free = sorted((w for w in workers if w.name not in staying), key=lambda w: (w.since, w.name))
    unfilled: dict[str, str] = {}
    vain: set[Wanted] = set()
    """Nobody can take another place of these."""
    movable = [(turn, p) for turn, p in enumerate(places) if p.number and p.wanted.role == "rollout" and p in taken]
    for turn, place in enumerate(places):
        job = place.wanted.job
        if place in taken or place.wanted in vain or (place.wanted.role == "rollout" and job in unfilled):
            continue
        worker = next((w for w in free if w.service == place.wanted.role and not unable(w, place.wanted, storage)), None)
        if worker is not None:
            free.remove(worker)
        elif (last := _last(movable, turn, taken, place, storage)) is not None:
            worker = taken.pop(last)
        if worker is not None:
            taken[place] = worker
            changes[worker.name] = Assignment(id=fresh_id(), job=job, role=place.wanted.role, track=place.wanted.track)
        else:
            vain.add(place.wanted)
            if place.number == 0 or place.wanted.count is not None:
                unfilled.setdefault(job, _nobody(place.wanted, workers, free, storage))
    return Decision(changes, unfilled)


def in_turn(wanted: Sequence[Wanted], workers: Sequence[Worker]) -> list[Place]:
    """Trainers first; then the first rollout of every track of every job, in the order of `wanted`; then what jobs want beyond
    it: those of a higher priority first, equal ones in turn.
    """
    most = {role: sum(w.service == role for w in workers) for role in ("trainer", "rollout", "reward")}
    places = [
        (Place(w, number), index)
        for index, w in enumerate(wanted)
        for number in range(max(1, most[w.role]) if w.count is None else w.count)
    ]

    def turn(entry: tuple[Place, int]) -> tuple[bool, bool, int, int, int]:
        (wanted, number), index = entry
        further = number > 0
        return wanted.role != "trainer", further, -wanted.priority if further else 0, number, index

    return [place for place, _ in sorted(places, key=turn)]


def _last(
    movable: list[tuple[int, Place]], turn: int, taken: Mapping[Place, Worker], place: Place, storage: str
) -> Place | None:
    """The last further place of a rollout behind `turn` whose worker could be at `place`; it is no longer movable."""
    for index in range(len(movable) - 1 if place.wanted.role == "rollout" else -1, -1, -1):
        at, other = movable[index]
        if at < turn:
            return None
        if not unable(taken[other], place.wanted, storage):
            del movable[index]
            return other
    return None


def unable(worker: Worker, place: Wanted, storage: str) -> str:
    """Why a free worker cannot take the place; empty: it can."""
    if worker.state == "draining":
        return "drains"
    if worker.state == "waiting":
        return worker.error or "waits for a device"
    if place.component and place.component not in worker.components:
        return f"cannot run {place.component}"
    if storage and worker.storage and worker.storage != storage:
        return "keeps its files elsewhere than the controller (UNIMESH_STATE and UNIMESH_BODIES must be shared)"
    if worker.devices and len(worker.devices) < place.ranks:
        return f"leases {len(worker.devices)} of the {place.ranks} devices that its ranks need (UNIMESH_DEVICE_COUNT)"
    return ""


def unserved(workers: Sequence[Worker], wanted: Sequence[Wanted]) -> dict[str, str]:
    """Job → one of its scorers that no reward agent serves."""
    serving = {name for w in workers if w.service == "reward" and w.state != "waiting" for name in w.components}
    return {
        place.job: f"scorer {place.track}: no reward agent serves {place.component} (UNIMESH_SCORERS)"
        for place in wanted
        if place.role == "reward" and place.component not in serving
    }


def _nobody(place: Wanted, workers: Sequence[Worker], free: Sequence[Worker], storage: str) -> str:
    """Why a place has no worker, for people."""
    own = [w for w in workers if w.service == place.role]
    idle = [w for w in free if w.service == place.role]
    if not own:
        return f"a {place.role}: none is registered"
    if not idle:
        return f"a {place.role}: all {len(own)} work for others"
    return f"a {place.role}: {idle[0].name} {unable(idle[0], place, storage)}"


def read_workers(client: Any) -> list[Worker]:
    """Live registrations; names whose key has expired are removed."""
    known = sorted(n.decode() for n in client.smembers(names.WORKERS))
    found: list[Worker] = []
    for name, packed in zip(known, client.mget([names.worker(n) for n in known]) if known else [], strict=True):
        if packed is None:
            client.srem(names.WORKERS, name)
            client.delete(names.assignment(name))
            continue
        try:
            found.append(unpack(packed, Worker))
        except WireError as error:
            log.warning("registration of %s: %s", name, error)
    return found


class Registry:
    """Keeps assignments true. One controller at a time does it, under a lease."""

    def __init__(
        self, connect: Callable[[], Any], wanted: Callable[[], Sequence[Wanted]], lease_ms: int = 5000, storage: str = ""
    ) -> None:
        self.client, self.wanted, self.lease_ms, self.storage = connect(), wanted, lease_ms, storage
        self.unfilled: dict[str, str] | None = None
        """What was told last; None: by another controller, if at all."""
        self.decided: Any = None
        """What the last decision was about."""
        self.scripts = Scripts(self.client)
        self.token = uuid4().hex
        self.stopping = threading.Event()
        self.beat = time.monotonic()

    def run(self) -> None:
        while not self.stopping.wait(0.5):
            self.beat = time.monotonic()
            try:
                if self.scripts.lease(LEASE, self.token, self.lease_ms, take=True) == "MINE":
                    self.step()
                else:
                    self.unfilled = self.decided = None
            except AWAY:
                time.sleep(0.5)
            except redis.RedisError as error:
                log.warning("assignments: %s", error)
        try:
            self.scripts.release(LEASE, self.token)
        except redis.RedisError:
            log.warning("assignments: the lease runs out by itself")

    def step(self) -> None:
        everybody, places = read_workers(self.client), self.wanted()
        workers = [w for w in everybody if w.service != "reward"]
        packed = self.client.mget([names.assignment(w.name) for w in workers]) if workers else []
        held = {w.name: unpack(p, Assignment) for w, p in zip(workers, packed, strict=True) if p is not None}
        assigned = [place for place in places if place.role != "reward"]
        facts = [(w.name, w.service, w.state, w.since, w.error, w.components, w.devices, w.storage) for w in everybody]
        if (known := (facts, held, places)) == self.decided:
            return
        changes, unfilled = assign(workers, held, assigned, lambda: uuid4().hex, self.storage)
        unfilled = unserved(everybody, places) | unfilled
        if unfilled != self.unfilled:
            self._tell(unfilled)
        for name, assignment in changes.items():
            if assignment is None:
                self.client.delete(names.assignment(name))
            else:
                self.client.set(names.assignment(name), pack(assignment))
                log.info("%s works for job %s as %s", name, assignment.job, assignment.role)
        self.decided = known

    def _tell(self, unfilled: dict[str, str]) -> None:
        """For the jobs' views."""
        with self.client.pipeline() as pipe:
            pipe.delete(names.UNFILLED)
            if unfilled:
                pipe.hset(names.UNFILLED, mapping=unfilled)
            pipe.execute()
        self.unfilled = unfilled
