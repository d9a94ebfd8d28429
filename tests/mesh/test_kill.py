"""SIGKILL of each child and each agent in turn during a deterministic run: the final parameters are equal to the bit, the
ledger balances, and nothing is trained twice.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash

from shared.weights.store import WeightStore
from tests.conftest import recipe
from tests.mesh.conftest import Mesh

STEPS = 8


def document(model: Path, **changes: Any) -> dict[str, Any]:
    return recipe(
        model,
        steps=STEPS,
        deterministic=True,
        data__batch_size=6,
        rollout__group_size=6,
        rollout__slice=3,
        rollout__sampling__max_new_tokens=24,
        reward={
            "scorers": {"match": {"name": "exact_match"}, "size": {"name": "length", "params": {"target": 6, "width": 8}}}
        },
        train__checkpoint_every=3,
        train__num_updates_per_batch=2,
        **changes,
    )


def fingerprint(mesh: Mesh, job: str, version: int) -> str:
    """Of the final parameters."""
    store = WeightStore(mesh.state / "jobs" / job / "weights", "policy")
    [shard] = store.open(store_incarnation(mesh, job), version)
    return xxhash.xxh3_64_hexdigest(shard.read_bytes())


def store_incarnation(mesh: Mesh, job: str) -> int:
    return int(mesh.get(f"/v1/jobs/{job}")["incarnation"])


def check_whole(mesh: Mesh, job: str) -> str:
    """Ends well, ledger balanced, every group trained once; returns the fingerprint."""
    view = mesh.done(job)
    ledger = view["ledger"]
    assert ledger == {"issued": 6 * STEPS, "trained": 6 * STEPS, "dropped": {}, "dead": 0, "in_flight": 0}
    assert [s["step"] for s in mesh.get(f"/v1/jobs/{job}/steps")] == list(range(1, STEPS + 1))
    assert view["counts"].get("twin", 0) == 0 and view["incarnation"] == 1 and view["dead_letters"] == 0
    return fingerprint(mesh, job, 2 * STEPS)


@pytest.fixture(scope="module")
def undisturbed(mesh: Mesh, model_folder: Path) -> str:
    return check_whole(mesh, mesh.submit(document(model_folder)))


def test_the_same_run_twice_is_the_same_to_the_bit(mesh: Mesh, model_folder: Path, undisturbed: str) -> None:
    assert check_whole(mesh, mesh.submit(document(model_folder))) == undisturbed
    other = mesh.submit(document(model_folder, seed=1))
    assert check_whole(mesh, other) != undisturbed, "the fingerprint tells runs apart"


def victim(mesh: Mesh, what: str) -> int:
    service, part = what.split("-")
    if service == "controller":
        return next(p.pid for p in mesh.descendants() if "services.controller" in p.cmdline())
    worker = mesh.worker(service)
    return int(worker["child"] if part == "child" else worker["pid"])


@pytest.mark.parametrize(
    "what",
    [
        "rollout-child",
        "rollout-agent",
        "reward-child",
        "reward-agent",
        "trainer-child",
        "trainer-agent",
        "controller-process",
    ],
)
def test_kill(mesh: Mesh, model_folder: Path, undisturbed: str, what: str) -> None:
    job = mesh.submit(document(model_folder))
    mesh.until(job, lambda view: view["step"] >= 2)
    pid = victim(mesh, what)
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    assert check_whole(mesh, job) == undisturbed
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive, "a killed agent's child does not outlive it"


def test_redis_killed_in_the_middle(mesh: Mesh, model_folder: Path, undisturbed: str) -> None:
    job = mesh.submit(document(model_folder))
    mesh.until(job, lambda view: view["step"] >= 2)
    pid = next(p.pid for p in mesh.descendants() if "redis-server" in p.name())
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert check_whole(mesh, job) == undisturbed
