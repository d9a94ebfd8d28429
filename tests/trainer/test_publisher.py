"""Which snapshots are written when training is faster than the disk."""

from __future__ import annotations

import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.publisher import Publisher
from shared.weights.store import WeightStore
from shared.wire.envelope import Published


@pytest.mark.parametrize(
    ("replace", "pinned", "written"),
    [(True, (), [1, 4]), (True, (2,), [1, 2, 4]), (False, (), [1, 2, 3, 4])],
    ids=["newest", "and what an evaluation asks for", "all"],
)
def test_snapshots_that_wait(tmp_path: Path, replace: bool, pinned: tuple[int, ...], written: list[int]) -> None:
    """Version 1 is being written while the others come."""
    store, go, said = WeightStore(tmp_path, "policy"), threading.Event(), list[int]()
    began = threading.Event()
    plain = store.publish

    def slow(*args: Any, **named: Any) -> int | None:
        began.set()
        assert go.wait(10)
        return plain(*args, **named)

    store.publish = slow  # type: ignore[method-assign]

    def report(event: Published) -> None:
        said.append(event.version)

    publisher = Publisher(store, 1, 10, replace, report)
    publisher.publish(1, {"w": torch.zeros(1)})
    assert began.wait(10)
    for version in (2, 3, 4):
        publisher.publish(version, {"w": torch.zeros(1)}, version in pinned)
    go.set()
    publisher.flush(4)
    assert said == written == store.versions(1)


def ranks(store: WeightStore, said: list[int], count: int, replace: bool = False) -> list[Publisher]:
    def report(event: Published) -> None:
        said.append(event.version)

    return [Publisher(store, 1, 10, replace, report, rank=rank, ranks=count) for rank in range(count)]


@pytest.mark.parametrize("first", [0, 2])
def test_ranks_write_a_version_together(tmp_path: Path, first: int) -> None:
    """Whoever is first, the version becomes complete when all shares are there, and holds them all."""
    store, said = WeightStore(tmp_path, "policy"), list[int]()
    publishers = ranks(store, said, 3)
    shares = [{f"t{rank}": torch.full((4,), float(rank))} for rank in range(3)]
    order = [first, *(rank for rank in range(3) if rank != first)]
    for rank in order[:2]:
        publishers[rank].publish(1, shares[rank])
    time.sleep(0.1)
    assert store.versions(1) == [] and said == []
    publishers[order[2]].publish(1, shares[order[2]])
    for publisher in publishers:
        publisher.flush(1)
    assert said == [1] == store.versions(1)
    found = {n: v for path in store.open(1, 1) for n, v in load_file(path).items()}
    assert {n: v.tolist() for n, v in found.items()} == {f"t{rank}": [float(rank)] * 4 for rank in range(3)}
    assert not list((tmp_path / "policy" / "1").glob("parts-*"))


def test_a_version_that_one_rank_left_out_is_left_out(tmp_path: Path) -> None:
    """Each rank's thread decides for itself which snapshots a newer one replaces."""
    store, said = WeightStore(tmp_path, "policy"), list[int]()
    one, two = ranks(store, said, 2, replace=True)
    one.publish(1, {"a": torch.zeros(1)})  # two never writes 1: it was busy, and 2 came
    time.sleep(0.05)
    for publisher in (one, two):
        publisher.publish(2, {"a": torch.ones(1)} if publisher is one else {"b": torch.ones(1)})
    for publisher in (one, two):
        publisher.flush(2)
    assert said == [2] == store.versions(1)


def test_what_dead_ranks_left_is_not_taken_for_new(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "policy")
    store.contribute(1, 7, 1, [("x.safetensors", [b"old"])])
    store.drop_parts(1)
    said = list[int]()
    one, two = ranks(store, said, 2)
    one.publish(7, {"a": torch.zeros(1)})
    two.publish(7, {"b": torch.ones(1)})
    one.flush(7)
    assert {name for path in store.open(1, 7) for name in load_file(path)} == {"a", "b"}


@pytest.mark.parametrize("change", [0.0, 0.25])
def test_a_version_made_again_is_compared_and_stays_as_it_is(tmp_path: Path, change: float) -> None:
    store, told = WeightStore(tmp_path, "policy"), list[str]()
    for value in (1.0, 1.0 + change):
        publisher = Publisher(store, 1, 2, False, lambda event: None, say=told.append)
        publisher.publish(3, {"w": torch.tensor([value, 2.0]), "none": torch.zeros(0)})
        publisher.flush(3)
    assert load_file(store.open(1, 3)[0])["w"].tolist() == [1.0, 2.0]
    assert told == (
        [] if not change else ["version 3, trained again, differs from the published one: redo_gap 0.25 (largest of a weight)"]
    )


@pytest.mark.parametrize("error", [SystemExit("fenced"), RuntimeError("x"), OSError(5, "x")])
def test_whatever_ends_the_thread_is_raised_where_it_is_waited_for(tmp_path: Path, error: BaseException) -> None:
    def report(_: Published) -> None:
        raise error

    publisher = Publisher(WeightStore(tmp_path, "policy"), 1, 2, False, report)
    publisher.publish(1, {"w": torch.zeros(1)})
    with pytest.raises(type(error)):
        publisher.flush(1)


def test_a_comparison_that_fails_changes_nothing(tmp_path: Path) -> None:
    store, said = WeightStore(tmp_path, "policy"), list[int]()
    store.publish(1, 3, [("model.safetensors", [b"no tensors"])])
    publisher = Publisher(store, 1, 2, False, lambda event: said.append(event.version))
    publisher.publish(3, {"w": torch.zeros(1)})
    publisher.flush(3)
    assert said == [3]


def test_a_rank_without_space_is_told_of_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.files.PAUSE_S", 0.05)
    store, told = WeightStore(tmp_path, "policy"), list[str]()
    plain, tries = store.contribute, count()

    def full(*share: Any) -> None:
        (tmp_path / "policy" / "1" / "parts-1").mkdir(parents=True, exist_ok=True)
        if next(tries) < 3:
            raise OSError(28, "No space left on device")
        plain(*share)

    monkeypatch.setattr(store, "contribute", full)
    one, two = (Publisher(store, 1, 2, False, lambda event: None, say=told.append, rank=r, ranks=2) for r in range(2))
    for publisher in (two, one):
        publisher.publish(1, {f"t{publisher.rank}": torch.zeros(1)})
    one.flush(1)
    assert store.versions(1) == [1] and len(told) == 1 and "rank 1: no space left" in told[0]


def test_a_version_whose_completion_fails_is_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of other ranks are still there when rank 0 does its part again."""
    monkeypatch.setattr("shared.files.PAUSE_S", 0.05)
    store, said = WeightStore(tmp_path, "policy"), list[int]()
    plain, tries = Path.rename, count()

    def rename(path: Path, target: Path) -> Any:
        if Path(target).name == "v1" and next(tries) < 2:
            raise OSError(28, "No space left on device")
        return plain(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    one, two = ranks(store, said, 2)
    for publisher in (one, two):
        publisher.publish(1, {f"t{publisher.rank}": torch.zeros(1)})
    one.flush(1)
    assert {name for path in store.open(1, 1) for name in load_file(path)} == {"t0", "t1"} and said == [1]
