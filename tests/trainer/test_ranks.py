"""Ranks that wait for each other: idling is no time-out, a slow rank is waited for, a stuck one ends all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.config.sections import Placement
from tests.trainer.test_stack import free_port, make_batch, make_stack, whole

TIMEOUT_S = 2.0


def run(model: Path, folder: Path, idle_s: float, slow_s: float) -> tuple[list[int | None], float]:
    """Exit codes of two ranks, None for one that had to be ended, and how long they took."""
    command = [sys.executable, "-m", "tests.trainer.waiting", str(model), str(folder), str(idle_s), str(slow_s)]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "UNIMESH_RANKS_TIMEOUT_S": str(TIMEOUT_S),
    }
    started = time.monotonic()
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, stderr=subprocess.DEVNULL) for rank in range(2)]
    try:
        first = ranks[0].wait(90)
        seconds = time.monotonic() - started
        return [first, ranks[1].wait(90) if first == 0 else ranks[1].poll()], seconds
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("idle_s", "slow_s"), [(3 * TIMEOUT_S, 0.0), (0.0, 0.3)], ids=["idle", "slow"])
def test_ranks_wait_for_each_other(model_folder: Path, tmp_path: Path, idle_s: float, slow_s: float) -> None:
    assert run(model_folder, tmp_path, idle_s, slow_s)[0] == [0, 0]
    one = make_stack(model_folder, "float64", micro_batch_size=2)
    one.train_track(make_batch())
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.allclose(value, found[name], rtol=1e-9, atol=1e-12) for name, value in whole(one).items())


def test_a_stuck_rank_ends_the_others(model_folder: Path, tmp_path: Path) -> None:
    """Rank 0 fails after its patience; it does not hang."""
    [first, _], seconds = run(model_folder, tmp_path, 0.0, 3600.0)
    assert first not in (0, None) and seconds < 60
    assert not (tmp_path / "weights.safetensors").exists()


DYING = """
import json, os, subprocess, sys, time
from services.trainer import ranks

class Mine(ranks.Others):
    def _start(self, rank, order):
        env = os.environ | {ranks.WORDS: str(self._words(rank)), ranks.PARENT: str(os.getpid())}
        return subprocess.Popen([sys.executable, "-c", json.loads(sys.argv[1])[rank - 1]], env=env)

others = Mine(3, "")
others.fail = lambda text: print(text, flush=True)
time.sleep(20)
print("still there")
"""
SAYS = "from services.trainer import ranks; ranks.ranks_said('ValueError: x'); raise SystemExit(3)"
LIVES = "import time; from shared.agent.process import guard_parent; guard_parent(); time.sleep(60)"


@pytest.mark.parametrize(
    ("second", "told"),
    [(SAYS, "rank 2: ValueError: x\n"), ("import os; os.kill(os.getpid(), 9)", ""), ("raise SystemExit(4)", "")],
    ids=["error", "killed", "lost another"],
)
def test_a_rank_that_ends_takes_all_along(second: str, told: str) -> None:
    """An error of its own is told, as the job's; being killed, or having lost another one, is not."""
    done = subprocess.run(
        [sys.executable, "-c", DYING, json.dumps([LIVES, second])], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == told


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sharding": "hybrid", "trainer_ranks": 2}, "4 or more, and even"),
        ({"sharding": "hybrid", "trainer_ranks": 8, "shard_ranks": 3}, r"shard_ranks 3.*\[2, 4\]"),
        ({"sharding": "hybrid", "trainer_ranks": 4, "shard_ranks": 4}, r"shard_ranks 4.*\[2\]"),
        ({"shard_ranks": 2}, "goes with sharding hybrid"),
    ],
)
def test_worlds_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Placement.model_validate(given)


def test_worlds_that_can_be() -> None:
    assert Placement(trainer_ranks=3).mesh() == (1, 3) and Placement(trainer_ranks=3, sharding="no_shard").mesh() == (3, 1)
    assert Placement(trainer_ranks=8, sharding="hybrid").mesh() == (2, 4)
    assert Placement(trainer_ranks=8, sharding="hybrid", shard_ranks=2).mesh() == (4, 2)
