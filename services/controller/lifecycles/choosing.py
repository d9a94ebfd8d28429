"""Which groups make a batch, which ones are dropped before, and what a new one is issued for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from services.controller.lifecycles import admission
from services.controller.lifecycles.state import Group, Note, Plan
from shared.wire.envelope import Need

if TYPE_CHECKING:
    from services.controller.lifecycles.core import Transition


def complete(groups: Mapping[str, Group]) -> list[Group]:
    """Those that wait to be trained."""
    return [g for g in groups.values() if g.kind == "train" and g.slices is not None]


def sift(step: Transition, group: Group) -> None:
    """A group of equal rewards gives no gradient: the next prompt takes its place, up to a bound."""
    most, root = step.plan.max_backfill, step.root
    if most is None or len({r for r in group.rewards if math.isfinite(r)}) > 1:
        return
    if root.filtered < most:
        step.set(filtered=root.filtered + 1)
        step.discard([group], "zero_variance")
    elif root.filtered == most:  # said once a batch
        step.set(filtered=most + 1)
        text = f"batch {root.formed + 1}: {most} groups of equal rewards were replaced; further ones are trained"
        step.commands.append(Note("warning", text))


def drop_old(step: Transition) -> None:
    """Complete groups beyond the bound, and those in flight beyond the deadline: one slow sibling stalls nobody."""
    plan, limit = step.plan, step.plan.group_deadline
    if not plan.route:
        return
    for group in [g for g in step.groups.values() if g.kind == "train"]:
        if group.gid not in step.groups:
            continue  # it went with its cohort
        if group.slices is None:  # its last issue has all the time it wants: slowness makes no prompt bad
            if limit is not None and step.now - group.issued_at > limit and group.issue < plan.max_reissues:
                step.drop(group, "deadline")
        elif plan.max_staleness and not admission.fresh(plan, step.root, group):
            if group.cohort is not None:  # what takes its place is of a newer version
                disband(step, group.cohort, "stale")
            else:
                step.drop(group, "stale")


def disband(step: Transition, cohort: int, reason: str) -> None:
    """Its groups are issued again, for a version of that time."""
    step.set(cohorts={k: versions for k, versions in step.root.cohorts.items() if k != cohort})
    for group in [g for g in step.groups.values() if g.cohort == cohort]:
        step.drop(group, reason)


def demand(step: Transition) -> tuple[int | None, dict[str, Need]]:
    """The cohort of the next group, where versions are not mixed, and the versions that it needs."""
    plan, root = step.plan, step.root
    versions = admission.takeable(plan, root)
    if plan.mixing:
        return None, {t: Need(plan.need, versions.get(t, 0)) for t in plan.tracks if plan.route}
    members = [g.cohort for g in step.groups.values() if g.kind == "train"]
    cohort = next(k for k in itertools.count(root.formed) if members.count(k) < plan.batch_size)
    known = root.cohorts.get(cohort)
    if known is None:
        known = {t: versions.get(t, 0) for t in plan.tracks}
        step.set(cohorts=root.cohorts | {cohort: known})
    return cohort, {t: Need("exactly", version) for t, version in known.items()}


def batch(step: Transition) -> list[Group]:
    """The groups of the next batch: of those that are complete the first in the order of the data, which are the oldest; none
    while some are missing."""
    plan, root = step.plan, step.root
    ready = [g for g in complete(step.groups) if g.gid not in step.new and g.cohort in (None, root.formed)]
    if len(ready) < plan.batch_size or root.batches >= plan.steps:
        return []
    if not plan.waits_for_old:
        chosen = sorted(ready, key=lambda g: (g.draw, g.issue))[: plan.batch_size]
    else:  # those that keep for the shortest time first
        keeps = {g.gid: admission.keeps(plan, root, g) for g in step.groups.values() if g.kind == "train"}
        chosen = sorted(ready, key=lambda g: (keeps[g.gid], g.order))[: plan.batch_size]
        if _hasty(plan, step.groups, chosen, keeps):
            return []
    return sorted(chosen, key=lambda g: (g.draw, g.issue))


def _hasty(plan: Plan, groups: Mapping[str, Group], chosen: Sequence[Group], keeps: Mapping[str, int]) -> bool:
    """Whether more groups would be left over than later batches can take in time, and some that are in flight should come in
    the place of chosen ones that keep for longer."""
    taken = {g.gid for g in chosen}
    left = [g for g in groups.values() if g.gid in keeps and g.gid not in taken]
    for batches in range(plan.max_staleness):
        urgent = [g for g in left if keeps[g.gid] <= batches]
        in_flight = any(g.slices is None for g in urgent)
        if len(urgent) > batches * plan.batch_size and in_flight and any(keeps[g.gid] > batches for g in chosen):
            return True
    return False
