"""The diffusion domain through all four services, on a tiny Stable Diffusion 3."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from services.trainer.algorithms.flow_matching import FlowMatching
from shared import pictures as shapes
from shared.config.algorithms import FlowMatching as FlowMatchingParams
from shared.models.diffusion import family
from shared.models.diffusion.bundle import load_pipeline, load_trained
from shared.sde import loop
from shared.sde.seeds import prompt_group
from shared.sde.sigmas import static_sigmas
from shared.sde.solvers import Dpm2, UniPC
from tests.agent.agents import soon
from tests.mesh.conftest import Mesh
from tests.models.tiny_folders import make_folder as make_tiny
from tests.models.tiny_sd3 import make_folder

STEPS, BATCH, GROUP = 3, 2, 4
WINDOW = {"strategy": "progressive", "window_size": 2, "iters_per_window": 1, "roll_back": True}
LIGHT = {"scorers": {"light": {"name": "brightness"}}}
LORA = {"rank": 2, "alpha": 4, "targets": ["to_q", "to_v"]}


@pytest.fixture(scope="module")
def pictures(model_folder: Path) -> Path:
    """A pipeline's folder, with prompts beside it."""
    folder = make_folder(model_folder.parent / "pictures", seed=3)
    prompts = ("a red disc", "a blue square", "a green triangle", "a yellow disc")
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (model_folder.parent / "prompts.jsonl").write_text(rows)
    return folder


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    source = {"name": "jsonl", "params": {"path": str(folder.parent / "prompts.jsonl")}}
    found: dict[str, Any] = {
        "domain": "diffusion",
        "steps": STEPS,
        "deterministic": True,
        "model": {"path": str(folder), "family": "sd3"},
        "data": {"source": source, "batch_size": BATCH},
        "rollout": {
            "group_size": GROUP,
            "slice": 2,
            "sampling": {"num_inference_steps": 4, "height": 16, "width": 16, "sde_indices": [0, 1]},
        },
        "reward": {"scorers": {"light": {"name": "brightness"}, "small": {"name": "jpeg_size", "weight": 0.1}}},
        "algorithm": {"name": "flow_grpo", "params": {"clip_range": 1e-3}},
        "train": {"optimizer": {"lr": 1e-3}, "num_updates_per_batch": 2, "checkpoint_every": 1, "keep_checkpoints_every": 1},
        "eval": {"fixed": {"source": source, "size": 2}},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        place = found
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return found


def run(mesh: Mesh, given: dict[str, Any]) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    job = mesh.submit(given)
    view = mesh.done(job)
    assert view["ledger"]["trained"] == STEPS * given["data"]["batch_size"] and view["ledger"]["in_flight"] == 0
    return job, mesh.get(f"/v1/jobs/{job}/steps"), view


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": {"name": "flow_dppo"}, "rollout__sampling__kernel": "cps", "rollout__sampling__guidance_scale": 3.0},
        {"algorithm": {"name": "flow_grpo", "params": {"beta": 0.1, "clip_range": 1e-3}}, "model__lora": LORA},
        {"algorithm": {"name": "flow_unigrpo"}, "rollout__sampling__kernel": "dance", "train__micro_batch_size": 3},
        {"rollout__sampling__sde_indices": None, "rollout__sampling__sde_window": WINDOW},
    ],
    ids=["grpo", "dppo-cps-guided", "grpo-kl-lora", "unigrpo-dance", "mixgrpo"],
)
def test_it_runs_through_all_services(mesh: Mesh, pictures: Path, changes: dict[str, Any]) -> None:
    job, steps, view = run(mesh, document(pictures, **changes))
    assert all(step["updates"] == 2 and step["rollout_gap_max"] < 1e-2 for step in steps)
    first, second, third = ((step["sde_step_first"], step["sde_step_last"]) for step in steps)
    assert (first, second, third) == ((0, 1), (2, 3) if "sde_window" in str(changes) else (0, 1), (0, 1))
    assert steps[0]["rollout_gap_max"] <= 5e-3 and np.isfinite(steps[-1]["loss"])
    assert {e["tag"] for e in view["evals"]} == {"start", "end"} and all(0 < e["reward"] < 1 for e in view["evals"])
    folder = mesh.state / "jobs" / job / "weights" / "policy" / "1" / f"v{2 * STEPS}"
    names = {n for path in folder.glob("*.safetensors") for n in load_file(path)}
    assert names and all(".lora_" in n for n in names) == ("model__lora" in changes)
    if "kernel" not in str(changes):
        check_export(mesh, pictures, job, folder)
    [first, *_] = mesh.get(f"/v1/jobs/{job}/samples", step=1, limit=2)["samples"]
    assert set(first["components"]) == {"light", "small"} and first["version"] == 0
    if changes == {}:
        check_pictures(mesh, job, view)


