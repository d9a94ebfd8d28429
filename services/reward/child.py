"""`python -m services.reward.child`: a consumer for every scorer stream of every job that has not ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import redis

from services.reward.handler import ScoreHandler
from services.reward.served import served
from shared import logs
from shared.agent.health import Watch, show_progress
from shared.agent.process import StopFlag, guard_parent, take_turns
from shared.config.problems import BadInput
from shared.config.sections import Scorer, scorers_of
from shared.config.settings import Settings, from_environment
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.client import AWAY, connect
from shared.wire.codec import pack
from shared.wire.consumer import Consumer, Policy
from shared.wire.envelope import ENDED, Failure
from shared.wire.keys import JOBS, JobKeys

log = logging.getLogger(__name__)


class Stream:
    """One scorer of one job: handler, consumer, thread."""

    def __init__(self, settings: Settings, job: str, name: str, scorer: Scorer) -> None:
        keys, client = JobKeys(job), connect(settings.redis_url)
        store = BodyStore(client, keys, open_bodies(settings.bodies, job))
        self.handler = ScoreHandler(name, scorer, store, f"{socket.gethostname()}-{os.getpid()}")
        lease = settings.lease_s
        policy = Policy(lease, lease / 5, stall_s=2 * scorer.timeout_s + 60)
        self.consumer = Consumer(lambda: connect(settings.redis_url), keys, f"reward.{name}", self.handler, None, policy)
        self.thread = threading.Thread(target=self.consumer.run, name=f"{job} {name}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.consumer.stop()

    def join(self) -> None:
        self.thread.join(40)
        self.handler.close()


class Watcher:
    """Starts a stream for each scorer that this child serves, and stops those of jobs that have ended."""

    def __init__(self, settings: Settings, served: frozenset[str]) -> None:
        self.settings, self.served = settings, served
        self.client = connect(settings.redis_url)
        self.streams: dict[tuple[str, str], Stream] = {}
        self.scorers: dict[str, dict[str, Scorer]] = {}
        """By job."""
        self.stopping = StopFlag()
        self.watch = Watch(limit_s=120)

    def run(self) -> None:
        """Looks every half second; unblocked by SIGTERM."""
        while not self.stopping.wait(0.5):
            self.watch.tick()
            try:
                self.look()
            except AWAY:
                log.warning("Redis is away")
        for stream in self.streams.values():
            stream.stop()
        for stream in self.streams.values():
            stream.join()

    def getting_on(self) -> bool:
        return self.watch.getting_on() and all(stream.consumer.getting_on() for stream in list(self.streams.values()))

    def look(self) -> None:
        wanted = {(job, name) for job in self._active() for name in self._names(job)}
        for key in self.streams.keys() - wanted:
            stream = self.streams.pop(key)
            stream.stop()
            stream.join()
        for job, name in sorted(wanted - self.streams.keys()):
            self._start(job, name)
        dead = [key for key, stream in self.streams.items() if not stream.thread.is_alive()]
        if dead:
            raise SystemExit(f"consumers ended by themselves: {dead}")  # the agent starts this child again

    def _active(self) -> list[str]:
        jobs = [raw.decode() for raw in self.client.hkeys(JOBS)]
        with self.client.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.hget(JobKeys(job).state, "snapshot")
            snapshots = pipe.execute()
        return [j for j, s in zip(jobs, snapshots, strict=True) if s is None or _phase(s) not in ENDED]

    def _names(self, job: str) -> list[str]:
        """Component names of the job whose scorer this child serves."""
        if job not in self.scorers:
            packed = self.client.get(JobKeys(job).doc)
            if packed is None:
                return []
            self.scorers[job] = scorers_of(msgspec.msgpack.decode(packed)["recipe"])
        return [name for name, s in self.scorers[job].items() if s.name in self.served]

    def _start(self, job: str, name: str) -> None:
        try:
            self.streams[job, name] = Stream(self.settings, job, name, self.scorers[job][name])
        except (BadInput, LookupError, ImportError) as error:
            event = Failure(origin=f"reward.{name}", error=f"the scorer cannot be made: {error}", fatal=True)
            self.client.xadd(JobKeys(job).inbox, {"e": pack(event)})
            self.scorers[job] = {}


def _phase(snapshot: Any) -> str:
    return str(msgspec.msgpack.decode(snapshot).get("phase", "starting"))


def main() -> None:
    guard_parent()
    take_turns()
    logs.begin("reward", worker=f"{socket.gethostname()}-{os.getpid()}")
    settings = from_environment()
    watcher = Watcher(settings, frozenset(served()))
    signal.signal(signal.SIGTERM, lambda *_: watcher.stopping.set())
    stop = _serve(settings)
    show_progress(watcher.getting_on)
    try:
        watcher.run()
    except redis.RedisError as error:
        raise SystemExit(f"Redis refused: {error}") from error
    finally:
        stop()


def _serve(settings: Settings) -> Callable[[], None]:
    """`POST /score`, if it is wanted here."""
    if settings.score is None:
        return lambda: None
    from services.reward.score_api import serve
    from shared.http.guard import check_listening

    try:
        check_listening(settings.score.rpartition(":")[0], settings)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    return serve(settings)


if __name__ == "__main__":
    main()
