"""Ranks: several equal one, idling is no time-out, a slow rank is waited for, a stuck one ends all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.checkpoint import Saver
from shared.config.sections import Placement
from shared.weights import checkpoints
from shared.weights.checkpoints import Position
from tests.trainer import torchrun
from tests.trainer.test_stack import distance, flat, gradient_of, make_batch, make_stack, whole

TIMEOUT_S = 2.0


def run(model: Path, folder: Path, idle_s: float, slow_s: float) -> tuple[list[int | None], float]:
    """Exit codes of two ranks, None for one that had to be ended, and how long they took."""
    command = [sys.executable, "-m", "tests.trainer.waiting", str(model), str(folder), str(idle_s), str(slow_s)]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(torchrun.free_port()),
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


RANKS: dict[str, dict[str, Any]] = {
    "full": {"num_updates_per_batch": 3, "micro_batch_size": 2, "ema": {"schedule": "constant", "decay": 0.5}},
    "supervised": {"num_updates_per_batch": 3, "micro_batch_size": 2, "algorithm": "cross_entropy"},
    "ppo on fewer rows than ranks": {"num_updates_per_batch": 12, "micro_batch_size": 2, "algorithm": "ppo"},
    "a copy each on two nodes": {
        "nodes": 2,
        "micro_batch_size": 2,
        "placement": {"sharding": "no_shard"},
        "activation_checkpointing": True,
    },
    "offloaded": {"micro_batch_size": 2, "placement": {"cpu_offload": True}, "gradient_sync": "every"},
    "hybrid": {"micro_batch_size": 1, "placement": {"sharding": "hybrid"}, "world": 4},
    "packed adapters": {
        "num_updates_per_batch": 3,
        "micro_batch_tokens": 24,
        "replay": "packed",
        "lora": {"rank": 2, "alpha": 4},
    },
}


BOTH = ("full",)
"""Those that are compared in fp32 too."""


@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [(name, *how) for name in RANKS for how in [("float64", 1e-10), ("float32", 1e-5)] if name in BOTH or how[1] < 1e-5],
)
def test_ranks_equal_one(model_folder: Path, tmp_path: Path, name: str, dtype: str, limit: float) -> None:
    """FSDP2 on gloo: gradient, updated weights, checkpoint and version as with one rank."""
    options = dict(RANKS[name])
    size, nodes = options.pop("world", 2), options.pop("nodes", 1)
    alone = {key: value for key, value in options.items() if key != "placement"}
    one = make_stack(model_folder, dtype, **alone)
    gradient = gradient_of(one, make_batch())
    weights = flat(whole(one))
    Saver(tmp_path / "one", one.world).save(Position(1, 1, "n.1", {}), one.state(), {})
    while not (tmp_path / "one" / "1-1" / checkpoints.COMPLETE).exists():
        time.sleep(0.01)
    torchrun.run("tests.trainer.rank", [str(model_folder), dtype, str(tmp_path), json.dumps(options)], size, nodes)
    found = torch.load(tmp_path / "rank0.pt", weights_only=True)
    assert distance(found["gradient"], gradient) < limit
    assert distance(found["weights"], weights) < limit
    assert json.loads((tmp_path / "metrics.json").read_text())["updates"] == one.progress.version
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert torch.equal(resumed["weights"], found["later"]), "a sharded checkpoint goes on exactly"
    assert torch.equal(resumed["resharded"], weights), "two ranks read what one has written"
    shares = [load_file(tmp_path / f"share-{rank}.safetensors") for rank in range(size)]
    version = one.backend.weights()
    assert sorted(n for share in shares for n in share) == sorted(version), "every tensor is in one share"
    assert all(distance_or_zero(value, version[n]) < limit for share in shares for n, value in share.items())
    assert bool(shares[1]) == ("lora" not in options)
    other = make_stack(model_folder, dtype, **alone)
    other.load(tmp_path / "checkpoints" / "1-1")
    assert torch.equal(flat(whole(other)), found["weights"]), "and the other way"
    for use in ("trained", *(["opened"] if options.get("algorithm") == "cross_entropy" else [])):
        opened = [json.loads((tmp_path / f"{use}-{rank}.json").read_text()) for rank in range(size)]
        assert sorted(i for own in opened for i in own) == list(range(24)), "each rank opens its own rows' bodies alone"
    if options.get("algorithm") == "cross_entropy":
        measured = json.loads((tmp_path / "measured.json").read_text())
        np.testing.assert_allclose(measured, one.measure(make_batch(rows=7, group=1)), rtol=limit)
    for name, value in other.state().tensors.items():
        assert name == "rng" or distance_or_zero(value, one.state().tensors[name]) < limit, name


def test_one_rank_offloads_too(model_folder: Path, tmp_path: Path) -> None:
    """Its layers visit the device, which is the same host here: training, version and checkpoint are those of a plain rank."""
    options: dict[str, Any] = {"micro_batch_size": 2, "lora": {"rank": 2, "alpha": 4}}
    code = (
        "import sys, torch; from pathlib import Path; from tests.trainer.test_stack import *; "
        "from services.trainer.checkpoint import Saver; from shared.weights.checkpoints import Position; "
        "folder = Path(sys.argv[2]); stack = make_stack(Path(sys.argv[1]), placement={'cpu_offload': True}, "
        f"**{options!r}); assert stack.backend.sharded; stack.train_track(make_batch()); "
        "saver = Saver(folder / 'saved', stack.world); saver.save(Position(1, 1, 'n.1', {}), stack.state(), {}); saver.wait(); "
        "torch.save([stack.backend.weights(), whole(stack)], folder / 'made.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(model_folder), str(tmp_path)], check=True, timeout=120)
    plain = make_stack(model_folder, **options)
    plain.train_track(make_batch())
    version, weights = torch.load(tmp_path / "made.pt", weights_only=True)
    assert version.keys() == plain.backend.weights().keys()
    assert all(distance_or_zero(value, plain.backend.weights()[name]) < 1e-6 for name, value in version.items())
    other = make_stack(model_folder, **options)
    other.load(tmp_path / "saved" / "1-1")
    assert torch.equal(flat(whole(other)), flat(weights))


def distance_or_zero(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm()) if b.norm() else float(a.norm())
