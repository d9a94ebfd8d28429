"""The pure state machine of every domain: `(state, events) -> (state, commands)`. No I/O; time comes in with the tick.

Domains differ in their plan only: the route, the branches, the tracks, the staleness budget. Whatever is decided here can be
computed again from durable state, so any controller may die anywhere and another goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.controller.lifecycles import admission, choosing, evaluation, publishing
from services.controller.lifecycles.state import (
    Append,
    BadRecord,
    Close,
    Command,
    Covered,
    Event,
    Gone,
    Group,
    Issue,
    Note,
    Plan,
    Record,
    Restore,
    State,
    Stepped,
    Tick,
)
from services.controller.scoring import batch_stats, scored
from shared.types.ids import group_id
from shared.wire.envelope import (
    ENDED,
    Completed,
    Dead,
    Failure,
    Measured,
    Operator,
    Published,
    RolledBack,
    Saved,
    Started,
    Trained,
)

replace = msgspec.structs.replace
MOST_DYING = 64
"""Where so many groups die one after the other (and four batches), what is wrong is not the prompts."""
RootOf = Callable[[int], str]
"""Root id of a draw number: a pure function of the data order."""


def advance(
    plan: Plan, state: State, events: Sequence[Event], tick: Tick, nonce: str, root_of: RootOf
) -> tuple[State, list[Command]]:
    """Applies the events in order, then does whatever has become due.

    Args:
        nonce: a fresh random text; ids of log records derive from it, so that two histories never share one.
    """
    step = Transition(plan, state, tick.now, nonce, root_of)
    for event in events:
        step.apply(event)
    step.settle()
    return State(step.root, step.groups), step.commands


class Transition:
    """One fold: a private copy of the state and the commands collected so far."""

    def __init__(self, plan: Plan, state: State, now: float, nonce: str, root_of: RootOf) -> None:
        self.plan, self.root, self.groups = plan, state.root, dict(state.groups)
        self.now, self.nonce, self.root_of = now, nonce, root_of
        self.commands: list[Command] = []
        self.wants_checkpoint = False
        self.new: set[str] = set()
        """Groups that were issued in this fold: whether their records can be used is not known yet."""

    def set(self, **changes: Any) -> None:
        self.root = msgspec.structs.replace(self.root, **changes)

    def apply(self, event: Event) -> None:
        if self.root.phase in ENDED:
            return
        match event:
            case Completed():
                self.completed(event)
            case Dead() | BadRecord():
                self.died(event.gid, event.error)
            case Trained():
                self.trained(event)
            case Measured():
                evaluation.measured(self, event)
            case Published():
                publishing.count(self, event)
                publishing.published(self, event.track, event.version)
            case Gone():
                publishing.gone(self, event)
            case Saved():
                self.saved(event.seq)
            case Started():
                self.started(event)
            case Failure():
                self.failure(event)
            case RolledBack():
                self.commands.append(Restore(event.detail))
            case Operator():
                self.operator(event)

    # rollout side ---------------------------------------------------------------------------------------------------------

    def completed(self, event: Completed) -> None:
        group = self.groups.get(event.gid)
        if group is None or group.slices is not None:
            return
        ready = scored(self.plan, group, event, self.now, self.root.completed)
        self.set(completed=self.root.completed + 1, dying=0)
        if group.kind == "eval":
            evaluation.collect(self, ready)
            return
        self.groups[group.gid] = ready
        finite = sum(map(math.isfinite, ready.rewards))
        if finite == len(ready.rewards):
            choosing.sift(self, ready)
        elif self.plan.on_failed == "abort":
            self.end("failed", f"scoring failed for {len(ready.rewards) - finite} samples of {group.gid} (on_failed: abort)")
        elif self.plan.on_failed == "drop_group" or finite < min(2, len(ready.rewards)):
            self.drop(ready, "unscored")
        else:
            choosing.sift(self, ready)

    def died(self, gid: str, error: str) -> None:
        group = self.groups.get(gid)
        if group is None:
            return
        self.commands.append(Note("warning", f"{gid} is dead: {error}"))
        if group.kind == "eval":
            evaluation.failed(self, group)
            return
        self.close([group], in_flight=True)
        dying = self.root.dying + 1
        self.set(dead=self.root.dead + 1, dead_draws=(*self.root.dead_draws, group.draw), dying=dying)
        if dying >= max(MOST_DYING, 4 * self.plan.batch_size):
            self.end("failed", f"the last {dying} groups all died, the last one of: {error}")

    def drop(self, group: Group, reason: str) -> None:
        """The prompt is issued again; its last issue ends as dead, not as dropped."""
        self.close([group], in_flight=group.slices is None)
        if group.issue >= self.plan.max_reissues:
            self.commands.append(Note("warning", f"{group.gid} is dead: {reason} at its last issue"))
            self.set(dead=self.root.dead + 1, dead_draws=(*self.root.dead_draws, group.draw))
            return
        counts = self.root.dropped | {reason: self.root.dropped.get(reason, 0) + 1}
        again = (*self.root.again, (group.draw, group.issue + 1))
        self.set(dropped=counts, again=again, reissued=self.root.reissued + 1)

    def discard(self, groups: Sequence[Group], reason: str) -> None:
        """Dropped, and their prompts are not issued again."""
        for in_flight in (True, False):
            self.close([g for g in groups if (g.slices is None) == in_flight], in_flight)
        if groups:
            self.set(dropped=self.root.dropped | {reason: self.root.dropped.get(reason, 0) + len(groups)})

    def close(self, groups: Sequence[Group], in_flight: bool) -> None:
        for group in groups:
            del self.groups[group.gid]
        if groups:
            self.commands.append(Close(tuple(g.gid for g in groups), in_flight))

    # trainer side ---------------------------------------------------------------------------------------------------------

    def started(self, event: Started) -> None:
        current = self.root.current or event.versions
        self.set(trainer_up=True, current=dict(current))
        self.commands.append(Note("info", f"trainer is up: {event.world_size} ranks, log applied to {event.applied_seq}"))
        for track, version in event.published.items():
            publishing.published(self, track, version)

    def trained(self, event: Trained) -> None:
        record = next((r for r in self.root.records if r.seq == event.seq), None)
        if record is None:
            if event.seq > self.root.seq:
                self.commands.append(Restore(f"the trainer applied record {event.seq}, the log ends at {self.root.seq}"))
            elif event.seq == self.root.trained_seq and event.versions != self.root.current:
                publishing.retrained(self, event)
            return
        if record.id != event.id or record.kind != "train":
            self.commands.append(Restore(f"record {event.seq} is {record.id}, the trainer applied {event.id}"))
            return
        batch = self.root.batches + 1
        updated = any(event.updates.values())
        unsynced = (*self.root.unsynced, (batch, event.versions[self.plan.tracks[0]])) if updated else self.root.unsynced
        self.set(
            records=tuple(r for r in self.root.records if r is not record),
            batches=batch,
            dying=0,
            trained=self.root.trained + len(record.gids),
            current=dict(event.versions),
            unsynced=unsynced,
            changed_at=self.now,
            trained_seq=record.seq,
        )
        publishing.promise(self, event.versions)
        self.commands.append(Stepped(record, event, self.now))
        if event.reason:
            self.commands.append(Note("warning", f"step {batch} made no update: {event.reason}"))
        evaluation.after_batch(self)
        evaluation.asked(self)

    def saved(self, seq: int) -> None:
        record = next((r for r in self.root.records if r.seq == seq and r.kind == "checkpoint"), None)
        if record is None:
            return
        untrained = [r.shelf for r in self.root.records if r.kind == "train" and r.seq > seq]
        waiting = [group.shelf for group in self.groups.values()]
        below = min([record.shelf, *untrained, *waiting, *(run.shelf for run in self.root.evals)])
        self.commands.append(Covered(seq, self.root.swept, below))
        left = tuple(r for r in self.root.records if r is not record)
        later = {r.seq for r in left if r.kind == "checkpoint"}  # they had counted what this one has made needless
        self.set(
            records=tuple(replace(r, nbytes=max(0, r.nbytes - record.nbytes)) if r.seq in later else r for r in left),
            saved_seq=seq,
            log_bytes=self.root.log_bytes - record.nbytes,
            swept=max(below, self.root.swept),
        )

    # operator and failure -------------------------------------------------------------------------------------------------

    def operator(self, event: Operator) -> None:
        if event.command == "cancel":
            self.end("cancelled", "cancelled by the operator")
        elif event.command == "checkpoint":
            self.wants_checkpoint = True
        elif event.command == "evaluate":
            evaluation.on_demand(self, event.suite)
        elif event.command == "reissue":
            self.reissue(event.gid)
        else:
            self.set(paused=event.command == "pause")
            self.commands.append(Note("info", f"job {event.command}d by the operator"))

    def reissue(self, gid: str) -> None:
        """The dead group keeps its fate; its prompt comes back under the next issue number."""
        root, _, issue = gid.partition("#")
        draw = next((d for d in self.root.dead_draws if self.root_of(d) == root), None)
        if draw is None or not issue.isdigit():
            self.commands.append(Note("warning", f"{gid} is not dead (or was issued again): nothing to issue"))
            return
        left = tuple(d for d in self.root.dead_draws if d != draw)
        self.set(dead_draws=left, again=(*self.root.again, (draw, int(issue) + 1)))
        self.commands.append(Note("info", f"{gid}: its prompt is issued again"))

    def failure(self, event: Failure) -> None:
        self.commands.append(Note("error" if event.fatal else "warning", f"{event.origin}: {event.error}"))
        if event.fatal:
            self.end("failed", f"{event.origin}: {event.error}")

    def end(self, phase: str, reason: str) -> None:
        """Ends now: what is open is closed, the trainer stops."""
        word = "cancelled" if phase == "cancelled" else "job failed"
        in_training = {gid for r in self.root.records for gid in r.gids}
        count = sum(g.kind == "train" for g in self.groups.values()) + len(in_training - self.groups.keys())
        self.close(list(self.groups.values()), in_flight=True)
        if count:
            self.set(dropped=self.root.dropped | {word: self.root.dropped.get(word, 0) + count})
        self.append("stop")
        self.commands.append(Covered(self.root.saved_seq, self.root.swept, self.root.formed + 1))
        self.set(phase=phase, reason=reason, records=(), evals=(), changed_at=self.now)
        self.commands.append(Note("info" if phase == "cancelled" else "error", reason))

    # what has become due --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        if self.root.phase == "starting" and admission.can_start(self.plan, self.root):
            self.set(phase="running", started_at=self.now, changed_at=self.now)
            evaluation.resume(self)
            evaluation.at_start(self)
        if self.root.phase == "running":
            choosing.drop_old(self)
            self.launch()
            if (self.plan.route and not self.plan.live) or not self.root.evals:  # the trainer's own come first
                self.form_batch()
            if self.root.batches >= self.plan.steps:
                self.finish()
        if not self.plan.route and self.root.phase in ("running", "finishing"):
            evaluation.ask(self)
        if (self.wants_checkpoint or self.overfull()) and self.root.phase == "running":
            self.append("checkpoint")  # last: its state is that of the end of this commit
        if self.root.phase == "finishing":
            self.conclude()

    def launch(self) -> None:
        for _ in range(admission.launch(self.plan, self.root)):
            cohort, needs = choosing.demand(self)
            if self.root.again:
                (draw, issue), *rest = self.root.again
                self.set(again=tuple(rest))
            else:
                draw, issue = self.root.draw, 0
                self.set(draw=draw + 1)
            group = Group(
                gid=group_id(self.root_of(draw), issue),
                draw=draw,
                issue=issue,
                shelf=self.root.formed,
                cohort=cohort,
                needs=needs,
                issued_at=self.now,
            )
            if not self.plan.route:  # nothing to roll out: the record is ready as it is
                group = msgspec.structs.replace(group, slices=(), ready_at=self.now, order=self.root.issued)
            self.groups[group.gid] = group
            self.new.add(group.gid)
            self.set(issued=self.root.issued + 1)
            self.commands.append(Issue(group))

    def form_batch(self) -> None:
        if any(r.kind == "train" for r in self.root.records):
            return
        chosen = choosing.batch(self)
        if not chosen:
            return
        self.append("train", tuple(chosen))
        told = self.root.dropped | {"reissued": self.root.reissued}
        cohorts = {k: versions for k, versions in self.root.cohorts.items() if k != self.root.formed}
        self.set(formed=self.root.formed + 1, filtered=0, told=told, cohorts=cohorts)
        self.close(chosen, in_flight=False)
        self.discard(admission.surplus(self.plan, self.root, self.groups), "surplus")
        last = self.root.batches + 1 >= self.plan.steps
        if admission.publish_due(self.plan, self.root, last):
            self.append("publish", pinned=admission.evaluated(self.plan, self.root))
        if last or self.checkpoint_due():
            self.append("checkpoint")

    def checkpoint_due(self) -> bool:
        """By the recipe, or since the log retains 70 % of what it may."""
        every = self.plan.checkpoint_every
        full = self.root.log_bytes >= 0.7 * self.plan.log_budget
        waiting = any(r.kind == "checkpoint" for r in self.root.records)
        return bool(every and (self.root.batches + 1) % every == 0) or (full and not waiting)

    def overfull(self) -> bool:
        """What was built with a batch has filled the log, and no batch that would bring a checkpoint is about to form."""
        full = self.root.log_bytes >= 0.7 * self.plan.log_budget
        return full and not any(r.kind in ("train", "checkpoint") for r in self.root.records)

    def append(self, kind: Any, groups: tuple[Group, ...] = (), **more: Any) -> None:
        """`more`: as in Append."""
        seq, entry_id = self.root.seq + 1, f"{self.nonce}.{self.root.seq + 1}"
        command = Append(seq, entry_id, self.root.last_id, kind, groups, **more)
        self.commands.append(command)
        shelves = [g.shelf for g in groups]
        if kind == "checkpoint":  # what may be trained after it, whenever its word comes
            shelves = [g.shelf for g in self.groups.values()] + [run.shelf for run in self.root.evals]
        record = Record(
            seq=seq,
            id=entry_id,
            kind=kind,
            gids=tuple(g.gid for g in groups),
            at=self.now,
            shelf=min([*shelves, self.root.formed]),
            stats=batch_stats(self.plan, self.root, groups) if groups else {},
            nbytes=self.root.log_bytes if kind == "checkpoint" else 0,
            rows=command.rows[1] - command.rows[0],
            run=command.run,
        )
        kept = self.root.records if kind == "stop" else (*self.root.records, record)
        grown = sum(head.body.nbytes for g in groups for head in g.slices or () if head.body is not None)
        self.set(seq=seq, last_id=entry_id, records=kept, log_bytes=self.root.log_bytes + grown)

    def finish(self) -> None:
        """The steps are done: what is still open is surplus."""
        self.discard([g for g in self.groups.values() if g.kind == "train"], "surplus")
        self.set(phase="finishing", changed_at=self.now)
        evaluation.at_end(self)

    def conclude(self) -> None:
        if not self.root.records and not self.root.evals:
            self.append("stop")
            self.commands.append(Covered(self.root.saved_seq, self.root.swept, self.root.formed + 1))
            self.set(phase="done", changed_at=self.now)
            self.commands.append(Note("info", f"done: {self.root.batches} steps"))


def missing(plan: Plan, state: State) -> int:
    """How many groups the next batch lacks."""
    return plan.batch_size - sum(g.cohort in (None, state.root.formed) for g in choosing.complete(state.groups))
