"""Figures for Prometheus, computed from durable state when they are asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import redis
from prometheus_client.core import GaugeMetricFamily, Metric

from services.controller import views
from services.controller.assignment import read_workers
from services.controller.jobs import load_doc
from shared.wire.envelope import ENDED
from shared.wire.hops import eval_stage
from shared.wire.keys import GROUP, JOBS, JobKeys


def stages(client: Any, job: str) -> list[dict[str, Any]]:
    """The stage streams of a job: waiting, in hand, workers, and how old the oldest entry is (seconds)."""
    doc = load_doc(client, job)
    if doc is None or not doc.plan.route:
        return []
    keys = JobKeys(job)
    rollouts = [s for s in doc.plan.route if s != "reward"]
    scorers = dict.fromkeys((*doc.plan.scorers, *doc.plan.eval_scorers))
    names = [*rollouts, *(map(eval_stage, rollouts) if doc.plan.suites else ()), *(f"reward.{s}" for s in scorers)]
    found = []
    for name in [*names, "inbox"]:
        stream = keys.stage(name)
        size, first = client.xlen(stream), client.xrange(stream, count=1)
        pending, consumers = 0, 0
        try:
            for group in client.xinfo_groups(stream):
                if group["name"] == GROUP.encode():
                    pending, consumers = int(group["pending"]), int(group["consumers"])
        except redis.ResponseError:
            pass  # nobody has written to it or read it
        age = max(0.0, time.time() - int(first[0][0].split(b"-")[0]) / 1000) if first else 0.0
        row = {"stage": name, "waiting": size - pending, "in_hand": pending, "workers": consumers}
        found.append({**row, "oldest_seconds": round(age, 3)})
    return found


class JobCollector:
    """A Prometheus collector over all jobs that have not ended, and the workers."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def collect(self) -> Iterator[Metric]:
        facts = {k.decode(): {"created": 0} for k in self.client.hkeys(JOBS)}
        rows = views.summary(self.client, facts)
        states = GaugeMetricFamily("unimesh_jobs", "Jobs by state", labels=["state"])
        for state, count in sorted(Counter(row["state"] for row in rows).items()):
            states.add_metric([state], count)
        yield states
        yield from self._jobs([row["id"] for row in rows if row["state"] not in ENDED])
        workers = GaugeMetricFamily("unimesh_workers", "Registered agents", labels=["service", "state"])
        found = read_workers(self.client)
        for (service, state), count in sorted(Counter((w.service, w.state) for w in found).items()):
            workers.add_metric([service, state], count)
        yield workers
        restarts = GaugeMetricFamily("unimesh_worker_restarts", "Times that an agent's child failed", labels=["worker"])
        for worker in found:
            restarts.add_metric([worker.name], worker.restarts)
        yield restarts

    def _jobs(self, jobs: list[str]) -> Iterator[Metric]:
        labels = ["job", "name"]
        step = GaugeMetricFamily("unimesh_job_step", "Trained steps", labels=labels)
        last = GaugeMetricFamily("unimesh_job_last", "Figures of the newest step", labels=[*labels, "figure"])
        rate = GaugeMetricFamily("unimesh_job_rate", "Per second over the last ten steps", labels=[*labels, "of"])
        groups = GaugeMetricFamily("unimesh_job_groups", "The ledger: groups by fate", labels=[*labels, "fate"])
        dead = GaugeMetricFamily("unimesh_job_dead_letters", "Dead letters that nobody has settled", labels=labels)
        waiting = GaugeMetricFamily("unimesh_stage_entries", "Messages of a stage", labels=[*labels, "stage", "which"])
        busy = GaugeMetricFamily("unimesh_service_busy", "Share of the last ten steps with work", labels=[*labels, "service"])
        oldest = GaugeMetricFamily("unimesh_stage_oldest_seconds", "Age of a stage's oldest message", labels=[*labels, "stage"])
        for job in jobs:
            doc = load_doc(self.client, job)
            if doc is None:
                continue
            view = views.job_view(self.client, doc)
            own = [job, view["name"]]
            step.add_metric(own, view["step"])
            dead.add_metric(own, view["dead_letters"])
            for name, value in view["rates"].items():
                rate.add_metric([*own, name], value)
            for name, about in view["services"].items():
                busy.add_metric([*own, name], about["busy"])
            for name, value in (view["last"] or {}).items():
                if isinstance(value, int | float):
                    last.add_metric([*own, name], value)
            for fate, count in view["ledger"].items():
                groups.add_metric([*own, fate], sum(count.values()) if isinstance(count, dict) else count)
            for stage in stages(self.client, job):
                for which in ("waiting", "in_hand"):
                    waiting.add_metric([*own, stage["stage"], which], stage[which])
                oldest.add_metric([*own, stage["stage"]], stage["oldest_seconds"])
        yield from (step, last, rate, groups, dead, waiting, oldest, busy)
