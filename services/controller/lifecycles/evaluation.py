"""Evaluation runs: pinned version, greedy, outside the ledger and admission."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from services.controller.lifecycles.state import EvalRun, Evaluated, Group, Issue, Note
from shared.types.ids import group_id, root_id
from shared.wire.envelope import Need

if TYPE_CHECKING:
    from services.controller.lifecycles.core import Transition


def at_start(step: Transition) -> None:
    if "start" in step.plan.eval_at:
        begin(step, "start")


def after_batch(step: Transition) -> None:
    every = step.plan.eval_every
    if every and step.root.batches % every == 0 and step.root.batches < step.plan.steps:
        begin(step, f"step-{step.root.batches}")


def at_end(step: Transition) -> None:
    if "end" in step.plan.eval_at:
        begin(step, "end")


def on_demand(step: Transition) -> None:
    """At the newest published version; once for each step."""
    if step.plan.eval_size and step.root.phase == "running":
        begin(step, f"asked-{step.root.batches}", step.root.published)
    else:
        step.commands.append(Note("warning", "an evaluation was asked for: there is no suite, or the job does not run (yet)"))


def begin(step: Transition, tag: str, at: Mapping[str, int] | None = None) -> None:
    """Issues the whole suite at these versions (None: the current ones: published, or about to be)."""
    if tag in step.root.evaluated or any(run.tag == tag for run in step.root.evals):
        return
    known = step.root.current if at is None else at
    versions = {track: known.get(track, 0) for track in step.plan.tracks}
    needs = {track: Need("exactly", version) for track, version in versions.items()}
    run = EvalRun(tag=tag, step=step.root.batches, versions=versions, size=step.plan.eval_size)
    step.set(evals=(*step.root.evals, run))
    for index in range(step.plan.eval_size):
        gid = group_id(root_id(f"eval-{tag}", 0, index), 0)
        group = Group(
            gid=gid, draw=index, issue=0, shelf=step.root.formed, needs=needs, issued_at=step.now, kind="eval", tag=tag
        )
        step.groups[gid] = group
        step.commands.append(Issue(group))


def collect(step: Transition, group: Group) -> None:
    reward = group.rewards[0]
    if not math.isfinite(reward):
        failed(step, group)
        return
    run = _run(step, group)
    body = group.slices[0].body if group.slices else None
    previews = run.previews
    if body is not None and group.draw < step.plan.previews:
        previews = (*previews, (group.draw, body, reward))
    _count(step, group, msgspec.structs.replace(run, total=run.total + reward, previews=previews))


def failed(step: Transition, group: Group) -> None:
    run = _run(step, group)
    _count(step, group, msgspec.structs.replace(run, failed=run.failed + 1))


def _run(step: Transition, group: Group) -> EvalRun:
    return next(run for run in step.root.evals if run.tag == group.tag)


def _count(step: Transition, group: Group, run: EvalRun) -> None:
    run = msgspec.structs.replace(run, done=run.done + 1)
    others = tuple(r for r in step.root.evals if r.tag != run.tag)
    step.close([group], in_flight=True)
    if run.done < run.size:
        step.set(evals=(*others, run))
        return
    step.set(evals=others, evaluated=(*step.root.evaluated, run.tag))
    step.commands.append(Evaluated(run))