def test_the_log_retains_no_more_trajectories_than_it_may(mesh: Mesh, pictures: Path) -> None:
    """A batch fills more than half of what the log may retain: without checkpoints of the recipe's own, those that room needs
    are made, and nothing waits for ever."""
    given = document(pictures, steps=50, eval={}, train__checkpoint_every=0)
    job = mesh.submit(given)
    view = mesh.until(job, lambda view: view["step"] >= 2)
    assert 0 < view["log"]["bytes"] < view["log"]["budget"] == 1 << 30
    batch = int(view["log"]["bytes"] / view["step"] / 2)  # at most one more batch than those that are trained is named
    assert mesh.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    given["train"]["log_budget_mb"] = 3 * batch / 2**20
    given["steps"] = 8
    job = mesh.submit(given)
    held: list[int] = []

    def watched(view: dict[str, Any]) -> bool:
        held.append(view["log"]["bytes"])
        return bool(view["state"] == "done")

    view = mesh.until(job, watched)
    assert view["step"] == 8 and view["ledger"]["trained"] == 8 * BATCH and 0 < max(held) <= 6 * batch


def check_pictures(mesh: Mesh, job: str, view: dict[str, Any]) -> None:
    """People see what was rewarded: in full while its message is there, then a preview; and records of evaluations."""

    def seen(path: str, **query: str) -> tuple[str, Any]:
        answer = mesh.http.get(f"/v1/jobs/{job}/{path}", params=query)
        assert answer.status_code == 200, answer.text
        with Image.open(io.BytesIO(answer.content)) as picture:
            return answer.headers["content-type"], np.asarray(picture.convert("RGB"), np.float32)

    for step in (1, STEPS):
        rows = [row for row in mesh.get(f"/v1/jobs/{job}/samples", step=step)["samples"] if row["picture"]]
        assert len(rows) == BATCH * GROUP
        kind, pixels = seen("picture", group=rows[0]["gid"], id=rows[0]["id"])
        assert kind in ("image/png", "image/webp") and pixels.shape == (16, 16, 3), "a preview, where a checkpoint has swept it"
        assert abs(pixels.mean() / 255 - rows[0]["components"]["light"]) < (1e-6 if kind == "image/png" else 0.02)
    for entry in view["evals"]:
        assert [p["picture"] for p in entry["previews"]] == [True, True]
        [(_, one), (_, two)] = [seen(f"evals/{entry['suite']}/{entry['tag']}/{k}/picture") for k in range(2)]
        assert abs(one.mean() / 255 - entry["previews"][0]["reward"]) < 0.5 and not np.array_equal(one, two)
    for path in ("evals/fixed/start/7/picture", "evals/fixed/never/0/picture", "evals/..%2F..%2Fx/start/0/picture"):
        assert mesh.http.get(f"/v1/jobs/{job}/{path}").status_code == 404
    assert mesh.http.get(f"/v1/jobs/{job}/picture", params={"group": rows[0]["gid"], "id": "x"}).status_code == 404


