"""Who works for which job: the pure decision."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.controller.assignment import Wanted, assign, unserved
from services.controller.jobs import create, prepare
from services.controller.mesh import Mesh
from shared.agent.registry import Assignment, Worker
from shared.config.settings import Settings
from shared.wire.client import connect
from tests.conftest import recipe


def worker(name: str, service: str = "rollout", since: float = 0, state: str = "idle") -> Worker:
    return Worker(name=name, service=service, host="h", pid=1, since=since, state=state)  # type: ignore[arg-type]


def held(name: str, job: str, role: str = "rollout") -> Assignment:
    return Assignment(id=f"a-{name}", job=job, role=role, track="policy")  # type: ignore[arg-type]


A, B = Wanted("a", "rollout", "policy"), Wanted("b", "rollout", "policy")


def changes(workers: list[Worker], had: dict[str, Assignment], wanted: list[Wanted]) -> dict[str, str | None]:
    ids = count()
    found = assign(workers, had, wanted, lambda: f"id{next(ids)}").changes
    return {name: given.job if given else None for name, given in found.items()}


def test_open_places_are_filled_in_order_by_the_oldest_free_worker() -> None:
    workers = [worker("y", since=2), worker("x", since=1)]
    assert changes(workers, {}, [A, B]) == {"x": "a", "y": "b"}
    assert changes(workers[:1], {}, [A, B]) == {"y": "a"}


def test_a_place_keeps_its_worker() -> None:
    assert changes([worker("x"), worker("y")], {"y": held("y", "a")}, [A]) == {}


def test_a_dead_workers_place_goes_to_another() -> None:
    assert changes([worker("y")], {"x": held("x", "a")}, [A]) == {"x": None, "y": "a"}


def test_an_ended_job_frees_its_worker_for_the_next_at_once() -> None:
    assert changes([worker("x")], {"x": held("x", "a")}, [B]) == {"x": "b"}


def test_services_do_not_stand_in_for_each_other_and_draining_workers_get_nothing() -> None:
    assert changes([worker("t", "trainer"), worker("x", state="draining")], {}, [A]) == {}


def test_a_worker_gets_only_what_it_can_run() -> None:
    place = Wanted("a", "rollout", "policy", "diffusers")
    able = msgspec.structs.replace(worker("y", since=1), components=("diffusers", "transformers"))
    assert changes([worker("x"), able], {}, [place]) == {"y": "a"}
    assert changes([able], {"y": held("y", "a")}, [place]) == {}


def test_two_places_of_one_kind_take_two_workers() -> None:
    two = Wanted("a", "rollout", "policy", count=2)
    assert changes([worker("x"), worker("y", since=1), worker("z", since=2)], {}, [two]) == {"x": "a", "y": "a"}


def all_of(job: str, priority: int = 0, count: int | None = None) -> list[Wanted]:
    trainer = Wanted(job, "trainer", "")
    return [trainer, Wanted(job, "rollout", "policy", count=count, priority=priority)]


def world(rollouts: int, trainers: int = 9) -> list[Worker]:
    found = [worker(f"r{k}", since=k) for k in range(rollouts)]
    return found + [worker(f"t{k}", "trainer", since=k) for k in range(trainers)]


def settled(workers: list[Worker], had: dict[str, Assignment], wanted: list[Wanted]) -> dict[str, Assignment]:
    """What is held afterwards; deciding again changes nothing."""
    ids = count(len(had))
    found = had | assign(workers, had, wanted, lambda: f"id{next(ids)}").changes
    kept = {name: given for name, given in found.items() if given is not None}
    assert assign(workers, kept, wanted, lambda: "again").changes == {}
    return kept


def shares(kept: dict[str, Assignment]) -> dict[str, int]:
    return dict(Counter(given.job for given in kept.values() if given.role == "rollout"))


def test_equal_jobs_share_the_rollouts_and_a_higher_priority_takes_what_is_beyond_the_first() -> None:
    alone = settled(world(5), {}, all_of("a"))
    assert shares(alone) == {"a": 5}
    both = settled(world(5), alone, [*all_of("a"), *all_of("b")])
    assert shares(both) == {"a": 3, "b": 2}
    assert sum(both[name] != alone[name] for name in alone) == 2, "no more change their job than must"
    urgent = settled(world(5), both, [*all_of("c", priority=1), *all_of("a"), *all_of("b")])
    assert shares(urgent) == {"a": 1, "b": 1, "c": 3}
    assert shares(settled(world(5), urgent, all_of("b"))) == {"b": 5}


def test_a_job_that_is_scaled_leaves_the_others_their_share() -> None:
    wanted = [*all_of("a", count=1), *all_of("b")]
    assert shares(settled(world(4), {}, wanted)) == {"a": 1, "b": 3}
    down = settled(world(4), settled(world(4), {}, all_of("a", count=4)), all_of("a", count=2))
    assert shares(down) == {"a": 2}


def test_a_job_that_waits_for_a_trainer_holds_no_rollouts() -> None:
    wanted = [*all_of("a"), *all_of("b")]
    assert shares(settled(world(4, trainers=1), {}, wanted)) == {"a": 4}
    told = assign(world(4, trainers=1), {}, wanted, lambda: "x").unfilled
    assert told == {"b": "a trainer: all 1 work for others"}


def test_more_workers_than_there_are_is_told() -> None:
    assert assign(world(1), {}, all_of("a", count=2), lambda: "x").unfilled == {"a": "a rollout: all 1 work for others"}
    assert assign(world(1), {}, all_of("a"), lambda: "x").unfilled == {}
    assert assign(world(0), {}, all_of("a"), lambda: "x").unfilled == {"a": "a rollout: none is registered"}


@given(st.data())
def test_whatever_comes_and_goes(data: st.DataObject) -> None:
    """Nobody works twice; who has a trainer has a rollout, if there are so many; equal jobs differ by no more than one."""
    kept: dict[str, Assignment] = {}
    for _ in range(5):
        workers = world(data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3)))
        jobs = data.draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))
        kept = settled(workers, kept, [place for job in jobs for place in all_of(job)])
        rollouts = sum(w.service == "rollout" for w in workers)
        trained = {given.job for given in kept.values() if given.role == "trainer"}
        assert len(trained) == min(len(jobs), len(workers) - rollouts)
        found = shares({name: given for name, given in kept.items() if given.job in trained})
        if rollouts >= len(jobs):
            assert found.keys() == trained
            assert not found or max(found.values()) - min(found.values()) <= 1


def test_a_scorer_that_nobody_serves_is_named() -> None:
    places = [Wanted("a", "reward", "main", "math_verify"), Wanted("b", "reward", "main", "length")]
    serving = msgspec.structs.replace(worker("r", "reward"), components=("length",))
    assert unserved([serving], places) == {
        "a": "scorer main: no reward agent serves math_verify (UNIMESH_SCORERS)",
    }
    assert set(unserved([], places)) == {"a", "b"}


def test_jobs_come_by_their_priority_also_a_negative_one(settings: Settings, model_folder: Path, client: Any) -> None:
    """And then by age: the scorers' places, which nobody is assigned to, say nothing of it."""
    wanted = {name: {"priority": priority} for name, priority in (("late", -50), ("first", 0), ("second", 0), ("urgent", 7))}
    for name, placement in wanted.items():
        create(client, prepare(recipe(model_folder, name=name, placement=placement), settings))
    mesh = Mesh(lambda: connect(settings.redis_url), settings)
    order = [mesh.docs[place.job].recipe["name"] for place in mesh.wanted() if place.role == "trainer"]
    assert order == ["urgent", "first", "second", "late"]
