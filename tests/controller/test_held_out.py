"""Held-out records that the trainer measures, and evaluations after a history went back."""

from __future__ import annotations

import pytest

from services.controller.lifecycles.state import Evaluated, State, SuitePlan
from services.controller.restore import cut, from_cut
from shared.wire.envelope import Operator, Started
from tests.controller.world import World, plan

MEASURED = {
    "domain": "sft",
    "branches": (),
    "route": (),
    "scorers": (),
    "max_inflight": 6,
    "publish_at_end_only": True,
    "advantages": False,
    "suites": {
        "a": SuitePlan(at=("start", "end"), every=2, size=7, batch_size=3),
        "b": SuitePlan(at=("end",), size=2, batch_size=5),
    },
}


def runs(world: World) -> list[tuple[str, int, int, tuple[float, float, float], dict[str, int]]]:
    found = [c.run for c in world.commands if isinstance(c, Evaluated)]
    return [(run.key, run.done, run.failed, run.loss, run.versions) for run in found]


def test_what_a_checkpoints_own_batch_makes_due_is_measured_after_it() -> None:
    """Also where its record was appended before the batch was trained."""
    for kind in (
        plan(**MEASURED, checkpoint_every=2),
        plan(suites={"a": SuitePlan(at=(), every=2, size=3, scorers=("exact",))}),
    ):
        world = World(kind, 0)
        world.send(Started(applied_seq=0, versions={"policy": 0}, published={"policy": 0}, world_size=1))
        while not any(record.kind == "checkpoint" for record in world.state.root.records):
            if kind.route:
                world.send(*(world.completed(group) for group in world.flights.values()))
            world.send(*(world.trainer() if world.log else ()))
        saved, world.published = cut(world.state), 2
        world.state, world.log, world.flights = State(from_cut(saved, 2, 99), {}), [], {}
        world.send(Started(applied_seq=99, versions={"policy": 2}, published={"policy": 2}, world_size=1))
        assert "a:step-2" in [run.key for run in world.state.root.evals], world.state.root


def test_a_checkpoint_is_the_last_of_its_commit() -> None:
    """What its state says of the log ends with it: else the history that starts from it begins behind a gap."""
    world = World(plan(**MEASURED), 0)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    measured = world.trainer()
    world.send(*measured, Operator(command="checkpoint"), Operator(command="evaluate"))
    assert [a.kind for a in world.log][-1] == "checkpoint" and world.log[-1].seq == world.state.root.seq


def test_a_run_that_would_mix_two_versions_begins_again() -> None:
    world = World(plan(**MEASURED), 0)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    world.send(*world.trainer())
    [run] = world.state.root.evals
    assert run.done == 3
    world.version = 1  # a trainer that died, and came to another version when it did its work again
    while not runs(world):
        world.send(*world.trainer())
    assert runs(world)[0] == ("a:start", 7, 0, (14.0, 7.0, 14.0), {"policy": 1})


@pytest.mark.parametrize("seed", range(8))
def test_held_out_records_are_measured_in_whole_between_batches(seed: int) -> None:
    """Every record once, whatever the chunks; nothing trains before the version that is measured is done."""
    world = World(plan(**MEASURED), seed)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    while world.log:
        [kinds, waiting] = [[a.kind for a in world.log], [r.kind for r in world.state.root.records]]
        assert not ("train" in kinds and "evaluate" in kinds) and waiting.count("evaluate") <= 2
        world.send(*world.trainer())
    assert world.state.root.phase == "done" and world.state.root.trained == 12
    whole = (7 * 2.0, 7.0, 14.0)
    assert runs(world) == [
        ("a:start", 7, 0, whole, {"policy": 0}),
        ("a:step-2", 7, 0, whole, {"policy": 2}),
        ("a:end", 7, 0, whole, {"policy": 4}),
        ("b:end", 2, 0, (4.0, 2.0, 4.0), {"policy": 4}),
    ]


def test_records_that_cannot_be_used_are_counted_as_failed() -> None:
    world = World(plan(**MEASURED), 0)
    world.unusable = 1
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    world.send(*world.trainer(), *world.trainer())
    world.send(*world.trainer())
    assert runs(world) == [("a:start", 7, 3, (8.0, 4.0, 8.0), {"policy": 0})]


def test_an_evaluation_asked_for_while_a_batch_trains_is_of_the_version_after_it() -> None:
    world = World(plan(**(MEASURED | {"suites": {"a": SuitePlan(at=(), size=2, batch_size=2)}})), 0)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    assert [a.kind for a in world.log] == ["train"]
    world.send(Operator(command="evaluate"))
    assert [a.kind for a in world.log] == ["train"]
    while not runs(world):
        world.send(*world.trainer())
    assert runs(world)[0][4] == {"policy": 1} and world.state.root.batches == 1
    assert [c.run.step for c in world.commands if isinstance(c, Evaluated)] == [1]


def test_a_history_that_goes_back_begins_its_evaluations_again() -> None:
    """Also those of domains that roll out: the series has no hole."""
    measured = plan(**MEASURED)
    rolled = plan(suites={"a": SuitePlan(at=("start",), size=3, scorers=("exact",))})
    for kind in (measured, rolled):
        world = World(kind, 0)
        world.send(Started(applied_seq=0, versions={"policy": 0}, published={"policy": 0}, world_size=1))
        if kind is measured:
            world.send(*world.trainer())
        [run] = world.state.root.evals
        assert run.key == "a:start" and run.issue == 0
        root = from_cut(cut(world.state), 2, 7)
        world.state, world.log, world.flights = State(root, {}), [], {}
        world.send(Started(applied_seq=0, versions={"policy": 0}, published={"policy": 0}, world_size=1))
        [run] = world.state.root.evals
        assert (run.key, run.issue, run.done, run.versions) == ("a:start", 1, 0, {"policy": 0})
        asked = [a.kind for a in world.log] if kind is measured else [g for g in world.flights.values() if g.kind == "eval"]
        assert len(asked) == (2 if kind is measured else 3)
