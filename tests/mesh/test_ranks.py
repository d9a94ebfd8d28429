"""A trainer of two ranks: what it trains is what one rank trains, and a rank that goes does not take the job along."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import recipe
from tests.mesh.conftest import Mesh

STEPS = 6


def document(model: Path, ranks: int, layout: str = "separate") -> dict[str, Any]:
    return recipe(
        model,
        steps=STEPS,
        deterministic=True,
        data__batch_size=4,
        rollout__group_size=4,
        rollout__slice=2,
        reward={"scorers": {"size": {"name": "regex", "params": {"pattern": ".*[a-m].*"}}}},
        train__checkpoint_every=2,
        train__ema={"schedule": "constant", "decay": 0.5},
        placement={"trainer_ranks": ranks, "layout": layout},
    )


def parameters(mesh: Mesh, job: str) -> torch.Tensor:
    folder = mesh.state / "jobs" / job / "weights" / "policy" / "1" / f"v{STEPS}"
    tensors = {n: v for path in folder.glob("*.safetensors") for n, v in load_file(path).items()}
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def second_rank(mesh: Mesh) -> psutil.Process:
    child = mesh.worker("trainer")["child"]
    found: list[psutil.Process] = []
    while not found:
        found = [p for p in psutil.Process(child).children() if p.environ().get("RANK") == "1"]
    return found[0]


@pytest.fixture(scope="module")
def straight(mesh: Mesh, model_folder: Path) -> Iterator[torch.Tensor]:
    job = mesh.submit(document(model_folder, 2))
    view = mesh.done(job)
    assert view["ledger"]["trained"] == 4 * STEPS and view["publishes"]["count"] == STEPS + 1
    yield parameters(mesh, job)


def test_two_ranks_that_sample_make_the_same(mesh: Mesh, model_folder: Path, straight: torch.Tensor) -> None:
    """Layout trainside: each rank its slices, with the moving average that would be published."""
    job = mesh.submit(document(model_folder, 2, "trainside"))
    view = mesh.done(job)
    assert view["ledger"]["trained"] == 4 * STEPS and view["publishes"]["count"] == 2
    assert torch.allclose(parameters(mesh, job), straight, rtol=1e-4, atol=1e-6)


def test_two_ranks_train_what_one_trains(mesh: Mesh, model_folder: Path, straight: torch.Tensor) -> None:
    job = mesh.submit(document(model_folder, 1))
    mesh.done(job)
    one = parameters(mesh, job)
    assert one.shape == straight.shape and float((one - straight).norm() / one.norm()) < 1e-4
    shards = list((mesh.state / "jobs" / job / "weights" / "policy" / "1").glob("v*/*.safetensors"))
    assert all(path.name == "model.safetensors" for path in shards)


def test_a_rank_that_is_ended(mesh: Mesh, model_folder: Path, straight: torch.Tensor) -> None:
    """Killed, or told to stop when rank 0 is not: all begin again, to the same end."""
    job = mesh.submit(document(model_folder, 2))
    for step, how in ((1, signal.SIGKILL), (3, signal.SIGTERM)):
        mesh.until(job, lambda view: view["step"] >= step)  # noqa: B023
        process = second_rank(mesh)
        os.kill(process.pid, how)
        process.wait(30)
    view = mesh.done(job)
    assert view["ledger"]["trained"] == 4 * STEPS and torch.equal(parameters(mesh, job), straight)