def test_the_forward_process_teaches_and_teachers_teach(mesh: Mesh, pictures: Path) -> None:
    """DiffusionNFT on pictures of a sampler that never drew, by adapters whose average is published; what it made is the
    teacher of another job, and the start of a third one."""
    ema = {"schedule": "constant", "decay": 0.5, "timing": "rollout_end"}
    nft: dict[str, Any] = {
        "algorithm": {"name": "diffusion_nft", "params": {"ref_deviation_coef": 0.01}},
        "train__ema": ema,
        "model__lora": LORA,
        "rollout__sampling__eta": 0,
        "rollout__sampling__sde_indices": None,
    }
    first, steps, view = run(mesh, document(pictures, **nft))
    assert all(step["updates"] == 2 and step["positive_loss"] > 0 for step in steps) and steps[0]["reference_deviation"] >= 0
    assert all(0 < e["reward"] < 1 for e in view["evals"])
    folder = mesh.state / "jobs" / first / "weights" / "policy" / "1" / f"v{2 * STEPS}"
    assert json.loads((folder / "manifest.json").read_text())["source"] == "ema"

    rows = [{"prompt": f"a {word} disc", "domain": "discs"} for word in ("red", "green", "blue", "yellow")]
    (pictures.parent / "domains.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "jsonl", "params": {"path": str(pictures.parent / "domains.jsonl")}}
    opd = {"algorithm": {"name": "diffusion_opd", "params": {"teachers": {"discs": f"job:{first}"}}}, "data__source": source}
    _, steps, _ = run(mesh, document(pictures, **opd))
    assert steps[0]["distill_loss"] > 0 and steps[-1]["distill_loss"] < steps[0]["distill_loss"]
    answer = mesh.http.post(
        "/v1/jobs", json={"document": document(pictures, **opd | {"data__source": document(pictures)["data"]["source"]})}
    )
    assert answer.status_code == 422 and "its domain is None: there are teachers of discs" in answer.text, answer.text

    after, _, _ = run(mesh, document(pictures, model__path=f"job:{first}", weights__keep=9, eval={}))
    begun = load_file(mesh.state / "jobs" / after / "weights" / "policy" / "1" / "v0" / "model.safetensors")
    merged = load_trained(pictures, family("sd3"), folder).model.state_dict()
    assert all(torch.equal(value, merged[name]) for name, value in begun.items())


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_videos_are_learnt_from_too(mesh: Mesh, pictures: Path, name: str) -> None:
    """By all weights of one model, or adapters on both experts: the boundary lies between the steps that draw."""
    folder = make_tiny(pictures.parent / name, name, seed=4)
    changes: dict[str, Any] = {
        "model__family": name,
        "rollout__sampling__num_frames": 5,
        # of this random model pictures differ by less than an encoded video keeps
        "rollout__engine": {"name": "diffusers", "params": {"video": "raw"} if name == "wan21" else {"crf": 0}},
        "rollout__sampling__guidance_scale": 3.0,
        "rollout__sampling__sde_indices": [0, 1, 2, 3],
    }
    if name == "wan22":
        changes |= {"model__lora": LORA}
    job, steps, view = run(mesh, document(folder, **changes))
    assert all(step["updates"] == 2 and step["rollout_gap_max"] < 1e-2 for step in steps)
    assert {e["tag"] for e in view["evals"]} == {"start", "end"} and all(0 < e["reward"] < 1 for e in view["evals"])
    version = mesh.state / "jobs" / job / "weights" / "policy" / "1" / f"v{2 * STEPS}"
    names = {n for path in version.glob("*.safetensors") for n in load_file(path)}
    assert name != "wan22" or {part for n in names for part in ("high", "low") if f"{part}." in n} == {"high", "low"}, names
    check_export(mesh, folder, job, version, name)


def test_prompts_of_different_lengths_meet(mesh: Mesh, pictures: Path) -> None:
    """Z-Image's texts have as many rows as tokens."""
    folder = make_tiny(pictures.parent / "z_image", "z_image", seed=4)
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("cat", "a red disc", "a dog a cat", "blue square"))
    (folder / "prompts.jsonl").write_text(rows)
    source = {"name": "jsonl", "params": {"path": str(folder / "prompts.jsonl")}}
    changes = {"model__family": "z_image", "data__source": source, "rollout__sampling__guidance_scale": 2.0}
    one = {"train__num_updates_per_batch": 1}  # so that nothing but arithmetic lies between rollout and training
    _, steps, _ = run(mesh, document(folder, **changes, **one, deterministic=False, data__batch_size=4, eval={}))
    assert all(step["updates"] == 1 and step["rollout_gap_max"] <= 1e-4 for step in steps), steps


