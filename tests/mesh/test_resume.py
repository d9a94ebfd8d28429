"""A run that stops after any step and goes on is the same run, to the bit: same prompts, same parameters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shared.weights import checkpoints
from shared.weights.store import WeightStore
from tests.agent.agents import soon
from tests.conftest import recipe
from tests.mesh.conftest import Mesh

STEPS, BATCH = 8, 4


def document(model: Path, tail: str = "wrap", **changes: Any) -> dict[str, Any]:
    """Ten records in batches of four: epochs end in the middle of a batch."""
    path = model.parent / "ten.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}{i + 1}>", "answer": str(i)}) + "\n" for i in range(10)))
    given = {
        "steps": STEPS,
        "deterministic": True,
        "data": {"source": {"name": "jsonl", "params": {"path": str(path)}}, "batch_size": BATCH, "tail": tail},
        "rollout__group_size": 4,
        "reward": {"scorers": {"size": {"name": "regex", "params": {"pattern": ".*[a-m].*"}}}},
        "train": {
            "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
            "checkpoint_every": 1,
            "keep_checkpoints_every": 1,
            "ema": {"schedule": "full", "decay": 0.9},
        },
    }
    return recipe(model, **(given | changes))


def prompts(mesh: Mesh, job: str) -> dict[int, list[str]]:
    """By step the ids of its samples."""
    found: dict[int, list[str]] = {}
    for step in range(1, STEPS + 1):
        rows = mesh.get(f"/v1/jobs/{job}/samples", step=step, limit=100)["samples"]
        found[step] = sorted(row["id"] for row in rows)
    return found


def outcome(mesh: Mesh, job: str) -> tuple[str, dict[int, list[str]]]:
    view = mesh.done(job)
    assert view["step"] == STEPS and [s["step"] for s in mesh.get(f"/v1/jobs/{job}/steps")] == list(range(1, STEPS + 1))
    return mesh.fingerprint(job, STEPS), prompts(mesh, job)


def restore(mesh: Mesh, job: str, step: int | None = None) -> dict[str, Any]:
    answer = mesh.http.post(f"/v1/jobs/{job}/restore", params={} if step is None else {"step": step})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


@pytest.mark.parametrize(("tail", "places"), [("wrap", range(1, STEPS)), ("drop", (2,))])
def test_stopped_after_each_step(mesh: Mesh, model_folder: Path, tail: str, places: Any) -> None:
    job = mesh.submit(document(model_folder, tail))
    straight = outcome(mesh, job)
    roots = [name.partition("/")[0] for step in sorted(straight[1]) for name in straight[1][step][::4]]
    epochs = [int(root.split(":")[1]) for root in roots]
    assert max(epochs) == 3
    folder = mesh.state / "jobs" / job / "checkpoints"
    if tail == "drop":  # of steps that lie behind where the job went back to, the newer history's count
        restore(mesh, job, 2)
        mesh.until(job, lambda view: view["step"] >= 3)
        assert mesh.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
        soon(lambda: mesh.get(f"/v1/jobs/{job}")["state"] == "cancelled")
        again = restore(mesh, job)
        assert again["step"] < STEPS and again["incarnation"] == 3
        assert outcome(mesh, job) == straight
        return
    for number, step in enumerate(places, 2):
        assert restore(mesh, job, step) == {"id": job, "step": step, "incarnation": number}
        assert outcome(mesh, job) == straight, f"after step {step}"
        assert {checkpoints.position(p).step for p in checkpoints.found(folder)} == set(range(1, STEPS + 1))


def test_supervised_runs_too(mesh: Mesh, model_folder: Path) -> None:
    """With the optimizer's, the average's and the evaluations' state."""
    given = document(model_folder, algorithm={"name": "cross_entropy"})
    given = {name: value for name, value in given.items() if name not in ("rollout", "reward")} | {"domain": "sft"}
    given["data"]["source"]["params"]["target"] = "answer"
    given["eval"] = {"held_out": {"source": given["data"]["source"], "batch_size": 4, "every": 2}}
    job = mesh.submit(given)

    def figures() -> Any:
        view = mesh.done(job)
        return mesh.fingerprint(job, STEPS), {e["tag"]: (e["loss"], e["tokens"], e["failed"]) for e in view["evals"]}

    def measured_at() -> dict[str, float]:
        return {e["tag"]: e["at"] for e in mesh.get(f"/v1/jobs/{job}")["evals"]}

    straight, before = figures(), measured_at()
    assert len(straight[1]) == 5 and all(tokens == 20 and not failed for _, tokens, failed in straight[1].values())
    for step, anew in ((3, {"step-4", "step-6", "end"}), (4, {"step-4", "step-6", "end"})):
        restore(mesh, job, step)
        assert figures() == straight
        after = measured_at()
        assert {tag for tag in after if after[tag] != before[tag]} == anew
        before = after


def test_a_trainer_told_to_stop_at_any_time_loses_nothing(mesh: Mesh, model_folder: Path) -> None:
    """SIGTERM while it loads, trains, publishes or saves: what it wrote is whole, another one goes on."""
    straight = outcome(mesh, mesh.submit(document(model_folder)))
    job = mesh.submit(document(model_folder))
    children: set[int] = set()
    for number in range(3):
        mesh.until(job, lambda view: view["step"] >= number)  # noqa: B023
        child = next(w["child"] for w in iter(lambda: mesh.worker("trainer"), None) if w["child"] not in children)
        children.add(child)
        time.sleep(0.2 * number)
        os.kill(child, signal.SIGTERM)
    assert outcome(mesh, job) == straight


def test_a_checkpoint_starts_a_job_that_no_redis_knows(tmp_path: Path, model_folder: Path) -> None:
    """The state folder alone is left: documents, data cursor, ledger and weights are in the checkpoint."""
    shutil.copytree(model_folder, tmp_path / "tiny")
    mesh = Mesh(tmp_path / "state", tmp_path)
    job = mesh.submit(document(tmp_path / "tiny"))
    straight = outcome(mesh, job)
    old = WeightStore(mesh.state / "jobs" / job / "weights", "policy").versions(1)
    assert mesh.http.post(f"/v1/jobs/{job}/restore", params={"step": 9}).status_code == 422
    assert mesh.stop() == 0
    shutil.rmtree(mesh.state / "redis")
    again = Mesh(mesh.state, tmp_path)
    try:
        assert again.http.get(f"/v1/jobs/{job}").status_code == 404
        assert again.http.post("/v1/jobs/000000000000/restore").status_code == 404
        assert again.http.post("/v1/jobs/..%2f..%2fx/restore").status_code == 404
        for name, field in (("ten.jsonl", "data.source"), ("tiny/config.json", "model.path")):
            path = tmp_path / name
            before = path.read_bytes()
            path.write_bytes(before.replace(b"1", b"2"))
            changed = again.http.post(f"/v1/jobs/{job}/restore")
            assert changed.status_code == 422 and field in changed.text and "not what the job began with" in changed.text
            path.write_bytes(before)
        restore(again, job, 5)
        running = again.http.post(f"/v1/jobs/{job}/restore")
        assert running.status_code == 409 and "goes on by itself" in running.text
        view = again.done(job)
        assert view["ledger"]["trained"] == STEPS * BATCH and view["incarnation"] == 2
        assert again.fingerprint(job, STEPS) == straight[0]
        whole = prompts(again, job)
        assert all(whole[step] == straight[1][step] for step in range(6, STEPS + 1))
        weights = mesh.state / "jobs" / job / "weights" / "policy"
        assert old and all(load_file(p) for p in sorted((weights / "2").glob("v*/model.safetensors")))
    finally:
        again.stop()
