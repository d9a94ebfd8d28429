"""Evaluations in the pure lifecycle: when they are issued, at which version, and what must be kept for them."""

from __future__ import annotations

import itertools

import pytest

from services.controller.lifecycles.evaluation import pass_at, powers
from services.controller.lifecycles.state import Append, Close, Covered, Issue, SuitePlan
from shared.wire.envelope import Saved, Trained
from tests.controller.world import World, plan, started


def test_what_is_evaluated_between_two_syncs_is_published() -> None:
    suite = SuitePlan(every=2, size=1, scorers=("exact",))
    world = World(plan(steps=6, sync_interval=3, max_staleness=2, max_inflight=9, suites={"s": suite}, need="at_least"), 1)
    world.go()
    suites = [c.group for c in world.commands if isinstance(c, Issue) and c.group.kind == "eval"]
    kinds = [c.kind for c in world.commands if isinstance(c, Append)]
    assert [g.tag for g in suites] == ["step-2", "step-4"] and world.state.root.phase == "done"
    for group in suites:  # the batch before it stands right before a publish
        batch = int(group.tag.removeprefix("step-"))
        place = [i for i, kind in enumerate(kinds) if kind == "train"][batch - 1]
        assert kinds[place + 1] == "publish"


def test_bodies_of_a_batch_behind_a_checkpoint_are_not_swept() -> None:
    """Its groups were issued early, and it formed before the checkpoint was complete: a trainer may have to redo it."""
    world = started(steps=6, checkpoint_every=1, max_staleness=1, max_inflight=6, need="at_least")
    flights = list(world.flights.values())
    world.send(*(world.completed(g) for g in flights))  # six groups of shelf 0: two batches
    train, publish, checkpoint = (world.log.pop(0) for _ in range(3))
    for record in (train, publish):
        world.log.insert(0, record)
        world.send(*world.trainer())
    assert [a.kind for a in world.log][:1] == ["train"], "the second batch stands in the log"
    world.send(Saved(seq=checkpoint.seq))
    [covered] = [c for c in world.commands if isinstance(c, Covered)]
    assert {g.shelf for g in world.log[0].groups} == {0} and covered.below == 0


def test_an_evaluation_of_a_version_that_did_not_come_is_begun_again() -> None:
    suite = SuitePlan(every=1, size=2, scorers=("exact",))
    world = started(suites={"s": suite})
    world.send(*(world.completed(g) for g in list(world.flights.values())))
    record = world.log[0]
    world.send(*world.trainer())
    first = {g.gid: g for g in world.flights.values() if g.kind == "eval"}
    assert {g.needs["policy"].version for g in first.values()} == {1}
    world.send(Trained(seq=record.seq, id=record.id, versions={"policy": 0}, updates={"policy": 0}, reason="not finite"))
    again = {g.gid: g for g in world.flights.values() if g.kind == "eval"}
    assert {g.needs["policy"].version for g in again.values()} == {0} and len(again) == 2 and not first.keys() & again.keys()
    closed = [gid for c in world.commands if isinstance(c, Close) for gid in c.gids]
    assert first.keys() <= set(closed)
    world.send(*(world.completed(g) for g in again.values()))
    assert world.state.root.evaluated == ("s:step-1",)


def test_the_publish_of_an_evaluated_version_is_pinned() -> None:
    suite = SuitePlan(every=2, size=1, scorers=("exact",))
    world = World(plan(steps=4, max_staleness=2, max_inflight=9, suites={"s": suite}, need="at_least"), 1)
    world.go()
    publishes = [c.pinned for c in world.commands if isinstance(c, Append) and c.kind == "publish"]
    assert publishes == [False, True, False, True]


def test_bodies_of_an_evaluation_under_way_are_not_swept() -> None:
    """Its first prompts are scored, and their groups closed; a checkpoint comes before the last ones."""
    suite = SuitePlan(at=("start",), size=2, scorers=("exact",))
    world = started(steps=12, checkpoint_every=1, suites={"s": suite})
    first, last = [g for g in world.flights.values() if g.kind == "eval"]
    world.send(world.completed(first))
    for _ in range(3):
        world.send(*(world.completed(g) for g in list(world.flights.values()) if g.kind == "train"))
        while world.log:
            world.send(*world.trainer())
    swept = [c.below for c in world.commands if isinstance(c, Covered)]
    assert swept == [0, 0, 0] and world.state.root.evals
    world.send(world.completed(last))
    world.send(*(world.completed(g) for g in list(world.flights.values()) if g.kind == "train"))
    while world.log:
        world.send(*world.trainer())
    assert [c.below for c in world.commands if isinstance(c, Covered)][-1] == 4


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices(n: int) -> None:
    for solved in range(n + 1):
        samples = [i < solved for i in range(n)]
        for k in range(1, n + 1):
            choices = [any(chosen) for chosen in itertools.combinations(samples, k)]
            assert pass_at(k, n, solved) == pytest.approx(sum(choices) / len(choices))
    assert pass_at(8, n, n) == 1.0 and powers(8) == [1, 2, 4, 8] and powers(6) == [1, 2, 4]
