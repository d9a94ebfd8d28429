"""SIGKILL of each child and each agent in turn during a deterministic run: the final parameters are equal to the bit, the
ledger balances, and nothing is trained twice.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.weights.store import WeightStore
from tests.conftest import recipe
from tests.mesh.conftest import Mesh

STEPS, BATCH = 9, 4


def document(model: Path, **changes: Any) -> dict[str, Any]:
    return recipe(
        model,
        steps=STEPS,
        deterministic=True,
        data__batch_size=BATCH,
        rollout__group_size=4,
        rollout__slice=2,
        rollout__sampling__max_new_tokens=12,
        reward={
            "scorers": {
                "match": {"name": "exact_match"},
                "size": {"name": "length", "params": {"target": 4, "width": 6}},
            }
        },
        train__checkpoint_every=3,
        train__num_updates_per_batch=2,
        **changes,
    )


def check_whole(mesh: Mesh, job: str) -> str:
    """Ends well, ledger balanced, every group trained once; returns the fingerprint."""
    view = mesh.done(job)
    ledger = view["ledger"]
    assert ledger == {"issued": BATCH * STEPS, "trained": BATCH * STEPS, "dropped": {}, "dead": 0, "in_flight": 0}
    assert [s["step"] for s in mesh.get(f"/v1/jobs/{job}/steps")] == list(range(1, STEPS + 1))
    assert view["counts"].get("twin", 0) == 0 and view["incarnation"] == 1 and view["dead_letters"] == 0
    return mesh.fingerprint(job, 2 * STEPS)


@pytest.fixture(scope="module")
def undisturbed(mesh: Mesh, model_folder: Path) -> str:
    return check_whole(mesh, mesh.submit(document(model_folder)))


def victim(mesh: Mesh, what: str) -> int:
    service, part = what.split("-")
    if service == "controller":
        return next(p.pid for p in mesh.descendants() if "services.controller" in p.cmdline())
    if service == "redis":
        return next(p.pid for p in mesh.descendants() if "redis-server" in p.name())
    worker = mesh.worker(service)
    return int(worker["child"] if part == "child" else worker["pid"])


@pytest.mark.parametrize(
    "victims",
    [
        ["rollout-child", "reward-child", "trainer-child", "redis-server"],
        ["controller-process", "trainer-agent", "reward-agent", "rollout-agent"],
    ],
    ids=["children-and-redis", "agents-and-controller"],
)
def test_killed_one_after_the_other(mesh: Mesh, model_folder: Path, undisturbed: str, victims: list[str]) -> None:
    job = mesh.submit(document(model_folder))
    for number, what in enumerate(victims):
        mesh.until(job, lambda view: view["step"] >= 2 * number + 1)  # noqa: B023
        pid = victim(mesh, what)
        children = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "a killed process's children do not outlive it"
    assert check_whole(mesh, job) == undisturbed


@pytest.mark.parametrize(
    "victims", [[], ["trainer-child", "reward-child", "redis-server", "trainer-agent"]], ids=["none", "all"]
)
def test_a_trainer_that_samples_makes_the_same(mesh: Mesh, model_folder: Path, undisturbed: str, victims: list[str]) -> None:
    """Layout trainside: no rollout worker, nothing published before the end, and to the bit the same parameters."""
    job = mesh.submit(document(model_folder, placement__layout="trainside"))
    for number, what in enumerate(victims):
        mesh.until(job, lambda view: view["step"] >= 2 * number + 1)  # noqa: B023
        os.kill(victim(mesh, what), signal.SIGKILL)
    assert check_whole(mesh, job) == undisturbed
    store = WeightStore(mesh.state / "jobs" / job / "weights", "policy")
    assert store.versions(1) == [0, 2 * STEPS]
    assert not [w for w in mesh.get("/v1/workers") if w["service"] == "rollout" and w["job"] == job]


def test_the_fingerprint_tells_runs_apart(mesh: Mesh, model_folder: Path, undisturbed: str) -> None:
    assert check_whole(mesh, mesh.submit(document(model_folder, seed=1))) != undisturbed
