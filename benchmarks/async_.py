"""Rollouts that run ahead: what overlap saves, what it costs, how workers add up. `python -m benchmarks.async_ [--quick]`.

A real controller, a real Redis and the services' own loops; engines, scorers and the trainer only wait, so that the ratios
belong to the orchestration. Latencies are log-normal, median to longest of a batch about 1 : 8, and the prompts' own.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import async_real, crowd
from benchmarks.report import Row, publish
from services.controller.busy import services
from services.controller.jobs import create, load_doc, open_job, prepare
from services.controller.runner import Runner
from services.controller.views import job_view, read_step
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.consumer import Consumer
from shared.wire.envelope import LogEntry, Span
from shared.wire.hops import Result, Work
from shared.wire.keys import JobKeys
from shared.wire.server import RedisServer
from tests.conftest import recipe
from tests.simulated import Instant, Simulated, aside_of

BATCH, MEDIAN_S = 16, 0.08
SPREAD = 0.85
"""Of the logarithm: the longest of 16 is about 5, of 64 about 8 times the median."""


def latency(gid: str) -> float:
    """Seconds that the group takes wherever it is done: by its prompt, so that all runs have the same work."""
    rng = random.Random(gid.partition("#")[0])
    return MEDIAN_S * min(8.0, math.exp(rng.gauss(0.0, SPREAD)))


@dataclass(frozen=True)
class World:
    """What is simulated."""

    train_s: float
    """Of a batch."""
    rollouts: int = 1
    slots: int = BATCH
    """Groups that a rollout worker fills at once."""
    reward: bool = False
    """Scoring takes as long as generating."""


class Timed(Instant):
    """Answers each message when its time is over; at most `slots` at once."""

    def __init__(self, stage: str, slots: int, seconds: Callable[[str], float], version: Callable[[], int]) -> None:
        super().__init__(stage, 0.0, lambda row: False, "abc")
        self.slots, self.seconds, self.version = slots, seconds, version
        self.worker = f"{stage}-{id(self)}"
        self.due: list[tuple[float, int, float, int, Work, Future[Result]]] = []
        self.numbers = itertools.count()
        self.changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def capacity(self) -> int:
        return self.slots

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        found: list[Future[Result]] = []
        with self.changed:
            for work in works:
                future: Future[Result] = Future()
                seconds, now = self.seconds(work.envelope.gid), time.monotonic()
                heapq.heappush(self.due, (now + seconds, next(self.numbers), seconds, self.version(), work, future))
                found.append(future)
            self.changed.notify()
        return found

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.due))
                left = self.due[0][0] - time.monotonic()
                if left > 0:
                    self.changed.wait(left)
                    continue
                _, _, seconds, version, work, future = heapq.heappop(self.due)
            need = work.envelope.needs.get("policy")
            self.took, self.held = seconds, version if need is None or need.how == "at_least" else need.version
            future.set_result(self._result(work))

    def span(self) -> Span:
        return Span(self.stage, self.worker, time.time() - self.took, self.took)

    def made_by(self, work: Work) -> int:
        return self.held


class Mesh(Simulated):
    """Workers and a trainer that wait."""

    def __init__(self, settings: Settings, job: str, world: World) -> None:
        super().__init__(settings, job)
        self.world, self.train_s, self.published, store = world, world.train_s, 0, self.store()
        scoring = [c.stage for c in self.consumers if c.stage.startswith("reward")]
        engines = [("rollout.policy", world.slots)] * world.rollouts
        scorers = [(stage, world.slots * world.rollouts) for stage in scoring]
        self.consumers = [
            Consumer(self.connect, self.keys, stage, self._handler(stage, slots), store, aside=aside_of(stage))
            for stage, slots in (*engines, *scorers)
        ]
        self.threads = [*(threading.Thread(target=c.run, daemon=True) for c in self.consumers), self.threads[-1]]

    def _handler(self, stage: str, slots: int) -> Timed:
        takes = latency if stage.startswith("rollout") or self.world.reward else lambda gid: 0.0
        return Timed(stage, slots, takes, lambda: self.published)

    def apply(self, link: Any, entry: LogEntry, versions: dict[str, int]) -> dict[str, int]:
        found = super().apply(link, entry, versions)
        if entry.kind == "publish":
            self.published = found["policy"]
        return found


@dataclass(frozen=True)
class Outcome:
    """Of a run."""

    wall: float
    steps: list[dict[str, Any]]
    view: dict[str, Any]

    @property
    def dropped(self) -> float:
        """Share of the groups that were not trained though their batch was to come."""
        ledger = self.view["ledger"]
        return float(sum(n for why, n in ledger["dropped"].items() if why != "surplus")) / float(ledger["issued"])

    @property
    def pace(self) -> float:
        """Batches a second between the first and the last fifth of the run."""
        low, high = len(self.steps) // 5, 4 * len(self.steps) // 5
        return float((high - low) / (self.steps[high]["at"] - self.steps[low]["at"]))

    @property
    def busy(self) -> dict[str, float]:
        return {name: about["busy"] for name, about in services(self.steps[len(self.steps) // 5 :]).items()}


def run(settings: Settings, model: Path, world: World, steps: int, staleness: int, **changes: Any) -> Outcome:
    """A job of so many batches."""
    given: dict[str, Any] = {"domain": "async_ar" if staleness else "ar", "steps": steps, "data__batch_size": BATCH}
    given |= {"schedule": {"max_staleness": staleness}, "train__checkpoint_every": 0, "logging": {"texts": 0}}
    client = connect(settings.redis_url)
    job = create(client, prepare(recipe(model, **(given | changes)), settings))
    process = multiprocessing.get_context("fork").Process(target=simulate, args=(settings, job, world))
    process.start()
    doc = load_doc(client, job)
    assert doc is not None
    Runner(lambda: connect(settings.redis_url), open_job(doc, settings), settings).run()
    process.terminate()
    process.join()
    rows = [read_step(fields) for _, fields in client.xrange(JobKeys(job).steps)]
    view = job_view(client, doc)
    assert view["state"] == "done" and view["ledger"]["trained"] == steps * BATCH, view["ledger"]
    return Outcome(rows[-1]["at"] - view["started"], rows, view)


def simulate(settings: Settings, job: str, world: World) -> None:
    with Mesh(settings, job, world) as workers:
        while not workers.stopping.is_set():
            time.sleep(0.1)
        time.sleep(1)
    os._exit(0)


def rows(settings: Settings, model: Path, steps: int) -> list[Row]:
    found: list[Row] = []
    # training takes what synchronous generation of a batch takes: the longest of its groups
    longest = [max(latency(f"sorting:0:{b * BATCH + k}") for k in range(BATCH)) for b in range(steps)]
    balanced = World(train_s=sum(longest) / len(longest))
    walls: dict[int, list[float]] = {s: [] for s in (0, 1, 2, 4)}
    kept: dict[int, Outcome] = {}
    for order in (list(walls), list(reversed(walls))):
        for staleness in order:
            kept[staleness] = run(settings, model, balanced, steps, staleness)
            walls[staleness].append(kept[staleness].wall)
    mean = {s: sum(times) / len(times) for s, times in walls.items()}
    found.append(Row("async / sync wall, staleness 2, training as long as generating", mean[2] / mean[0], 0.60))
    for staleness in (1, 2, 4):  # with 1 a batch still waits for its own longest group, and so does the trainer
        idle = 0.15 if staleness > 1 else None
        done = kept[staleness]
        note = ", ".join(f"{name} busy {share:.0%}" for name, share in done.busy.items())
        found += [
            Row(f"staleness {staleness}: wall / sync", mean[staleness] / mean[0], note=note),
            Row(f"staleness {staleness}: dropped groups, share", done.dropped, 0.03),
            Row(
                f"staleness {staleness}: batches beyond the bound", sum(s["staleness_max"] > staleness for s in done.steps), 0.0
            ),
            Row(f"staleness {staleness}: trainer idle, share", 1 - done.busy["trainer"], idle),
            Row(f"staleness {staleness}: rollouts idle, share", 1 - done.busy["rollout.policy"], idle),
        ]
    found += scaling(settings, model, steps)
    slow = World(balanced.train_s, reward=True)
    ratio = run(settings, model, slow, steps, 4).wall / mean[4]
    found.append(Row("scoring as slow as generating / at once, wall", ratio, 1.1, note="staleness 4"))
    suite = {"source": {"name": "sorting", "params": {"split": "held_out"}}, "size": BATCH, "every": 5, "at": []}
    ratio = run(settings, model, balanced, steps, 2, eval={"held_out": suite}).wall / mean[2]
    found.append(Row("evaluation every 5 batches / none, wall", ratio, 1.05, note=f"{BATCH} prompts, staleness 2"))
    return found


def scaling(settings: Settings, model: Path, steps: int) -> list[Row]:
    """Groups a second of 1, 2 and 4 workers of 4 slots each, where the trainer takes no time."""
    speed = {}
    for workers in (1, 2, 4):
        world = World(train_s=0.0, rollouts=workers, slots=4)
        more = {"schedule": {"max_staleness": 4, "per_worker_inflight": 4}}
        done = run(settings, model, world, steps, 4, **more)
        speed[workers] = done.pace
    return [Row(f"1 → {n} rollout workers: efficiency", speed[n] / (n * speed[1]), 0.9, most=False) for n in (2, 4)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a third of the batches, a tenth of the crowd's")
    quick = parser.parse_args().quick
    steps = 12 if quick else 40
    from shared.models.ar.tiny import make_folder

    with tempfile.TemporaryDirectory(prefix="async-") as name:
        root = Path(name)
        server = RedisServer(root / "redis")
        server.start()
        try:
            model = make_folder(root / "tiny", seed=0)
            settings = Settings(server.url, root, (root,), f"dir:{root}/bodies", 1, None)
            found = rows(settings, model, steps)
        finally:
            server.kill()
        found += crowd.rows(model, 10_000 if quick else 100_000)
        return publish("async_", [*found, *async_real.rows(quick)])


if __name__ == "__main__":
    raise SystemExit(main() > 0)
