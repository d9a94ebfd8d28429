"""Workers come and go while jobs run: nothing is lost, and free ones are shared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.agent.agents import soon
from tests.conftest import recipe
from tests.mesh.conftest import Mesh
from tests.mesh.test_async import SCORED, document
from unimesh.cli import cli


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Mesh]:
    found = Mesh(tmp_path_factory.mktemp("scaled") / "state", model_folder.parent, "--threads", "1")
    yield found
    assert found.stop() == 0


def scale(mesh: Mesh, job: str, *wanted: str, **env: str) -> dict[str, Any]:
    answer = CliRunner(env={"UNIMESH_STATE": str(mesh.state)} | env).invoke(cli, ["scale", job, *wanted, "--json"])
    assert answer.exit_code == 0, answer.output
    return dict(json.loads(answer.stdout))


def working(mesh: Mesh, job: str) -> int:
    return sum(w["service"] == "rollout" and w["job"] == job for w in mesh.get("/v1/workers"))


def samples(mesh: Mesh, job: str, step: int) -> list[dict[str, Any]]:
    return list(mesh.get(f"/v1/jobs/{job}/samples", step=step)["samples"])


def agents(mesh: Mesh, service: str) -> int:
    return sum(w["service"] == service for w in mesh.get("/v1/workers"))


def test_up_and_down_while_a_job_runs(mesh: Mesh, model_folder: Path) -> None:
    """The second agent works from then on; one that drains gives back what it has not begun."""
    steps, batch = 3000, 4
    job = mesh.submit(document(model_folder, steps=steps, train__num_updates_per_batch=1))
    mesh.until(job, lambda view: view["step"] >= 1)
    assert scale(mesh, job, "rollout=2", "reward=2")["agents"] == {"rollout": 2, "reward": 2}
    mesh.until(job, lambda view: working(mesh, job) == 2 and agents(mesh, "reward") == 2)
    at = mesh.get(f"/v1/jobs/{job}")["step"]
    mesh.until(job, lambda view: len({r["worker"] for s in range(at, view["step"]) for r in samples(mesh, job, s)}) == 2)
    scale(mesh, job, "rollout=1", "reward=1")
    mesh.until(job, lambda view: agents(mesh, "rollout") == 1 and agents(mesh, "reward") == 1)
    assert mesh.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    soon(lambda: mesh.get(f"/v1/jobs/{job}")["state"] == "cancelled")
    view = mesh.get(f"/v1/jobs/{job}")
    ledger = view["ledger"]
    assert ledger["dead"] == 0 and ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    assert view["dead_letters"] == 0 and view["counts"].get("twin", 0) == 0
    soon(lambda: len(samples(mesh, job, view["step"])) == batch * 4)
    trained = [row["id"] for s in range(1, view["step"] + 1) for row in samples(mesh, job, s)]
    assert len(trained) == len(set(trained)) == view["step"] * batch * 4


def test_a_job_that_wants_less_leaves_workers_to_others(mesh: Mesh, model_folder: Path) -> None:
    """One trainer: the second job waits for it, holds nothing meanwhile, and says why."""
    job = mesh.submit(recipe(model_folder, steps=3000, reward=SCORED))
    scale(mesh, job, "rollout=2")
    mesh.until(job, lambda view: working(mesh, job) == 2)
    other = mesh.submit(recipe(model_folder, steps=2, reward=SCORED))
    mesh.until(other, lambda view: view["unfilled"] == "a trainer: all 1 work for others")
    assert working(mesh, other) == 0
    said = scale(mesh, job, "rollout=1", UNIMESH_STATE=str(mesh.state / "elsewhere"), UNIMESH_API=mesh.home.api)["said"]
    assert said == "docker compose up --detach --no-recreate --scale rollout=1"
    mesh.until(job, lambda view: working(mesh, job) == 1)
    assert mesh.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    mesh.done(other)


@pytest.mark.parametrize("wanted", ["trainer=2", "rollout=0", "rollout", "reward=many"])
def test_what_cannot_be_scaled(mesh: Mesh, wanted: str) -> None:
    answer = CliRunner(env={"UNIMESH_STATE": str(mesh.state)}).invoke(cli, ["scale", "0123456789ab", wanted])
    assert answer.exit_code == 2 and "give rollout=N, rollout=auto or reward=N" in answer.output
    assert mesh.http.post("/v1/jobs/0123456789ab/scale", json={"rollout": 2}).status_code == 404
