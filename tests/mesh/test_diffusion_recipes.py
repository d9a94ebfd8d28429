"""Recipes of the diffusion domain, for two steps on a tiny model of their family with random weights: one for each family and
algorithm that test_diffusion.py does not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.config.compose import compose, listed
from shared.weights.store import WeightStore
from tests.mesh.conftest import Mesh
from tests.models.tiny_folders import make_folder
from tests.models.tiny_pipelines import TINY, drawn
from tests.models.tiny_sd3 import make_folder as make_sd3

RECIPES = [name for name in listed() if name.startswith("diffusion/") and not name.startswith("diffusion/demo")]
ELSEWHERE = {name for name in RECIPES if name.startswith("diffusion/sd3_")}
ELSEWHERE |= {f"diffusion/{family}_flow_grpo" for family in ("wan21", "wan22", "z_image")}
"""test_diffusion.py trains these families by these algorithms, with their kernels and windows."""
TRAINSIDE = [
    f"diffusion/{name}" for name in ("sd3_flow_grpo", "qwen_image_nft", "qwen_image_edit_flow_grpo", "wan22_i2v_flow_grpo")
]
"""Short and long conditions, a moving average, references, videos by two experts."""
PROMPTS = ("a red disc", "a blue square", "a green triangle", "a yellow disc")


@pytest.fixture(scope="module")
def folders(model_folder: Path) -> dict[str, Path]:
    """By family, made when they are asked for."""
    drawn(40, 30).save(model_folder.parent / "drawn.png")
    about = {"domain": "shapes", "reference": "drawn.png"}
    rows = "".join(json.dumps({"prompt": prompt} | about) + "\n" for prompt in PROMPTS)
    (model_folder.parent / "shapes.jsonl").write_text(rows)
    return {}


def folder_of(family: str, folders: dict[str, Path], root: Path) -> Path:
    if family not in folders:
        place = root / f"tiny-{family}"
        folders[family] = make_sd3(place, seed=3) if family == "sd3" else make_folder(place, family, seed=3)
    return folders[family]


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ELSEWHERE])
def test_a_recipe_runs(mesh: Mesh, folders: dict[str, Path], model_folder: Path, name: str) -> None:
    check(mesh, run(mesh, folders, model_folder, name))


@pytest.mark.parametrize("name", TRAINSIDE)
def test_a_recipe_runs_in_its_trainer(mesh: Mesh, folders: dict[str, Path], model_folder: Path, name: str) -> None:
    """Layout trainside: no rollout worker, and nothing published before the end."""
    job = run(mesh, folders, model_folder, name, "placement.layout=trainside")
    check(mesh, job)
    store = WeightStore(mesh.state / "jobs" / job / "weights", "policy")
    assert len(store.versions(1)) == 2
    assert [entry["failed"] for entry in mesh.get(f"/v1/jobs/{job}")["evals"]] == [0]


def run(mesh: Mesh, folders: dict[str, Path], model_folder: Path, name: str, *more: str) -> str:
    """Two steps of a recipe; returns the job."""
    root = model_folder.parent
    paths = [f"{place}.source.params.path={root / 'shapes.jsonl'}" for place in ("data", "eval.fixed")]
    composed = compose(name, ["model.path=x", *paths])
    family, sampling = composed["model"]["family"], composed["rollout"]["sampling"]
    drawing = list(sampling.get("sde_indices") or ())[
        : 2 if family == "hunyuan_video15" else None
    ]  # it attends to 1,000 tokens
    steps = max([3, *(i + 1 for i in drawing)])
    folder = folder_of(family, folders, root)
    height, width, frames = (16, 16, 1) if family == "sd3" else TINY[family]().size
    overrides = [
        f"model.path={folder}",
        *paths,
        *(f"rollout.sampling.{key}={value}" for key, value in (("height", height), ("width", width))),
        f"rollout.sampling.num_frames={min(frames, 5)}",
        f"rollout.sampling.num_inference_steps={min(steps + 1, sampling['num_inference_steps'])}",
        *([f"rollout.sampling.sde_indices={drawing}"] if drawing else []),
        "steps=2",
        "data.batch_size=2",
        "rollout.group_size=2",
        "rollout.slice=2",
        "eval.fixed.size=1",
        "eval.fixed.at=[end]",
        "train.micro_batch_size=2",
        "+rollout.engine.params.video=raw",  # of random models pictures differ by less than an encoded video keeps
        "+reward.scorers.light.name=brightness",
        *more,
    ]
    answer = mesh.http.post("/v1/jobs", json={"recipe": name, "overrides": overrides})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def check(mesh: Mesh, job: str) -> None:
    view = mesh.done(job)
    assert view["ledger"]["trained"] == 4 and view["step"] == 2, view
    for step in mesh.get(f"/v1/jobs/{job}/steps"):
        assert step["updates"] >= 1 and step["grad_norm"] > 0, step
        if "ratio_mean" in step and step["updates"] == 1:
            assert step["ratio_mean"] == 1.0
            assert step["rollout_gap_max"] <= 1e-4, "the engine scored what it drew as the trainer does"
