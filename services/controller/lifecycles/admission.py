"""How many groups may be issued now, computed from durable state alone (design section 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from services.controller.lifecycles.state import Group, Plan, Root


def can_start(plan: Plan, root: Root) -> bool:
    """The trainer is up and, if anything is rolled out, the first version of every track is in the store."""
    return root.trainer_up and (not plan.route or all(track in root.published for track in plan.tracks))


def promised(root: Root) -> dict[str, int]:
    """Newest version by track that is in the store or about to be: its publish is the next thing that the trainer does."""
    waits = next((r.waits for r in reversed(root.records) if r.waits), {})
    return root.published | waits


def takeable(plan: Plan, root: Root) -> dict[str, int]:
    """The versions that a request issued now demands. One that needs exactly the next version may be under way before it is
    complete: its worker waits for it. Where an older version will do, nobody should wait.
    """
    if plan.live:
        return root.current
    return promised(root) if plan.need == "exactly" else root.published


def batches_since(root: Root, versions: Mapping[str, int], track: str) -> int:
    """Batches with at least one update since these versions."""
    return sum(version > versions.get(track, 0) for _, version in root.unsynced)


def retained(root: Root, seq: int, nbytes: int) -> Root:
    """The body of record `seq`, which was built when the record was written, counts in the log's budget too."""
    records = [replace(r, nbytes=r.nbytes + nbytes) if r.kind == "checkpoint" and r.seq > seq else r for r in root.records]
    return replace(root, log_bytes=root.log_bytes + nbytes, records=tuple(records))


def launch(plan: Plan, root: Root) -> int:
    """Groups to issue now."""
    if root.paused or root.log_bytes >= plan.log_budget:
        return 0
    left = plan.steps - root.batches
    since = batches_since(root, takeable(plan, root), plan.tracks[0])
    freshness = max(0, plan.max_staleness - since + 1) if plan.route else left
    allowed = min(freshness, left) * plan.batch_size
    in_training = sum(len(r.gids) for r in root.records)
    if plan.oversample > 1:  # what is in training has formed
        allowed = in_training + math.ceil(max(0, allowed - in_training) * plan.oversample)
    return max(0, min(plan.max_inflight, allowed) - root.outstanding)


def surplus(plan: Plan, root: Root, groups: Mapping[str, Group]) -> list[Group]:
    """What is left over now that a batch has formed, the slowest first: all beyond what the batches to come may need."""
    if plan.oversample <= 1:
        return []
    open_groups = [g for g in groups.values() if g.kind == "train"]
    left = plan.steps - root.batches - 1
    excess = len(open_groups) - math.ceil(min(plan.max_staleness, left) * plan.batch_size * plan.oversample)
    flights = sorted((g for g in open_groups if g.slices is None), key=lambda g: (g.issued_at, g.draw))
    rest = sorted((g for g in open_groups if g.slices is not None), key=lambda g: -g.order)
    return [*flights, *rest][: max(0, excess)]


def oldest(root: Root, group: Group) -> int:
    """How many updates lie between the trainer's version and the oldest that the group has, or may come back with."""
    if group.slices is None:
        return max((root.current.get(t, 0) - need.version for t, need in group.needs.items()), default=0)
    parts = [part for head in group.slices for part in head.parts if part.versions]
    return max((root.current.get(part.track, 0) - min(part.versions) for part in parts), default=0)


def keeps(plan: Plan, root: Root, group: Group) -> int:
    """How many batches may go before the group: 0 is the next one's or nobody's."""
    return plan.max_staleness - -(-oldest(root, group) // plan.updates_per_batch)


def fresh(plan: Plan, root: Root, group: Group) -> bool:
    """The hard per-sample bound: `current - oldest version in the group ≤ max_staleness × updates per batch`, per track."""
    return group.slices is None or oldest(root, group) <= plan.max_staleness * plan.updates_per_batch


def evaluated(plan: Plan, root: Root) -> bool:
    """Whether a suite is due after the batch being formed: it takes exactly that version from the store."""
    return any(s.every and (root.batches + 1) % s.every == 0 for s in plan.suites.values())


def publish_due(plan: Plan, root: Root, last: bool) -> bool:
    """Whether the batch being formed is followed by a publish."""
    if plan.publish_at_end_only:
        return last
    return last or evaluated(plan, root) or batches_since(root, promised(root), plan.tracks[0]) + 1 >= plan.sync_interval
