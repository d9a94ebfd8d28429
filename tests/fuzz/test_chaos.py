"""Real processes under SIGKILL and SIGSTOP, Redis killed with and without a cut log: nothing lost, nothing twice.

The naive control shows that the harness bites.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.chaos import faults, run


@pytest.mark.parametrize("cut", [False, True], ids=["kills", "kills-and-cut-log"])
def test_nothing_is_lost_or_done_twice(model_folder: Path, cut: bool) -> None:
    found = run(model_folder, seconds=11, seed=1, cut_tail=cut)
    assert not faults(found), found
    assert found["trained"] > 50 and found["redis kills"] >= 2 and found["kills"] >= 10


def test_the_naive_way_does_things_twice(model_folder: Path) -> None:
    found = run(model_folder, seconds=8, seed=2, naive=True)
    assert found["dup"] > 0, found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 14))
@pytest.mark.parametrize("cut", [False, True], ids=["kills", "kills-and-cut-log"])
def test_soak(model_folder: Path, seed: int, cut: bool) -> None:
    found = run(model_folder, seconds=90, seed=seed, cut_tail=cut)
    assert not faults(found), found
