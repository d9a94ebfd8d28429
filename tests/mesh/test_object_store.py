"""Weights in an object store: rollouts, other jobs and exports take them from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.files import place
from shared.models.tensors import decode
from shared.weights.store import WeightStore
from tests.conftest import recipe
from tests.mesh.conftest import Mesh
from tests.mesh.test_training import LORA, OPTIMIZER, SCORED
from tests.mesh.test_up import unimesh
from tests.object_store import object_store


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[tuple[Mesh, str]]:
    """A mesh, and where its weights lie."""
    with object_store() as (url, env), pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setitem(os.environ, name, value)
        mesh = Mesh(tmp_path_factory.mktemp("stored") / "mesh", model_folder.parent, UNIMESH_WEIGHTS=url)
        yield mesh, url
        assert mesh.stop() == 0


def test_jobs_train_start_from_each_other_and_are_exported(
    stored: tuple[Mesh, str], model_folder: Path, tmp_path: Path
) -> None:
    mesh, url = stored
    common: dict[str, Any] = {"steps": 2, "train": OPTIMIZER, "reward": SCORED, "rollout__group_size": 8}
    first = mesh.submit(recipe(model_folder, **common))
    assert mesh.done(first)["step"] == 2
    steps = mesh.get(f"/v1/jobs/{first}/steps")
    assert all(step["rollout_gap"] < 1e-4 for step in steps), "rollouts sampled from what the trainer published"
    assert not (mesh.state / "jobs" / first / "weights").exists()
    last = WeightStore(place(url) / first, "policy")
    assert last.newest(1) == 2
    weights = {name: value for file, data in last.read(1, 2) for name, value in decode(data).items()}

    second = mesh.submit(recipe(f"job:{first}", model__lora=LORA, **common))
    mesh.done(second)
    mesh.done(mesh.submit(recipe(f"job:{second}", **common)))
    begun = WeightStore(place(url) / second, "policy").files
    assert (begun / "config.json").exists()

    done = unimesh(mesh.state, "export", first, "--to", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 2
    found = load_file(tmp_path / "model.safetensors")
    assert found and all(torch.equal(value, weights[name]) for name, value in found.items())