def check_export(mesh: Mesh, pictures: Path, job: str, version: Path, kind: str = "sd3") -> None:
    """diffusers opens it in place of the pipeline's own, adapters merged."""
    export = mesh.http.post(f"/v1/jobs/{job}/exports", json={}).json()["id"]
    place = f"/v1/jobs/{job}/exports/{export}"
    view = soon(lambda: found if (found := mesh.get(place))["state"] in ("done", "failed") else None, 60)
    assert view["state"] == "done", view
    target = mesh.state / "exported" / job
    target.mkdir(parents=True)
    for name in view["files"]:
        (target / name).write_bytes(mesh.http.get(f"{place}/files/{name}").content)
    model: Any = diffusers.SD3Transformer2DModel if kind == "sd3" else diffusers.WanTransformer3DModel
    before = load_trained(pictures, family(kind)).model.state_dict()
    if kind == "wan22":
        both = {part: model.from_pretrained(target, variant=part).state_dict() for part in ("high", "low")}
        merged = {f"{part}.{n}": value for part, values in both.items() for n, value in values.items()}
    else:
        merged = model.from_pretrained(target).state_dict()
    assert merged.keys() == before.keys() and any(not torch.equal(merged[n], before[n]) for n in merged)
    tensors = {n: v for path in version.glob("*.safetensors") for n, v in load_file(path).items()}
    assert all(torch.equal(merged[n], v) for n, v in tensors.items() if n in merged)


