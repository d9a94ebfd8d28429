"""Who works for which job: the pure decision."""

from __future__ import annotations

from itertools import count

import msgspec

from services.controller.assignment import Wanted, assign, unserved
from shared.agent.registry import Assignment, Worker


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
    assert changes([worker("x"), worker("y", since=1), worker("z", since=2)], {}, [A, A]) == {"x": "a", "y": "a"}


def test_a_scorer_that_nobody_serves_is_named() -> None:
    places = [Wanted("a", "reward", "main", "math_verify"), Wanted("b", "reward", "main", "length")]
    serving = msgspec.structs.replace(worker("r", "reward"), components=("length",))
    assert unserved([serving], places) == {
        "a": "scorer main: no reward agent serves math_verify (UNIMESH_SCORERS)",
    }
    assert set(unserved([], places)) == {"a", "b"}
