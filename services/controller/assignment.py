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
    """One place to be filled for a job."""

    job: str
    role: Service
    track: str
    component: str = ""
    """What the worker must be able to run; empty: anything."""
    ranks: int = 1
    """Processes of its child; on a host with devices each needs one."""


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

    Free workers fill open places in the order of `wanted`; among equals the one that registered first. Those that drain or wait
    for a device get nothing new, nor do those that keep their files elsewhere than this controller (`storage`).
    """
    alive = {w.name: w for w in workers}
    changes: dict[str, Assignment | None] = {}
    open_places = list(wanted)
    for name, assignment in held.items():
        filled = (assignment.job, assignment.role, assignment.track)
        place = next((p for p in open_places if (p.job, p.role, p.track) == filled), None)
        if name in alive and alive[name].state != "waiting" and place is not None:
            open_places.remove(place)
        else:
            changes[name] = None
    free = sorted(
        (w for w in workers if w.name not in held or changes.get(w.name, 0) is None),
        key=lambda w: (w.since, w.name),
    )
    unfilled: dict[str, str] = {}
    for place in open_places:
        worker = next((w for w in free if w.service == place.role and not unable(w, place, storage)), None)
        if worker is not None:
            free.remove(worker)
            changes[worker.name] = Assignment(id=fresh_id(), job=place.job, role=place.role, track=place.track)
        else:
            unfilled.setdefault(place.job, _nobody(place, workers, free, storage))
    return Decision(changes, unfilled)


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
                    self.unfilled = None
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
        held: dict[str, Assignment] = {}
        for worker in workers:
            packed = self.client.get(names.assignment(worker.name))
            if packed is not None:
                held[worker.name] = unpack(packed, Assignment)
        assigned = [place for place in places if place.role != "reward"]
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

    def _tell(self, unfilled: dict[str, str]) -> None:
        """For the jobs' views."""
        with self.client.pipeline() as pipe:
            pipe.delete(names.UNFILLED)
            if unfilled:
                pipe.hset(names.UNFILLED, mapping=unfilled)
            pipe.execute()
        self.unfilled = unfilled
