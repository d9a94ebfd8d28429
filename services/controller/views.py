"""What people see of a job, computed from durable state when asked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from services.controller import busy
from services.controller.jobs import JobDoc
from services.controller.lifecycles.state import Group, Plan, Root, ledger
from shared.wire.codec import unpack
from shared.wire.envelope import ENDED, Need
from shared.wire.keys import UNFILLED, JobKeys


def job_view(client: Any, doc: JobDoc) -> dict[str, Any]:
    """State, step, rates, what it waits for, ledger."""
    keys = JobKeys(doc.id)
    with client.pipeline(transaction=False) as pipe:
        pipe.hget(keys.state, "snapshot")
        pipe.hvals(keys.rows)
        pipe.xrevrange(keys.steps, count=10)
        pipe.hgetall(keys.counts)
        pipe.xlen(keys.dead)
        pipe.hvals(keys.evals)
        pipe.hget(UNFILLED, doc.id)
        packed, rows, recent, counts, dead_letters, evals, unfilled = pipe.execute()
    root = unpack(packed, Root) if packed else Root()
    groups = [unpack(row, Open) for row in rows]
    steps = [read_step(fields) for _, fields in reversed(recent)]
    services = busy.services(steps)
    return {
        "id": doc.id,
        "name": doc.recipe["name"],
        "domain": doc.plan.domain,
        "state": "paused" if root.paused and root.phase == "running" else root.phase,
        "reason": root.reason,
        "created": doc.created,
        "started": root.started_at or None,
        "step": root.batches,
        "steps": doc.plan.steps,
        "incarnation": root.incarnation,
        "versions": {"trainer": root.current, "published": root.published},
        "publishes": {
            "count": root.publishes,
            "bytes": root.published_bytes,
            "seconds": round(root.publish_seconds, 3),
        },
        "rates": rates(steps, root),
        "last": steps[-1] if steps else None,
        "waits_for": waits_for(doc.plan, root, groups),
        "log": {"bytes": root.log_bytes, "budget": doc.plan.log_budget},
        "services": services,
        "bottleneck": busy.bottleneck(services),
        "unfilled": unfilled.decode() if unfilled and root.phase not in ENDED else "",
        "ledger": ledger(root),
        "counts": {k.decode(): int(v) for k, v in counts.items()},
        "dead_letters": dead_letters,
        "evals": [msgspec.msgpack.decode(e) for e in evals],
        "warnings": list(doc.warnings),
    }


class Open(msgspec.Struct, frozen=True):
    """What a view reads of a group's row."""

    needs: dict[str, Need]
    kind: str = "train"
    slices: tuple[msgspec.Raw, ...] | None = None


def steps(client: Any, job: str, since: int, limit: int) -> list[dict[str, Any]]:
    """The steps after `since`."""
    rows = client.xrange(JobKeys(job).steps)
    return [step for step in (read_step(fields) for _, fields in rows) if step["step"] > since][:limit]


def read_step(fields: dict[bytes, bytes]) -> dict[str, Any]:
    return dict(msgspec.msgpack.decode(fields[b"m"]))


def rates(steps: list[dict[str, Any]], root: Root) -> dict[str, float]:
    """Per second, over the last ten steps."""
    if len(steps) < 2:
        return {}
    span = steps[-1]["at"] - steps[0]["at"]
    if span <= 0:
        return {}
    counted = steps[1:]
    return {
        "steps": (len(steps) - 1) / span,
        "samples": sum(s.get("samples", 0) for s in counted) / span,
        "tokens": sum(s.get("tokens", 0) for s in counted) / span,
    }


def waits_for(plan: Plan, root: Root, groups: Iterable[Open | Group]) -> str:
    """The name of the wait, and how long it has lasted."""
    if root.phase in ENDED:
        return ""
    since = f"{max(0.0, time.time() - root.changed_at):.0f} s" if root.changed_at else "since its start"
    if not root.trainer_up:
        return "a trainer to load the model"
    if root.phase == "starting":
        missing = [t for t in plan.tracks if t not in root.published]
        return f"the first version of {', '.join(missing)}"
    training = next((r for r in root.records if r.kind == "train"), None)
    flights = [g for g in groups if g.kind == "train" and g.slices is None]
    if training is not None:
        return f"the trainer: step {root.batches + 1} ({since})"
    if flights and any(need.version > root.published.get(t, 0) for t, need in flights[0].needs.items()):
        return f"the publish of version {root.current[plan.tracks[0]]} ({since})"
    if flights:
        return f"rollout and reward of {len(flights)} groups ({since})"
    if root.paused:
        return "resume"
    if root.evals:
        run = root.evals[0]
        return f"evaluation {run.suite} ({run.tag}): {run.done} of {run.size}"
    if root.log_bytes >= plan.log_budget:
        return f"a checkpoint: the train log retains {root.log_bytes} bytes of {plan.log_budget}"
    if root.records:
        return f"{root.records[0].kind} of record {root.records[0].seq} ({since})"
    return "admission"


def summary(client: Any, jobs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a job, newest first."""
    with client.pipeline(transaction=False) as pipe:
        for job in jobs:
            pipe.hget(JobKeys(job).state, "snapshot")
        snapshots = pipe.execute()
    out = []
    for (job, facts), packed in zip(jobs.items(), snapshots, strict=True):
        root = unpack(packed, Root) if packed else Root()
        out.append({"id": job, **facts, "state": root.phase, "step": root.batches, "reason": root.reason})
    return sorted(out, key=lambda row: -row["created"])