def test_evaluations_have_steps_and_sizes_of_their_own(mesh: Mesh, pictures: Path) -> None:
    """The reward is that of pictures made so by hand, with noise of the prompt's own, by each solver."""
    own = {"num_inference_steps": 6, "height": 24, "width": 16, "guidance_scale": 2.0, "shift": 2.0}
    given = document(pictures, steps=1, reward=LIGHT)
    suite = {"source": given["data"]["source"], "size": 2, "at": ["start"]}
    given["eval"] = {solver: suite | {"sampling": own | {"solver": solver}} for solver in ("euler", "dpm2", "unipc")}
    found = {e["suite"]: e["reward"] for e in mesh.done(mesh.submit(given))["evals"]}
    pipe, kind = load_pipeline(pictures), family("sd3")
    prompts = [json.loads(line)["prompt"] for line in (pictures.parent / "prompts.jsonl").read_text().splitlines()][:2]
    sigmas = torch.as_tensor(static_sigmas(6, 2.0), dtype=torch.float32)
    noise = loop.initial_noise(0, [prompt_group(prompt, 0) for prompt in prompts], kind.latent_shape(pipe, 24, 16))
    makes = {"euler": None, "dpm2": Dpm2(sigmas), "unipc": UniPC(sigmas)}
    with torch.no_grad():
        cond, negative = kind.encode(pipe, prompts), kind.encode(pipe, [""] * 2)
        velocity = lambda x, s: kind.predict(pipe.transformer, x, s, cond, negative, 2.0)  # noqa: E731
        for solver, made_by in makes.items():
            made = loop.sample(velocity, noise, sigmas, "flow", 0.0, (), lambda i: noise, solver=made_by)
            pixels = (kind.decode(pipe, made.final) / 2 + 0.5).clamp(0, 1).mul(255).round()
            assert pixels.shape[-2:] == (24, 16)
            assert found[solver] == pytest.approx(float(pixels.mean()) / 255, abs=1e-3), solver
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_pictures_are_imitated(mesh: Mesh, pictures: Path, ranks: int) -> None:
    """Supervised flow matching as a job of the domain sft: the held-out loss falls, and is diffusers' own; a job of the domain
    diffusion starts from what was learnt."""
    folder = pictures.parent / "painted"
    folder.mkdir(exist_ok=True)
    rows, rng = [], np.random.default_rng(0)
    for number, prompt in enumerate(("red disc", "blue square", "green triangle", "yellow disc")):
        painted = (shapes.paint([prompt], rng)[0].transpose(1, 2, 0) * 255).round().astype(np.uint8)
        Image.fromarray(painted).save(folder / f"{number}.png")
        rows.append({"prompt": prompt, "file": f"{number}.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "jsonl", "params": {"path": str(folder / "rows.jsonl"), "picture": "file"}}
    given: dict[str, Any] = {
        "domain": "sft",
        "steps": 12,
        "model": {"path": str(pictures), "family": "sd3"},
        "picture": {"height": 16, "width": 16},
        "data": {"source": source, "batch_size": 4},
        "train": {"optimizer": {"lr": 3e-3}, "micro_batch_size": 3},
        "weights": {"keep": 9},
        "placement": {"trainer_ranks": ranks},
        "eval": {"held_out": {"source": source, "batch_size": 3}},
    }
    job = mesh.submit(given)
    view = mesh.done(job)
    evals = {e["tag"]: e for e in view["evals"]}
    assert evals["end"]["loss"] < 0.97 * evals["start"]["loss"], evals
    pipe, kind, losses = load_pipeline(pictures), family("sd3"), []
    algorithm = FlowMatching(FlowMatchingParams())
    for number, row in enumerate(rows):
        picture = Image.open(folder / row["file"]).resize((16, 16), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.asarray(picture, np.float32)).movedim(2, 0)[None] / 127.5 - 1
        with torch.no_grad():
            clean = kind.clean(pipe, pixels)
            times, noise = algorithm.evaluation(0, [f"eval-held_out:0:{number}/0"], tuple(clean.shape[1:]))
            noisy = (1 - times) * clean + times * noise
            velocity = kind.velocity(pipe.transformer, noisy, times, kind.encode(pipe, [row["prompt"]]))
        losses.append(float(((velocity - (noise - clean)) ** 2).mean()))
    assert evals["start"]["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-4)
    if ranks == 1:
        run(mesh, document(pictures, model__path=f"job:{job}", eval={}))
        given["data"]["source"] = source | {"params": {"path": str(folder / "rows.jsonl")}}
        answer = mesh.http.post("/v1/jobs", json={"document": given})
        assert answer.status_code == 422 and "no picture: set data.source.params.picture" in answer.text, answer.text
        (folder / "away.jsonl").write_text(json.dumps({"prompt": "x", "file": "/etc/hostname"}) + "\n" * 1)
        given["data"] = {"source": {"name": "jsonl", "params": {"path": str(folder / "away.jsonl"), "picture": "file"}}}
        given["data"]["batch_size"] = 1
        answer = mesh.http.post("/v1/jobs", json={"document": given})
        assert answer.status_code == 422 and "not below a configured root" in answer.text, answer.text


def test_a_dry_run_says_what_it_takes(mesh: Mesh, pictures: Path) -> None:
    answer = mesh.http.post("/v1/jobs", json={"document": document(pictures), "dry_run": True})
    assert answer.status_code == 200 and answer.json()["estimate"]["parameters"] > 10_000


def test_what_a_run_makes_belongs_to_its_recipe(mesh: Mesh, pictures: Path) -> None:
    """Twice the same, and again from a checkpoint: the same parameters to the bit."""
    first, steps, view = run(mesh, document(pictures))
    second, again, other = run(mesh, document(pictures))
    assert [s["reward"] for s in steps] == [s["reward"] for s in again]
    assert mesh.fingerprint(first, 2 * STEPS) == mesh.fingerprint(second, 2 * STEPS)
    assert [e["reward"] for e in view["evals"]] == [e["reward"] for e in other["evals"]]
    before = mesh.fingerprint(first, 2 * STEPS)
    assert mesh.http.post(f"/v1/jobs/{first}/restore", params={"step": 1}).status_code == 202
    mesh.done(first)
    assert mesh.fingerprint(first, 2 * STEPS) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__sampling__height": 18}, ["rollout.sampling.height", "18", "multiple of 4", "16"]),
        ({"rollout__sampling__num_frames": 5}, ["num_frames", "makes images"]),
        ({"rollout__sampling__guidance_scale_2": 3.0}, ["guidance_scale_2", "sd3 has no second expert"]),
        ({"rollout__sampling__sde_indices": [4]}, ["sde_indices", "[4]", "0 to 3"]),
        ({"rollout__sampling__eta": 0}, ["rollout.sampling.eta", "learns from steps that draw"]),
        ({"rollout__sampling__sde_indices": []}, ["rollout.sampling.sde_indices", "learns from steps that draw"]),
        ({"algorithm": {"name": "grpo"}}, ["algorithm.name", "not one of pictures", "flow_grpo"]),
        ({"algorithm": {"name": "diffusion_nft"}}, ["train.ema", "moving average"]),
        ({"algorithm": {"name": "diffusion_opd", "params": {}}}, ["algorithm.params.teachers", "required"]),
        (
            {
                "algorithm": {
                    "name": "diffusion_opd",
                    "params": {"teachers": {"x": "job:nobody"}, "guidance_scales": {"x": 4.0}},
                },
            },
            ["algorithm.params.guidance_scales", "rollouts without guidance"],
        ),
        (
            {"algorithm": {"name": "diffusion_opd", "params": {"teachers": {"x": "/nowhere"}}}},
            ["algorithm.params.teachers.x", "below a configured root"],
        ),
        ({"model__family": "sd4"}, ["model.family", "'sd4'", "sd3"]),
        ({"model__family": "wan21"}, ["model.family", "'wan21'", "StableDiffusion3Pipeline", "sd3"]),
        ({"data__source__params__reference": "prompt"}, ["data.source record 1", "pictures of texts alone", "no reference"]),
        ({"reward": {"scorers": {"x": {"name": "exact_match"}}}}, ["reward.scorers.x.name", "scores texts"]),
        ({"data__chat": True}, ["data.chat", "plain texts"]),
        ({"rollout__sampling__sde_window": WINDOW}, ["sde_indices and sde_window", "one of them"]),
        (
            {"rollout__sampling__sde_indices": None, "rollout__sampling__sde_window": WINDOW | {"init_timestep": 3}},
            ["sde_window", "2 steps from step 3", "4 steps"],
        ),
        (
            {"rollout__sampling__kernel": "cps", "rollout__sampling__sde_indices": None, "algorithm__params__beta": 0.1},
            ["rollout.sampling.sde_indices", "step 3, the last, draws nothing under cps", "steps 0 to 2"],
        ),
        ({"train__micro_batch_tokens": 5}, ["train.replay", "micro_batch_size"]),
        ({"model__lora": {"rank": 2, "alpha": 4, "targets": ["q_proj"]}}, ["model.lora.targets", "q_proj"]),
        ({"eval__fixed__sampling": {"max_new_tokens": 3}}, ["eval.fixed.sampling.max_new_tokens", "unknown key"]),
        ({"eval__fixed__sampling": {"height": 30}}, ["eval.fixed.sampling.height", "30", "multiple of 4"]),
        ({"eval__fixed__sampling": {"num_frames": 5}}, ["eval.fixed.sampling.num_frames", "makes images"]),
    ],
)
def test_what_cannot_be_is_refused(mesh: Mesh, pictures: Path, changes: dict[str, Any], words: list[str]) -> None:
    answer = mesh.http.post("/v1/jobs", json={"document": document(pictures, **changes)})
    assert answer.status_code == 422 and all(word in answer.text for word in words), answer.text


def test_the_folder_of_a_language_model_is_none_of_a_pipeline(mesh: Mesh, pictures: Path, model_folder: Path) -> None:
    answer = mesh.http.post("/v1/jobs", json={"document": document(pictures, model__path=str(model_folder))})
    assert answer.status_code == 422 and "no model_index.json" in answer.text
