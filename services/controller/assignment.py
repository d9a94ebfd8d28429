"""Who works for which job: a pure decision over registrations, and the loop that writes it down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
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


def assign(
    workers: Sequence[Worker], held: Mapping[str, Assignment], wanted: Sequence[Wanted], fresh_id: Callable[[], str]
) -> dict[str, Assignment | None]:
    """What changes: worker → its new assignment, or None to take it away.

    A place keeps its worker while that is alive. Free workers fill open places in the order of `wanted`; among equals the
    one that registered first. Draining workers get nothing new.
    """
    alive = {w.name: w for w in workers}
    changes: dict[str, Assignment | None] = {}
    open_places = list(wanted)
    for name, assignment in held.items():
        filled = (assignment.job, assignment.role, assignment.track)
        place = next((p for p in open_places if (p.job, p.role, p.track) == filled), None)
        if name in alive and place is not None:
            open_places.remove(place)
        else:
            changes[name] = None
    free = sorted(
        (w for w in workers if w.state != "draining" and (w.name not in held or changes.get(w.name, 0) is None)),
        key=lambda w: (w.since, w.name),
    )
    for place in open_places:
        worker = next((w for w in free if w.service == place.role and able(w, place)), None)
        if worker is not None:
            free.remove(worker)
            changes[worker.name] = Assignment(id=fresh_id(), job=place.job, role=place.role, track=place.track)
    return changes


def able(worker: Worker, place: Wanted) -> bool:
    return not place.component or place.component in worker.components


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

    def __init__(self, connect: Callable[[], Any], wanted: Callable[[], Sequence[Wanted]], lease_ms: int = 5000) -> None:
        self.client, self.wanted, self.lease_ms = connect(), wanted, lease_ms
        self.scripts = Scripts(self.client)
        self.token = uuid4().hex
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(0.5):
            try:
                if self.scripts.lease(LEASE, self.token, self.lease_ms, take=True) == "MINE":
                    self.step()
            except AWAY:
                time.sleep(0.5)
            except redis.RedisError as error:
                log.warning("assignments: %s", error)
        try:
            self.scripts.release(LEASE, self.token)
        except redis.RedisError:
            log.warning("assignments: the lease runs out by itself")

    def step(self) -> None:
        workers = [w for w in read_workers(self.client) if w.service != "reward"]
        held: dict[str, Assignment] = {}
        for worker in workers:
            packed = self.client.get(names.assignment(worker.name))
            if packed is not None:
                held[worker.name] = unpack(packed, Assignment)
        for name, assignment in assign(workers, held, self.wanted(), lambda: uuid4().hex).items():
            if assignment is None:
                self.client.delete(names.assignment(name))
            else:
                self.client.set(names.assignment(name), pack(assignment))
                log.info("%s works for job %s as %s", name, assignment.job, assignment.role)
