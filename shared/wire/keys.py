"""Every key and stream name. The braces are the hash tag: all keys of a job lie in one cluster slot."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "workers"
"""The one consumer group of every stage stream and inbox."""

JOBS = "unimesh:jobs"
"""Hash: job id → the summary that lists are made of (msgpack)."""
NAMES = "unimesh:names"
"""Hash: name → the newest job that bears it."""
UNFILLED = "unimesh:unfilled"
"""Hash: job → why a place for one of its workers has nobody."""
WORKERS = "unimesh:workers"
"""Set: names of registered workers; one whose key has expired is gone."""


def worker(name: str) -> str:
    """String with a time to live: the worker's registration (msgpack)."""
    return f"unimesh:worker:{name}"


def assignment(name: str) -> str:
    """String: what the controller assigned to the worker (msgpack); absent = nothing."""
    return f"unimesh:assignment:{name}"


def device(uuid: str, slot: int) -> str:
    """String with a time to live: the agent that holds a device (in one of the places that sharers have)."""
    return f"unimesh:device:{uuid}:{slot}"


def idempotency(key: str) -> str:
    """String: the job that a submission with this key made."""
    return f"unimesh:idempotency:{key}"


@dataclass(frozen=True)
class JobKeys:
    job: str

    def of(self, name: str) -> str:
        return f"unimesh:{{{self.job}}}:{name}"

    def stage(self, name: str) -> str:
        """Stream of a stage, `rollout.{track}`, `rollout.{track}.eval` or `reward.{scorer}`, read through GROUP."""
        return self.of(name)

    def present(self, track: str) -> str:
        """Sorted set: the track's rollout workers, by when they are to be forgotten (ms)."""
        return self.of(f"present:{track}")

    def seats(self, track: str) -> str:
        """Sorted set: those of them that may take evaluations, likewise."""
        return self.of(f"seats:{track}")

    def group(self, gid: str) -> str:
        """Hash of one open group: slots, heads, counters of errors and lost leases, places of its entries."""
        return self.of(f"grp:{gid}")

    def shelf(self, number: int) -> str:
        """Hash: body name → bytes, for bodies small enough to live in Redis. Swept as one key."""
        return self.of(f"shelf:{number}")

    def published(self, track: str) -> str:
        """Pub/sub channel: (incarnation, version) of each new version. A hint only: the store is the truth."""
        return self.of(f"published:{track}")

    @property
    def meta(self) -> str:
        """Hash: incarnation, routes, fencing token of the trainer, the rollout workers that an operator wants."""
        return self.of("meta")

    @property
    def doc(self) -> str:
        """String: the validated recipe and the derived plan (msgpack)."""
        return self.of("doc")

    @property
    def state(self) -> str:
        """Hash: revision and snapshot of the root row."""
        return self.of("state")

    @property
    def rows(self) -> str:
        """Hash: gid → the controller's row of an open group."""
        return self.of("rows")

    @property
    def lease(self) -> str:
        """String: the controller that owns the job."""
        return self.of("lease")

    @property
    def open(self) -> str:
        """Sorted set: gid → shelf of every open group. Late results are refused by it."""
        return self.of("open")

    @property
    def inbox(self) -> str:
        """Stream of events for the controller, read through GROUP."""
        return self.of("inbox")

    @property
    def log(self) -> str:
        """Stream: the train log, ids `{seq}-0`. No consumer group: a write-ahead log."""
        return self.of("log")

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return self.of("dead")

    @property
    def counts(self) -> str:
        """Hash: late, refused, wrong_phase, twin … results."""
        return self.of("counts")

    @property
    def steps(self) -> str:
        """Stream: metrics of every step, append-only."""
        return self.of("steps")

    @property
    def spans(self) -> str:
        """Stream: who did what when in the newest steps (msgpack)."""
        return self.of("spans")

    @property
    def events(self) -> str:
        """Stream: what happened, for people; append-only."""
        return self.of("events")

    @property
    def evals(self) -> str:
        """Hash: tag → result of an evaluation (msgpack)."""
        return self.of("evals")
