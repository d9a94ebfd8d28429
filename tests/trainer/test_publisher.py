"""Which snapshots are written when training is faster than the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def slow(*args: Any, **named: Any) -> int:
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
