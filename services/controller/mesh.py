"""The controller's threads: one runner per job that has not ended, and the registry of workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from services.controller.assignment import Registry, Wanted
from services.controller.jobs import JobDoc, load_doc, open_job, phase_of
from services.controller.runner import Runner
from shared.agent.storage import storage_id
from shared.config.sections import scorers_of
from shared.config.settings import Settings
from shared.wire.bodies import open_bodies
from shared.wire.client import AWAY
from shared.wire.envelope import ENDED
from shared.wire.keys import JOBS, JobKeys

log = logging.getLogger(__name__)

AGING_S = 600.0
SCALED = "rollout"
"""Field of a job's meta: the rollout workers that it was scaled to; 0: its share."""
AGAIN_S = 10.0
"""Between two attempts to run a job whose files are missing or changed."""


class Mesh:
    """Finds jobs in Redis and runs them. A job that another controller leases is left to it until its lease runs out."""

    def __init__(self, connect: Callable[[], Any], settings: Settings) -> None:
        self.connect, self.settings = connect, settings
        self.client = connect()
        self.runners: dict[str, tuple[Runner, threading.Thread]] = {}
        self.docs: dict[str, JobDoc] = {}
        self.ended: dict[str, bytes] = {}
        """By id, with its entry in the list: one that is restored gets another."""
        self.refused: dict[str, tuple[str, float]] = {}
        """Jobs that cannot run here: why, and when to try again."""
        self.stopping = threading.Event()
        self.wake = threading.Event()
        self.beat = time.monotonic()
        """When it last looked for jobs."""
        storage = storage_id(settings)
        self.registry = Registry(connect, self.wanted, int(settings.lease_s * 1000 / 3), storage)
        self.threads = [
            threading.Thread(target=self.watch, name="jobs", daemon=True),
            threading.Thread(target=self.registry.run, name="registry", daemon=True),
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()
        threading.Thread(target=self.sweep_ended, name="sweep", daemon=True).start()

    def stuck(self) -> list[str]:
        """What has made no progress for `hang_s`, or ended unasked: each thread begins a round at least every few seconds, also
        while Redis is away."""
        if self.stopping.is_set():
            return []
        silent = time.monotonic() - self.settings.hang_s
        beats = [("jobs", self.beat), ("registry", self.registry.beat)]
        beats += [(f"job {job}", runner.beat) for job, (runner, thread) in list(self.runners.items()) if thread.is_alive()]
        said = [f"{name} has made no progress for {self.settings.hang_s:.0f} s" for name, beat in beats if beat < silent]
        return said + [f"{thread.name} has ended" for thread in self.threads if thread.ident and not thread.is_alive()]

    def sweep_ended(self) -> None:
        """Bodies of jobs that have ended: a controller that died at their end, or a late worker, may have left some."""
        try:
            jobs = [raw.decode() for raw in self.client.hkeys(JOBS)]
            for job in jobs:
                if phase_of(self.client, job) in ENDED:
                    open_bodies(self.settings.bodies, job).remove()
        except (redis.RedisError, OSError) as error:
            log.warning("bodies of ended jobs are not swept: %s", error)

    def stop(self) -> None:
        self.stopping.set()
        self.wake.set()
        self.registry.stopping.set()
        for runner, _ in list(self.runners.values()):
            runner.stop()
        for thread in [*self.threads, *(t for _, t in self.runners.values())]:
            thread.join(15)

    def watch(self) -> None:
        """Waits for a submission or half a second; unblocked by wake."""
        while not self.stopping.is_set():
            self.beat = time.monotonic()
            try:
                self.look()
            except AWAY:
                log.warning("jobs: Redis is away")
            except redis.RedisError as error:
                log.warning("jobs: %s", error)
            self.wake.wait(0.5)
            self.wake.clear()

    def look(self) -> None:
        for raw, facts in self.client.hgetall(JOBS).items():
            job = raw.decode()
            running = self.runners.get(job)
            if self.ended.get(job) == facts or (running is not None and running[1].is_alive()):
                continue
            if phase_of(self.client, job) in ENDED:
                self.ended[job] = facts
                self.runners.pop(job, None)
                continue
            if time.monotonic() < self.refused.get(job, ("", 0.0))[1]:
                continue
            doc = load_doc(self.client, job)
            if doc is not None:
                self._start(doc)

    def _start(self, doc: JobDoc) -> None:
        try:
            lease_ms = int(self.settings.lease_s * 1000 * 2 / 3)
            runner = Runner(self.connect, open_job(doc, self.settings), self.settings, lease_ms)
        except Exception as error:  # files that are gone or changed, whatever a library says of them: others go on
            if self.refused.get(doc.id, ("", 0.0))[0] != str(error):  # said once, not at every attempt
                note = {"at": f"{time.time():.3f}", "level": "error", "text": f"the job cannot go on: {error}"}
                self.client.xadd(JobKeys(doc.id).events, note)
                log.warning("cannot run here: %s", error, extra={"job": doc.id})
            self.refused[doc.id] = str(error), time.monotonic() + AGAIN_S
            return
        self.refused.pop(doc.id, None)
        thread = threading.Thread(target=runner.run, name=f"job {doc.id}", daemon=True)
        self.docs[doc.id] = doc
        self.runners[doc.id] = (runner, thread)
        thread.start()

    def wanted(self) -> Sequence[Wanted]:
        """Places of all jobs that have not ended: of a higher priority first, of equal ones the oldest. A job that has not
        started gains one for every AGING_S that it waits.
        """
        found: list[tuple[float, float, list[Wanted]]] = []
        for raw, facts in self.client.hgetall(JOBS).items():
            job = raw.decode()
            if self.ended.get(job) == facts:
                continue
            phase = phase_of(self.client, job)
            if phase in ENDED:
                continue
            doc = self.docs.get(job) or load_doc(self.client, job)
            if doc is None:
                continue
            self.docs[job] = doc
            waited = (time.time() - doc.created) // AGING_S if phase == "starting" else 0
            places = places_of(doc, scaled(self.client, doc))
            found.append((-waited - places[0].priority, doc.created, places))
        return [place for _, _, places in sorted(found, key=lambda entry: entry[:2]) for place in places]


def scaled(client: Any, doc: JobDoc) -> int | None:
    """How many rollout workers the job wants: what was said last; None: its share of all."""
    said = client.hget(JobKeys(doc.id).meta, SCALED)
    wanted = doc.recipe["placement"]["rollout"]
    return wanted if said is None else int(said) or None


def places_of(doc: JobDoc, rollout: int | None) -> list[Wanted]:
    """Its trainer, its rollouts, and a place for each scorer: those are not assigned, but somebody must serve them."""
    placement = doc.recipe["placement"]
    priority = int(placement.get("priority", 0))  # not in jobs of an earlier version
    algorithm, ranks = doc.recipe["algorithm"]["name"], int(placement["trainer_ranks"])
    found = [Wanted(doc.id, "trainer", "", algorithm, ranks, priority=priority)]
    engine = doc.recipe["rollout"]["engine"]["name"] if doc.plan.route else ""
    for stage in () if doc.plan.live else doc.plan.route:
        service, _, track = stage.partition(".")
        if service == "rollout":
            found.append(Wanted(doc.id, "rollout", track, engine, count=rollout, priority=priority))
    return found + [Wanted(doc.id, "reward", name, scorer.name) for name, scorer in scorers_of(doc.recipe).items()]
