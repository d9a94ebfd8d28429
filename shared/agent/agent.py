"""A service's agent: torch-free, registers itself, takes an assignment, runs one child for it, and starts it again if it dies.

The child is started before there is work, so that its imports are done when an assignment comes; it reads the assignment as
one line of JSON from its standard input. Whatever a model does takes a child, never the agent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
import redis

from shared import logs
from shared.agent.backoff import Backoff
from shared.agent.devices import VISIBLE, Leases, Lister, list_devices
from shared.agent.health import PROGRESS, STALE_S, Progress, serve_health
from shared.agent.process import LABEL, Child, StopFlag
from shared.agent.registry import BEAT_S, Assignment, Service, Worker
from shared.agent.storage import storage_id
from shared.config.settings import Settings
from shared.wire import keys
from shared.wire.client import RedisUnfit, check_server, connect
from shared.wire.codec import pack, unpack

log = logging.getLogger(__name__)

GRACE_S = 20.0
"""A child's time to drain."""
DEVICE_TTLS = 3
"""A lease of a device outlives its agent's registration by so much: an agent that is cut off has ended its child by then."""
SILENT_BEATS = 5
"""An agent that was frozen together with its child lets it go on first."""


class Agent:
    """Waits for: its assignment key, its child's end, SIGTERM. Unblocked by: the controller's registry, the kernel."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        module: str,
        components: tuple[str, ...] = (),
        assigned: bool = True,
        devices: int = 1,
        lister: Lister | None = None,
    ) -> None:
        """`assigned`: the child works for one job and waits for its assignment; otherwise it serves all jobs by itself.
        `devices`: how many it leases where the host has some and UNIMESH_DEVICE_COUNT says nothing else.
        """
        self.service, self.settings, self.module = service, settings, module
        self.assigned, self.components = assigned, components
        self.name = f"{service}-{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
        self.client = connect(settings.redis_url)
        self.since, self.ttl_ms = time.time(), int(max(settings.lease_s * 400, 4 * BEAT_S * 1000))
        self.child: Child | None = None
        self.ending: list[tuple[Child, float]] = []
        """Children that drain, and when their patience is over."""
        self.given: Assignment | None = None
        self.backoff = Backoff()
        self.restarts, self.error = 0, ""
        self.silent_beats = 0
        self.stopping = StopFlag()
        self.reached = time.monotonic()
        self.storage = storage_id(settings)
        self.devices = Leases(
            self.client,
            self.name,
            lister or (lambda: list_devices(settings.devices)),
            settings.device_count if devices else 0,
            DEVICE_TTLS * self.ttl_ms,
            settings.device_share,
            devices,
        )
        self.away = -float("inf")
        """time.monotonic() when Redis was found away last."""
        self.progress = Progress()

    def run(self) -> None:
        if self.settings.health is not None:
            try:
                serve_health(self.settings.health, self.health)
            except (OSError, ValueError, OverflowError) as error:
                raise SystemExit(f"UNIMESH_HEALTH={self.settings.health}: {error}; it is host:port, of a free port") from error
        while not self.stopping.is_set():
            try:
                self.lease_devices()
                assignment = self.beat(self.state)
                self.reached = time.monotonic()
                self.reconcile(assignment)
                self.chores()
            except redis.RedisError as error:  # away, or it refuses writes: its memory or its disk is full
                log.warning("no word from Redis: %s", error)
                self.without_redis()
            self.stopping.wait(BEAT_S)
        self.leave()

    @property
    def state(self) -> Any:
        if not self.devices.ready:
            return "waiting"
        return "working" if self.given or not self.assigned else "idle"

    def without_redis(self) -> None:
        """What is held is only kept for so long as nobody else can have it."""
        self.away = time.monotonic()
        silent_ms = (self.away - self.reached) * 1000
        if self.devices.held and silent_ms > self.devices.ttl_ms:
            self.end_child()
        elif self.given and silent_ms > 10 * self.ttl_ms:
            self.drop_child("Redis has been away too long to keep the assignment")
        self.reap()

    def lease_devices(self) -> None:
        """Keeps what the child may see; a child that lost a device ends at once, since another one may have it."""
        if lost := self.devices.renew():
            self.error = f"lost the lease of {', '.join(lost)}"
            log.warning("%s; ending the child", self.error)
            self.end_child()
        settled = time.monotonic() - self.away > self.devices.ttl_ms / 1000  # holders come back first after an outage
        if not self.devices.ready and settled:
            self.devices.take()

    def health(self) -> dict[str, Any]:
        """What `GET /healthz` answers: who this is, what it does, and what is wrong."""
        away, silent = time.monotonic() - self.reached, self.progress.age_s()
        problems = []
        if away > 3 * self.ttl_ms / 1000:
            problems.append(f"Redis has been away for {away:.0f} s")
        if not self.devices.ready:
            problems.append(self.devices.why_not())
        if self.child is None and self.devices.ready:
            problems.append(f"no child: {self.error}" if self.error else "the child has not started yet")
        if self.busy and silent > STALE_S:
            problems.append(f"the child has shown no progress for {silent:.0f} s")
        return {
            "service": self.service,
            "worker": self.name,
            "state": self.state,
            "job": self.given.job if self.given else "",
            "child": self.child.pid if self.child else 0,
            "progress_s": round(silent, 1) if self.busy else None,
            "devices": self.devices.uuids,
            "restarts": self.restarts,
            "error": self.error,
            "problems": problems,
        }

    @property
    def busy(self) -> bool:
        """Whether the child has work, and so shows progress."""
        return self.child is not None and (self.given is not None or not self.assigned)

    def chores(self) -> None:
        """What a service's agent does besides, at every beat. Never waits."""

    def beat(self, state: Any) -> Assignment | None:
        """Renews the registration; returns the current assignment."""
        worker = Worker(
            name=self.name,
            service=self.service,
            host=socket.gethostname(),
            pid=os.getpid(),
            since=self.since,
            state=state,
            job=self.given.job if self.given else "",
            assignment=self.given.id if self.given else "",
            child=self.child.pid if self.child else 0,
            restarts=self.restarts,
            error=self.error if self.devices.ready else self.devices.why_not(),
            components=self.components,
            threads=self.settings.threads,
            devices=self.devices.uuids,
            storage=self.storage,
            beat=time.time(),
        )
        with self.client.pipeline(transaction=False) as pipe:
            pipe.set(keys.worker(self.name), pack(worker), px=self.ttl_ms)
            pipe.sadd(keys.WORKERS, self.name)
            pipe.get(keys.assignment(self.name))
            packed = pipe.execute()[2]
        return None if packed is None else unpack(packed, Assignment)

    def reconcile(self, assignment: Assignment | None) -> None:
        """Makes the child what the assignment says. Never waits: the beat must go on."""
        self.reap()
        if self.given is not None and (assignment is None or assignment.id != self.given.id):
            self.drop_child("assignment ended")
        if self.child is not None and (code := self.child.poll()) is not None:
            self.ended(code)
        silent = self.progress.age_s()
        self.silent_beats = self.silent_beats + 1 if self.busy and silent > self.settings.hang_s else 0
        if self.silent_beats > SILENT_BEATS:
            self.hung(silent)
        if self.ending and self.devices.held:
            return  # the next one would find their memory taken
        if self.child is None and self.devices.ready and self.backoff.ready:
            self.child = self.spawn()
            self.given = None
        if self.assigned and assignment is not None and self.given is None and self.child is not None:
            self.give(assignment)

    def spawn(self) -> Child:
        folder = self.settings.logs
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.environ.get(LABEL, self.name)}.child.log" if folder else None
        env = dict(os.environ) | self.devices.environment() | {PROGRESS: str(self.progress.path)}
        if self.settings.devices == "none":
            env[VISIBLE] = ""
        if self.settings.score is None:
            env.pop("UNIMESH_TOKEN", None)  # only who answers over HTTP needs to know it
        self.progress.begin()
        return Child([sys.executable, "-m", self.module], env, path, pipe=self.assigned)

    def give(self, assignment: Assignment) -> None:
        assert self.child is not None
        line = msgspec.json.encode({"assignment": msgspec.to_builtins(assignment), "agent": self.name})
        self.progress.begin()
        if self.child.send(line + b"\n"):
            self.given = assignment
            log.info("assigned: %s %s", assignment.role, assignment.track, extra={"job": assignment.job})

    def ended(self, code: int) -> None:
        """The child ended by itself: at once again after a clean end, with growing delays otherwise."""
        assert self.child is not None
        self.child.kill()
        if code != 0:
            delay = self.backoff.failed(time.monotonic() - self.child.started)
            self.restarts += 1
            self.error = f"child ended with {_named(code)}"
            log.warning("%s; next start in %.1f s", self.error, delay)
        self.child, self.given = None, None

    def hung(self, silent: float) -> None:
        """The child lives and does nothing: it is ended, and what it held goes on elsewhere."""
        self.restarts += 1
        self.error = f"child ended: it had shown no progress for {silent:.0f} s"
        log.warning("%s", self.error)
        self.end_child()

    def end_child(self) -> None:
        """At once; reap() collects it."""
        if self.child is not None:
            self.child.kill()
            self.ending.append((self.child, time.monotonic()))
        self.child, self.given = None, None

    def drop_child(self, why: str) -> None:
        """Asks the child to drain; reap() ends it if it does not."""
        if self.child is not None:
            log.info("ending the child: %s", why)
            self.child.terminate()
            self.ending.append((self.child, time.monotonic() + GRACE_S))
        self.child, self.given = None, None

    def reap(self) -> None:
        for child, deadline in self.ending[:]:
            if time.monotonic() > deadline:
                child.kill()
            if child.poll() is not None:
                child.kill()  # whatever is left of its group
                self.ending.remove((child, deadline))

    def leave(self) -> None:
        """SIGTERM: the child drains, then the registration goes."""
        try:
            self.beat("draining")
        except redis.RedisError as error:
            log.warning("not told the mesh that this agent drains: %s", error)
        self.drop_child("the agent stops")
        beat_at = 0.0
        while self.ending:
            self.reap()
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + BEAT_S
                with contextlib.suppress(redis.RedisError):
                    self.devices.renew()
                    self.beat("draining")
            time.sleep(0.05)
        self.devices.release()
        self.progress.close()
        try:
            with self.client.pipeline() as pipe:
                pipe.delete(keys.worker(self.name), keys.assignment(self.name))
                pipe.srem(keys.WORKERS, self.name)
                pipe.execute()
        except redis.RedisError as error:
            log.warning("the registration runs out by itself: %s", error)


def _named(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main(make: Callable[[Settings], Agent], settings: Settings) -> None:
    """An agent's process: checks Redis, runs until SIGTERM or SIGINT."""
    try:
        check_server(connect(settings.redis_url))
    except RedisUnfit as error:
        raise SystemExit(str(error)) from error
    agent = make(settings)
    logs.begin(agent.service, worker=agent.name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stopping.set())
    agent.run()
