"""Every event in every kind of state of the pure lifecycle: nothing breaks, what is said twice counts once, and the job goes
on to its end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from services.controller.lifecycles.state import (
    BadRecord,
    Branch,
    Event,
    Gone,
    Restore,
    State,
    SuitePlan,
    balanced,
)
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
from tests.controller.world import World, plan

SUITES = {"s": SuitePlan(at=("start", "end"), every=1, size=2, scorers=("exact",))}
HELD_OUT = {"s": SuitePlan(at=("start", "end"), every=1, size=3, batch_size=2)}
ASYNC: dict[str, Any] = {"need": "at_least", "max_staleness": 2, "max_inflight": 6}
PLANS: dict[str, dict[str, Any]] = {
    "sync": {"suites": SUITES},
    "async": ASYNC | {"suites": SUITES},
    "live": {"suites": SUITES, "live": True, "publish_at_end_only": True},
    "interval": ASYNC | {"sync_interval": 2, "updates_per_batch": 2},
    "cohorts": ASYNC | {"mixing": False, "suites": SUITES},
    "wait": ASYNC | {"waits_for_old": True},
    "filter": ASYNC | {"max_backfill": 1, "group_deadline": 9.0, "max_reissues": 50},
    "oversample": ASYNC | {"oversample": 1.5, "max_inflight": 9},
    "sft": {"branches": (), "route": (), "suites": HELD_OUT, "publish_at_end_only": True, "scorers": ()},
    "groups": {"branches": (Branch(track="policy", n=2),), "on_failed": "drop_group", "suites": {}},
}
ONCE = (Completed, Dead, BadRecord, Trained, Measured, Published, Saved)


def shape(state: State) -> tuple[Any, ...]:
    """What kind of state it is."""
    root, train = state.root, [g for g in state.groups.values() if g.kind == "train"]
    return (
        root.phase,
        root.paused,
        root.trainer_up,
        tuple(sorted({r.kind for r in root.records})),
        any(g.slices is None for g in train),
        any(g.slices is not None for g in train),
        len(root.evals),
        bool(root.again),
        bool(root.dead_draws),
        bool(root.unsynced),
        len(root.cohorts),
    )


def worlds(changes: dict[str, Any]) -> list[World]:
    """One for each kind of state that runs come through."""
    found: dict[tuple[Any, ...], World] = {}
    for seed in range(8):
        world = World(plan(**({"steps": 3, "batch_size": 2, "max_inflight": 2, "checkpoint_every": 2} | changes)), seed, 0.1)
        found.setdefault(shape(world.state), copy.deepcopy(world))
        world.begin()
        for number in range(300):
            found.setdefault(shape(world.state), copy.deepcopy(world))
            if world.state.root.phase in ENDED:
                break
            if seed % 4 == 3 and number % 7 in (3, 5):  # paused for two events, now and then
                world.send(Operator(command="pause" if number % 7 == 3 else "resume"))
            world.act()
    return list(found.values())


def events(world: World) -> Iterator[Event]:
    root, groups = world.state.root, world.state.groups
    flights = [g for g in groups.values() if g.slices is None]
    for group in (*flights[:1], *[g for g in groups.values() if g.slices is not None][:1]):
        if world.plan.route:
            yield world.completed(group)
            yield world.completed(group, rewards=(float("nan"),) * (1 if group.kind == "eval" else 2))
        yield Dead(gid=group.gid, stage="rollout.policy", error="poison")
        yield BadRecord(group.gid, "too long")
    yield Dead(gid="s:0:99#0", stage="rollout.policy", error="unknown")
    yield BadRecord("s:0:99#0", "unknown")
    known = [(r.seq, r.id) for r in root.records] + [(root.seq + 5, "later"), (max(0, root.seq - 2), "earlier")]
    for seq, name in known:
        for updates in (0, world.plan.updates_per_batch):
            versions = {"policy": world.version + updates}
            yield Trained(seq=seq, id=name, versions=versions, updates={"policy": updates}, reason="" if updates else "none")
        yield Trained(seq=seq, id="another", versions={"policy": world.version}, updates={"policy": 0})
        yield Measured(seq=seq, id=name, versions={"policy": world.version}, rows=1, total=1.0, weight=1.0, tokens=1.0)
        yield Saved(seq=seq)
    for version in {0, world.version, max(0, world.version - 1)}:
        yield Published(track="policy", version=version, nbytes=1, seconds=0.1)
        yield Gone("policy", version)
    current = {"policy": world.version}
    yield Started(applied_seq=root.seq, versions=current, published={"policy": max(0, world.published)}, world_size=1)
    yield Failure(origin="trainer", error="said", fatal=False)
    yield Failure(origin="trainer", error="lost", fatal=True)
    yield RolledBack(seq=root.seq, detail="gone")
    for command in ("pause", "resume", "cancel", "checkpoint", "evaluate", "reissue"):
        yield Operator(command=command)
    for draw in root.dead_draws[:1]:
        yield Operator(command="reissue", gid=f"s:0:{draw}#0")


@pytest.mark.parametrize("name", PLANS)
def test_every_event_in_every_state(name: str) -> None:
    seen = worlds(PLANS[name])
    phases = {world.state.root.phase for world in seen}
    assert phases >= {"starting", "running", "finishing", "done"} and len(seen) >= 8, (len(seen), phases)
    tried = 0
    for before in seen:
        for event in [*events(before), None]:
            tried += 1
            world = copy.deepcopy(before)
            world.commands.clear()
            told = (name, shape(before.state), event)
            try:
                world.send(*([] if event is None else [event]))
            except AssertionError as error:
                raise AssertionError(told) from error
            check(before, world, event, told)
    assert tried > 300


def check(before: World, world: World, event: Event | None, told: Any) -> None:
    root = world.state.root
    assert balanced(world.state), told
    if before.state.root.phase in ENDED:
        assert msgspec.structs.replace(root, seq=before.state.root.seq) == before.state.root, told
        return
    if any(isinstance(command, Restore) for command in world.commands):
        assert isinstance(event, RolledBack | Trained | Measured), told
        return  # the runner puts another state in its place
    if isinstance(event, ONCE):
        again = copy.deepcopy(world)
        again.now -= 1  # at the same time: no deadline passes in between
        again.send(event)
        assert counted(again.state) == counted(world.state), told
    if isinstance(event, Failure) and event.fatal:
        assert root.phase == "failed", told
    elif isinstance(event, Operator) and event.command == "cancel":
        assert root.phase == "cancelled", told
    elif not isinstance(event, Trained | Saved | Measured):  # the world's trainer would not know of these
        finish(world, told)


def counted(state: State) -> Any:
    root = state.root
    return (
        root.phase,
        (root.issued, root.trained, root.dead, root.dropped, root.completed, root.batches),
        (root.publishes, root.published, root.saved_seq, root.log_bytes),
        [(run.key, run.issue, run.done, run.failed) for run in root.evals],
        root.evaluated,
    )


def finish(world: World, told: Any) -> None:
    """Whatever has happened, the job goes on."""
    world.send(Operator(command="resume"))
    if not world.state.root.trainer_up:
        world.begin()
    for _ in range(2000):
        if world.state.root.phase in ENDED:
            break
        world.act()
    root = world.state.root
    assert root.phase == "done" and root.batches == world.plan.steps and root.outstanding == 0, (told, root)
