"""Evaluation runs: pinned version, greedy, outside the ledger and admission."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from services.controller.lifecycles.state import EvalRun, Evaluated, Group, Issue, Note, Restore
from shared.types.ids import group_id, root_id
from shared.wire.envelope import Measured, Need

if TYPE_CHECKING:
    from services.controller.lifecycles.core import Transition

AHEAD = 2
"""Records that the trainer is asked to measure at once: while it measures one, the next is on its way."""


def at_start(step: Transition) -> None:
    at(step, "start")


def at_end(step: Transition) -> None:
    at(step, "end")


def at(step: Transition, when: str) -> None:
    for name, suite in step.plan.suites.items():
        if when in suite.at:
            begin(step, name, when)


def after_batch(step: Transition) -> None:
    for name, suite in step.plan.suites.items():
        if suite.every and step.root.batches % suite.every == 0 and step.root.batches < step.plan.steps:
            begin(step, name, f"step-{step.root.batches}")


def asked(step: Transition) -> None:
    """What has waited for the batch to be trained."""
    names, phase = step.root.asked, step.root.phase
    step.set(asked=())
    for name in names if phase == "running" else ():
        on_demand(step, name)


def on_demand(step: Transition, suite: str) -> None:
    """One suite, or all of them, at the newest version that can be had; once for each step."""
    names = [name for name in step.plan.suites if suite in ("", name)]
    if not names or step.root.phase != "running":
        step.commands.append(Note("warning", "an evaluation was asked for: there is no suite, or the job does not run (yet)"))
        return
    if step.plan.live and any(r.kind == "train" for r in step.root.records):
        step.set(asked=tuple(dict.fromkeys((*step.root.asked, *names))))  # its version is about to go
        return
    for name in names:
        begin(step, name, f"asked-{step.root.batches}", step.root.current if step.plan.live else step.root.published)


def begin_again(step: Transition, versions: Mapping[str, int], runs: Sequence[EvalRun]) -> None:
    """Runs whose version will not come are begun again, at what there is instead. What the trainer measures, it measures at
    the version that it has."""
    if not step.plan.route:
        return
    for run in runs:
        step.close([g for g in step.groups.values() if (g.suite, g.tag) == (run.suite, run.tag)], in_flight=True)
        step.set(evals=tuple(other for other in step.root.evals if other.key != run.key))
        begin(step, run.suite, run.tag, versions, run.issue + 1)


def resume(step: Transition) -> None:
    """What was under way at the checkpoint that the job has come back to is begun again, and what its own batch makes due."""
    runs = step.root.evals
    step.set(evals=())
    for run in runs:
        begin(step, run.suite, run.tag, issue=run.issue + 1)
    if step.root.batches:
        after_batch(step)


def ask(step: Transition) -> None:
    """Where nothing is rolled out: the next records of the first run go to the trainer, while it does not train."""
    if not step.root.evals or any(r.kind == "train" for r in step.root.records):
        return
    run = step.root.evals[0]
    if not run.asked:
        run = msgspec.structs.replace(run, step=step.root.batches)
    suite = step.plan.suites[run.suite]
    waiting = sum(r.kind == "evaluate" for r in step.root.records)
    while waiting < AHEAD and run.asked < run.size:
        rows = run.asked, min(run.size, run.asked + suite.batch_size)
        step.append("evaluate", suite=run.suite, rows=rows, run=(run.key, run.issue))
        run = msgspec.structs.replace(run, asked=rows[1])
        waiting += 1
    step.set(evals=(run, *step.root.evals[1:]))


def measured(step: Transition, event: Measured) -> None:
    """What the trainer found of the records that it was asked for first; words may come twice."""
    record = next((r for r in step.root.records if r.seq == event.seq and r.kind == "evaluate"), None)
    if record is None:
        if event.seq > step.root.seq:
            step.commands.append(Restore(f"the trainer applied record {event.seq}, the log ends at {step.root.seq}"))
        return
    if record.id != event.id:
        step.commands.append(Restore(f"record {event.seq} is {record.id}, the trainer applied {event.id}"))
        return
    step.set(records=tuple(r for r in step.root.records if r is not record))
    run = next((r for r in step.root.evals if (r.key, r.issue) == record.run), None)
    if run is None:
        return  # it was begun again meanwhile
    if run.done and run.versions != event.versions:
        step.set(evals=tuple(r for r in step.root.evals if r is not run))
        begin(step, run.suite, run.tag, issue=run.issue + 1)
        return
    total, weight, tokens = run.loss
    run = msgspec.structs.replace(
        run,
        versions=dict(event.versions),
        failed=run.failed + record.rows - event.rows,
        loss=(total + event.total, weight + event.weight, tokens + event.tokens),
    )
    _count(step, run, record.rows)


def begin(step: Transition, name: str, tag: str, at: Mapping[str, int] | None = None, issue: int = 0) -> None:
    """Issues the whole suite at these versions (None: the current ones: published, or about to be)."""
    suite = step.plan.suites[name]
    known = step.root.current if at is None else at
    versions = {track: known.get(track, 0) for track in step.plan.tracks}
    needs = {track: Need("exactly", version) for track, version in versions.items()}
    run = EvalRun(
        suite=name, tag=tag, step=step.root.batches, versions=versions, size=suite.size, shelf=step.root.formed, issue=issue
    )
    if run.key in step.root.evaluated or any(known.key == run.key for known in step.root.evals):
        return
    step.set(evals=(*step.root.evals, run))
    for index in range(suite.size if step.plan.route else 0):
        group = Group(
            gid=group_id(root_id(f"eval-{name}-{tag}", 0, index), issue),
            draw=index,
            issue=issue,
            shelf=step.root.formed,
            needs=needs,
            issued_at=step.now,
            kind="eval",
            suite=name,
            tag=tag,
        )
        gid = group.gid
        step.groups[gid] = group
        step.commands.append(Issue(group))


def collect(step: Transition, group: Group) -> None:
    rewards = [r for r in group.rewards if math.isfinite(r)]
    if not rewards:
        failed(step, group)
        return
    run, suite = _run(step, group), step.plan.suites[group.suite]
    reward = sum(rewards) / len(rewards)
    solved = sum(r >= suite.solved for r in rewards)
    body = group.slices[0].body if group.slices else None
    previews = run.previews
    if body is not None and group.draw < step.plan.previews:
        previews = (*previews, (group.draw, body, reward))
    passed = {k: run.passed.get(k, 0.0) + pass_at(k, len(rewards), solved) for k in powers(suite.n)}
    run = msgspec.structs.replace(
        run,
        total=run.total + reward,
        samples=run.samples + len(rewards),
        sum=run.sum + sum(rewards),
        squares=run.squares + sum(r * r for r in rewards),
        components=_components(run.components, group.components),
        passed=passed,
        previews=previews,
    )
    step.close([group], in_flight=True)
    _count(step, run)


def _components(before: Mapping[str, tuple[float, int]], scores: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, int]]:
    found = dict(before)
    for name, values in scores.items():
        finite = [v for v in values if math.isfinite(v)]
        total, count = found.get(name, (0.0, 0))
        found[name] = (total + sum(finite), count + len(finite))
    return found


def powers(n: int) -> list[int]:
    """1, 2, 4, … up to n."""
    return [1 << i for i in range(n.bit_length())]


def pass_at(k: int, n: int, solved: int) -> float:
    """Chance that at least one of k samples solves the prompt, estimated without bias from n samples (arXiv 2107.03374, eq. 1).

    With fewer than k samples (the others failed to be scored): of those that there are.
    """
    k = min(k, n)
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def failed(step: Transition, group: Group) -> None:
    run = _run(step, group)
    step.close([group], in_flight=True)
    _count(step, msgspec.structs.replace(run, failed=run.failed + 1))


def _run(step: Transition, group: Group) -> EvalRun:
    return next(run for run in step.root.evals if (run.suite, run.tag) == (group.suite, group.tag))


def _count(step: Transition, run: EvalRun, count: int = 1) -> None:
    """So many more of its records are done."""
    run = msgspec.structs.replace(run, done=run.done + count)
    others = tuple(r for r in step.root.evals if r.key != run.key)
    if run.done < run.size:
        step.set(evals=tuple(run if r.key == run.key else r for r in step.root.evals))
        return
    step.set(evals=others, evaluated=(*step.root.evaluated, run.key))
    step.commands.append(Evaluated(run))
