"""Every algorithm and form of training through all four services, two steps each, on one mesh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer import checkpoint
from shared.models.ar.bundle import load
from shared.models.ar.tiny import make_folder
from shared.weights import checkpoints
from tests.conftest import recipe
from tests.mesh.conftest import Mesh

LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
OPTIMIZER = {"optimizer": {"lr": 1e-3}, "checkpoint_every": 1}
SCORED = {"scorers": {"letters": {"name": "regex", "params": {"pattern": ".*[a-m].*"}}}}
"""What a random model says has such a letter every other time."""
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"algorithm": {"name": "grpo", "params": {"clip_range": 0.2}}, "model__dtype": "bfloat16"},
    "grpo-lora-kl": {
        "algorithm": {"name": "grpo", "params": {"clip_range": 0.2, "kl_coef": 0.1, "entropy": True}},
        "model__lora": LORA,
    },
    "grpo-kl-copy": {"algorithm": {"name": "grpo", "params": {"clip_range": 0.2, "kl_coef": 0.1, "kl_estimator": "k2"}}},
    "gspo-packed": {
        "algorithm": {"name": "gspo", "params": {"correction": "sequence"}},
        "train": OPTIMIZER | {"replay": "packed", "micro_batch_tokens": 24},
    },
    "dppo": {"algorithm": {"name": "dppo", "params": {"correction": "token", "correction_mode": "mask"}}},
    "cppo": {"algorithm": {"name": "cppo"}},
    "drpo": {"algorithm": {"name": "drpo", "params": {"entropy_coef": 0.01}}},
    "ema": {
        "algorithm": {"name": "grpo", "params": {"clip_range": 0.2, "dual_clip": 3.0}},
        "algorithm__advantage": {"estimator": "rloo"},
        "train": OPTIMIZER | {"ema": {"schedule": "constant", "decay": 0.5}},
    },
    "ppo-lora": {
        "algorithm": {"name": "ppo"},
        "model__lora": LORA,
        "train": {"optimizer": {"lr": 1e-3, "group_lrs": {"value_head": 1e-2}}, "num_updates_per_batch": 2},
    },
}


def run(mesh: Mesh, model: Path | str, **changes: Any) -> tuple[str, list[dict[str, Any]]]:
    given = {"steps": 2, "train": OPTIMIZER, "rollout__group_size": 4, "reward": SCORED, **changes}
    job = mesh.submit(recipe(model, **given))
    view = mesh.done(job)
    assert view["ledger"]["in_flight"] == 0 and view["ledger"]["trained"] == 4, view
    return job, mesh.get(f"/v1/jobs/{job}/steps")


def version(mesh: Mesh, job: str) -> Path:
    folder = mesh.state / "jobs" / job / "weights" / "policy" / "1"
    return max(folder.glob("v*"), key=lambda path: int(path.name[1:]))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_form_of_training(mesh: Mesh, model_folder: Path, name: str) -> None:
    variant = VARIANTS[name]
    job, steps = run(mesh, model_folder, **variant)
    last = steps[-1]
    if "kl_coef" in variant["algorithm"].get("params", {}):
        assert steps[0]["kl_reference"] == 0.0 and last["kl_reference"] > 0
    if variant["algorithm"].get("params", {}).get("entropy"):
        assert 0 < last["entropy"] < 5
    if "value_head" in json.dumps(variant):
        assert last["value_loss"] > 0 and "explained_variance" in last
    manifest = json.loads((version(mesh, job) / "manifest.json").read_text())
    assert manifest["source"] == ("ema" if name == "ema" else "live")
    if name == "bfloat16":
        tensors = load_file(version(mesh, job) / "model.safetensors")
        assert {value.dtype for value in tensors.values()} == {torch.float32}, "masters are what is published"
        assert 0 < last["rollout_gap"] < 0.05
    if name == "ema":
        published_is_the_average(mesh, job)
    assert manifest["kind"] == ("lora" if "model__lora" in variant else "full")
    names = {name for path in version(mesh, job).glob("*.safetensors") for name in load_file(path)}
    assert not any("value_head" in name for name in names)
    if "model__lora" in variant:
        assert names and all(".lora_A." in n or ".lora_B." in n for n in names) and len(names) == 2 * 3 * 2


def published_is_the_average(mesh: Mesh, job: str) -> None:
    """Byte for byte what the last checkpoint keeps as the average, and not the live weights beside it."""
    newest = checkpoints.newest(mesh.state / "jobs" / job / "checkpoints")
    assert newest is not None
    found = load_file(version(mesh, job) / "model.safetensors")
    average, live = checkpoint.read(newest, "ema."), checkpoint.read(newest, "model.")
    assert average and all(torch.equal(value, found[name]) for name, value in average.items())
    assert any(not torch.equal(live[name], value) for name, value in average.items())


def test_an_adapters_versions_are_peft_folders_and_start_other_jobs(mesh: Mesh, model_folder: Path) -> None:
    """What rollouts sampled from is base + adapter; the next job starts from their sum."""
    job, _ = run(mesh, model_folder, **VARIANTS["grpo-lora-kl"])
    folder = version(mesh, job)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["peft_type"] == "LORA" and len(config["target_modules"]) == 6
    base, both = load(model_folder, None), load(model_folder, folder)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        plain, changed = base.model(ids).logits, both.model(ids).logits
    assert not torch.equal(plain, changed)
    after = mesh.submit(recipe(f"job:{job}", steps=1, train=OPTIMIZER))
    started = mesh.state / "jobs" / after / "weights" / "policy" / "1" / "v0"
    mesh.until(after, lambda view: (started / "COMPLETE").exists())
    found = load_file(started / "model.safetensors")
    wanted = {name: value for name, value in both.model.state_dict().items() if name in found}
    assert len(wanted) == len(found) and all(torch.equal(value, found[name]) for name, value in wanted.items())
    shutil.rmtree(folder)  # the other job may collect it: this one holds what it started from
    mesh.done(after)
    kept = mesh.state / "jobs" / after / "base" / "model"
    assert (kept / "adapter_model.safetensors").exists() and torch.equal(logits_of(load(model_folder, kept), ids), changed)


def logits_of(bundle: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = bundle.model(ids).logits
    return found


def test_distillation_asks_its_teacher(mesh: Mesh, model_folder: Path) -> None:
    """A teacher that is sure of what it says is far from a student that is not."""
    teacher = make_folder(model_folder.parent / "teacher", seed=7, initializer_range=0.15)
    _, steps = run(mesh, model_folder, algorithm={"name": "distillation", "reference": str(teacher)})
    assert all(step["teacher_kl"] > 0.3 for step in steps)


def test_what_cannot_be_is_refused_before_a_model_loads(mesh: Mesh, model_folder: Path) -> None:
    other = make_folder(model_folder.parent / "small", seed=1, vocab_size=64)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"model__lora": LORA | {"targets": ["q_prj"]}}, "model.lora.targets", "no linear module is named 'q_prj'"),
        ({"model__lora": LORA | {"rank": 0}}, "model.lora.rank", "greater than or equal to 1"),
        ({"algorithm": {"name": "distillation"}}, "algorithm.reference", "needs a teacher"),
        ({"algorithm": {"name": "grpo", "reference": str(other)}}, "algorithm.reference", "nothing compares with it"),
        ({"algorithm": {"name": "distillation", "reference": str(other)}}, "algorithm.reference", "vocabulary has 64"),
        ({"train": OPTIMIZER | {"micro_batch_tokens": 9, "micro_batch_size": 2}}, "train", "give one of them"),
        ({"algorithm": {"name": "gpso"}}, "algorithm.name", "did you mean 'gspo'"),
        ({"algorithm": {"name": "cross_entropy"}}, "algorithm.name", "whatever their reward"),
        ({"train": OPTIMIZER | {"num_updates_per_batch": 3}}, "num_updates_per_batch", "does not divide the 4 rows"),
        ({"train": {"optimizer": {"lr": 1e-3, "group_lrs": {"embed": -1}}}}, "group_lrs", "greater than 0"),
        ({"algorithm": {"name": "distillation", "params": {"kl_coef": 0.1}}}, "kl_coef", "Input should be 0"),
    ]
    for changes, field, said in cases:
        answer = mesh.http.post("/v1/jobs", json={"document": recipe(model_folder, **changes)})
        assert answer.status_code == 422, (changes, answer.text)
        assert field in answer.text and said in answer.text, answer.text


def test_several_rollouts_make_one_update(mesh: Mesh, model_folder: Path) -> None:
    """All of one version; and a run that goes on from the middle of a window is the same to the bit."""
    train = OPTIMIZER | {"accumulate_rollouts": 2, "checkpoint_every": 1, "keep_checkpoints_every": 1}
    given: dict[str, Any] = {"reward": SCORED, "rollout__group_size": 4, "deterministic": True, "train": train}
    job = mesh.submit(recipe(model_folder, steps=4, **given))
    mesh.done(job)
    steps = mesh.get(f"/v1/jobs/{job}/steps")
    assert [step["updates"] for step in steps] == [0, 1, 0, 1] and [s["versions"]["policy"] for s in steps] == [0, 1, 1, 2]
    rows = mesh.get(f"/v1/jobs/{job}/samples", limit=100)["samples"]
    assert {(row["step"], row["version"]) for row in rows} == {(1, 0), (2, 0), (3, 1), (4, 1)}
    before = mesh.fingerprint(job, 2)
    assert steps[1]["grad_norm"] > 0 and steps[3]["grad_norm"] > 0
    assert mesh.http.post(f"/v1/jobs/{job}/restore", params={"step": 3}).status_code == 202
    mesh.done(job)
    assert mesh.fingerprint(job, 2) == before
    answer = mesh.http.post("/v1/jobs", json={"document": recipe(model_folder, steps=5, train=train)})
    assert answer.status_code == 422 and "no multiple of train.accumulate_rollouts" in answer.text, answer.text
