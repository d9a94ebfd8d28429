"""Versions: what is published, what the log promises, and what becomes of groups whose version turned out another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from services.controller.lifecycles import choosing, evaluation
from services.controller.lifecycles.state import Gone, Note
from shared.wire.envelope import Published, Trained

if TYPE_CHECKING:
    from services.controller.lifecycles.core import Transition

replace = msgspec.structs.replace


def count(step: Transition, event: Published) -> None:
    """Once for each version: a trainer may repeat its words."""
    root = step.root
    if event.nbytes and event.version > root.published.get(event.track, -1):
        step.set(
            publishes=root.publishes + 1,
            published_bytes=root.published_bytes + event.nbytes,
            publish_seconds=root.publish_seconds + event.seconds,
        )


def published(step: Transition, track: str, version: int) -> None:
    if version > step.root.published.get(track, -1):
        step.set(published=step.root.published | {track: version})
    newest = step.root.published[track]
    if track == step.plan.tracks[0]:
        step.set(unsynced=tuple(entry for entry in step.root.unsynced if entry[1] > newest))
    _answer(step)


def promise(step: Transition, versions: Mapping[str, int]) -> None:
    """The trainer's versions after the newest batch: the publish records up to the next batch are about them."""
    first = min((r.seq for r in step.root.records if r.kind == "train"), default=math.inf)
    known = {r.seq for r in step.root.records if r.kind == "publish" and not r.waits and r.seq < first}
    waits = {track: versions[track] for track in step.plan.tracks}
    step.set(records=tuple(replace(r, waits=waits) if r.seq in known else r for r in step.root.records))
    _answer(step)


def _answer(step: Transition) -> None:
    """Publish records whose versions are all complete are done; a version that did not move counts as published."""
    complete = step.root.published
    left = [r for r in step.root.records if not r.waits or any(v > complete.get(t, -1) for t, v in r.waits.items())]
    step.set(records=tuple(left))


def retrained(step: Transition, event: Trained) -> None:
    """The newest batch, applied again after a crash, came to other versions than before: what was promised is void.

    Groups that were issued for a version that will not come are issued again.
    """
    batch, before, track = step.root.batches, step.root.current, step.plan.tracks[0]
    step.commands.append(Note("warning", f"step {batch}, trained again, made {event.versions}; before it was {before}"))
    void = tuple(replace(r, waits={}) if r.waits == before else r for r in step.root.records)
    unsynced = tuple(entry for entry in step.root.unsynced if entry[0] != batch)
    if event.versions[track] > step.root.published.get(track, -1):
        unsynced = (*unsynced, (batch, event.versions[track]))
    step.set(current=dict(event.versions), records=void, unsynced=unsynced)
    promise(step, event.versions)
    for group in [g for g in step.groups.values() if g.kind == "train" and g.slices is None]:
        if any(_void(step, event, name, need.version) for name, need in group.needs.items()):
            step.drop(group, "unpublished")
    void_runs = [r for r in step.root.evals if any(_void(step, event, t, v) for t, v in r.versions.items())]
    evaluation.begin_again(step, event.versions, void_runs)


def _void(step: Transition, event: Trained, track: str, version: int) -> bool:
    """Whether a version will not come (or has been, where there is none but the trainer's own)."""
    made = event.versions.get(track, 0)
    return version != made if step.plan.live else version > made


def gone(step: Transition, event: Gone) -> None:
    """What is pinned to the version is issued again for one that there is."""
    if step.plan.live:
        return  # nothing is read from the store
    step.commands.append(Note("warning", f"version {event.version} of {event.track} is gone: what needs it is issued again"))
    for cohort in [k for k, versions in step.root.cohorts.items() if versions.get(event.track) == event.version]:
        choosing.disband(step, cohort, "unpublished")
    runs = [r for r in step.root.evals if r.versions.get(event.track) == event.version]
    evaluation.begin_again(step, step.root.published, runs)
