"""Rollouts that run ahead of the trainer, through all services: a hard bound, nothing lost, nothing trained twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import recipe
from tests.mesh.conftest import Mesh
from tests.mesh.test_diffusion import LIGHT
from tests.mesh.test_diffusion import document as picture_document
from tests.mesh.test_kill import victim
from tests.models.tiny_sd3 import make_folder

STEPS, BATCH = 10, 4
SCORED = {"scorers": {"letters": {"name": "regex", "params": {"pattern": ".*[a-m].*"}}}}


def document(model: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "domain": "async_ar",
        "steps": STEPS,
        "data__batch_size": BATCH,
        "rollout__group_size": 4,
        "rollout__slice": 2,
        "reward": SCORED,
        "algorithm": {"name": "grpo", "params": {"clip_range": 0.2, "correction": "token"}},
        "schedule": {"max_staleness": 2, "per_worker_inflight": 2},
        "train__checkpoint_every": 3,
        "train__num_updates_per_batch": 2,
    }
    return recipe(model, **(given | changes))


def check(mesh: Mesh, job: str, staleness: int, updates: int = 2) -> list[dict[str, Any]]:
    view = mesh.done(job)
    steps, ledger = mesh.get(f"/v1/jobs/{job}/steps"), view["ledger"]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1)) and ledger["trained"] == STEPS * BATCH
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["dead"]
    assert all(s["staleness_max"] <= staleness * updates for s in steps), "the bound is hard"
    rows = mesh.get(f"/v1/jobs/{job}/samples", limit=1000)["samples"]
    names = [row["id"] for row in rows]
    assert len(names) == len(set(names)) == STEPS * BATCH * 4, "every sample is trained once"
    assert view["services"].keys() == {"rollout.policy", "reward.letters", "trainer"}
    assert "is the bottleneck: busy" in view["bottleneck"] and view["counts"].get("twin", 0) == 0
    return list(steps)


def test_killed_while_rollouts_run_ahead(mesh: Mesh, model_folder: Path) -> None:
    job = mesh.submit(document(model_folder))
    for number, what in enumerate(("rollout-child", "reward-child", "trainer-child", "rollout-child")):
        mesh.until(job, lambda view: view["step"] >= 2 * number + 1)  # noqa: B023
        os.kill(victim(mesh, what), signal.SIGKILL)
    steps = check(mesh, job, 2)
    assert any(s["version_max"] > s["version_min"] for s in steps) or any(s["staleness_max"] for s in steps)


def test_rollouts_go_on_with_new_weights_and_elsewhere(mesh: Mesh, model_folder: Path) -> None:
    """A worker that is told to stop hands back what it has begun: nothing fails, nothing is drawn twice."""
    schedule = {"max_staleness": 2, "interrupt": "keep", "per_worker_inflight": 2}
    sampling = {"max_new_tokens": 96, "temperature": 1.0}
    job = mesh.submit(document(model_folder, schedule=schedule, rollout__sampling=sampling))
    suspended = 0
    for number in range(8):
        mesh.until(job, lambda view: view["step"] >= number)  # noqa: B023
        os.kill(victim(mesh, "rollout-child"), signal.SIGTERM)
        time.sleep(0.5)
        suspended = mesh.get(f"/v1/jobs/{job}")["counts"].get("suspended", 0)
        if suspended:
            break
    check(mesh, job, 2)
    assert suspended and mesh.get(f"/v1/jobs/{job}")["dead_letters"] == 0


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_staleness": 2, "version_mixing": "never", "weight_sync_interval": 2},
        {"max_staleness": 1, "on_stale": "wait", "filter": "zero_variance", "max_backfill": 2},
    ],
    ids=["cohorts", "wait-filter"],
)
def test_how_far_they_run_ahead(mesh: Mesh, model_folder: Path, schedule: dict[str, Any]) -> None:
    steps = check(mesh, mesh.submit(document(model_folder, schedule=schedule)), schedule["max_staleness"])
    if "version_mixing" in schedule:
        assert all(s["version_max"] == s["version_min"] for s in steps), "a batch of one version"
    else:
        assert not any("dropped/stale" in s for s in steps)


def test_pictures_may_run_ahead_too(mesh: Mesh, model_folder: Path) -> None:
    folder = make_folder(model_folder.parent / "ahead", seed=3)
    (folder.parent / "prompts.jsonl").write_text('{"prompt": "a red disc"}\n{"prompt": "a blue square"}\n')
    given = picture_document(folder, domain="async_diffusion", reward=LIGHT, steps=4, eval={})
    job = mesh.submit(given | {"schedule": {"max_staleness": 1}})
    mesh.done(job)
    steps = mesh.get(f"/v1/jobs/{job}/steps")
    assert [s["updates"] for s in steps] == [2] * 4 and max(s["staleness_max"] for s in steps) <= 2
    window = {"strategy": "progressive", "window_size": 2, "iters_per_window": 1, "roll_back": True}
    given["rollout"]["sampling"] |= {"sde_indices": None, "sde_window": window}
    answer = mesh.http.post("/v1/jobs", json={"document": given})
    assert answer.status_code == 422 and "share the steps that draw" in answer.text


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"max_staleness": 0, "on_stale": "wait"}, ["schedule.on_stale", "one version"]),
        ({"max_staleness": 1, "version_mixing": "never", "oversample": 2.0}, ["schedule.oversample", "cohort"]),
        ({"max_staleness": 1, "max_backfill": 2}, ["schedule.max_backfill", "nothing is filtered"]),
        ({"max_staleness": 1, "weight_sync_interval": 3}, ["schedule.max_staleness", "at least weight_sync_interval - 1 = 2"]),
        ({"max_staleness": 1, "on_stale": "wait", "oversample": 2.0}, ["schedule.oversample", "left over is dropped"]),
        ({"oversample": 0.5}, ["schedule.oversample", "0.5"]),
        ({"oversample": 2.0, "max_inflight": 6}, ["schedule.max_inflight", "at least 8"]),
    ],
)
def test_schedules_that_cannot_be(mesh: Mesh, model_folder: Path, schedule: dict[str, Any], words: list[str]) -> None:
    answer = mesh.http.post("/v1/jobs", json={"document": document(model_folder, schedule=schedule)})
    assert answer.status_code == 422 and all(word in answer.text for word in words), answer.text


def test_what_cannot_be_interrupted(mesh: Mesh, model_folder: Path) -> None:
    given = document(model_folder, schedule={"max_staleness": 1, "interrupt": "keep"}, deterministic=True)
    answer = mesh.http.post("/v1/jobs", json={"document": given, "dry_run": True})
    assert answer.status_code == 422 and "schedule.interrupt" in answer.text and "drain" in answer.text
    pictures = picture_document(model_folder, domain="async_diffusion", reward=LIGHT, steps=4, eval={})
    answer = mesh.http.post("/v1/jobs", json={"document": pictures | {"schedule": {"max_staleness": 1, "interrupt": "keep"}}})
    assert answer.status_code == 422 and "schedule.interrupt" in answer.text and "diffusers finishes" in answer.text


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"name": "grpo", "params": {"clip_range": 0.2}, "advantage": {"scope": "global"}}, ["compared with other groups"]),
        ({"name": "ppo"}, ["ppo learns from more than how siblings differ"]),
    ],
)
def test_a_filter_that_would_throw_lessons_away(
    mesh: Mesh, model_folder: Path, algorithm: dict[str, Any], words: list[str]
) -> None:
    given = document(model_folder, algorithm=algorithm, schedule={"filter": "zero_variance"})
    answer = mesh.http.post("/v1/jobs", json={"document": given, "dry_run": True})
    assert answer.status_code == 422 and all(word in answer.text for word in ["schedule.filter", *words]), answer.text


def test_the_plan_warns_of_what_nothing_corrects(mesh: Mesh, model_folder: Path) -> None:
    given = document(model_folder, algorithm={"name": "grpo", "params": {"clip_range": 0.2}}, schedule={"max_staleness": 2})
    warnings = mesh.http.post("/v1/jobs", json={"document": given, "dry_run": True}).json()["warnings"]
    assert any("max_staleness is 2" in text and "algorithm.params.correction" in text for text in warnings), warnings
