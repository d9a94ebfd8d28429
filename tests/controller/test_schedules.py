"""The sigma schedule that a job pins: a static shift, or what the checkpoint's own scheduler says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.controller.jobs import prepare
from shared.config.compose import compose
from shared.config.problems import BadInput
from shared.config.settings import Settings
from shared.sde.sigmas import dynamic_mu, flux2_klein_mu
from shared.types.params import DiffusionSamplingParams
from tests.controller.test_jobs import jsonl
from tests.models.tiny_pipelines import TINY
from tests.models.tiny_sd3 import make_folder as make_pipeline


@pytest.mark.parametrize("name", ["qwen_image", "flux2_klein", "wan21"])
def test_a_schedule_may_be_the_checkpoints_own(settings: Settings, tmp_path: Path, name: str) -> None:
    """As the model's own scheduler computes it: for images by their size."""
    pipe = TINY[name]().pipe
    pipe.save_pretrained(tmp_path / name)
    path = jsonl(tmp_path / "data.jsonl", *({"prompt": "a cat"} for _ in range(64)))["params"]["path"]
    places = [f"{place}.params.path={path}" for place in ("data.source", "eval.fixed.source")]
    sizes = [f"rollout.sampling.{axis}={pixels}" for axis, pixels in (("height", 768), ("width", 512))]
    frames = ["rollout.sampling.num_frames=5"] if name == "wan21" else []
    own = [f"model.path={tmp_path / name}", f"model.family={name}", "rollout.sampling.shift=checkpoint", "model.lora=null"]
    found = prepare(compose("diffusion/sd3_cps", own + places + sizes + frames), replace(settings, roots=(tmp_path,))).params
    assert isinstance(found, DiffusionSamplingParams) and found.sigmas is not None
    scheduler, steps, tokens = pipe.scheduler, found.num_inference_steps, 768 * 512 // 256
    if name == "wan21":
        scheduler.set_timesteps(sigmas=np.linspace(1, 0, steps + 1)[:-1].tolist())
    else:
        mu = flux2_klein_mu(tokens, steps) if name == "flux2_klein" else dynamic_mu(tokens, 256, 8192, 0.5, 0.9)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist(), mu=mu)
    assert np.abs(scheduler.sigmas.numpy() - np.asarray(found.sigmas)).max() < 1e-6


def test_a_checkpoint_without_a_shift_has_no_schedule(settings: Settings, tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path / "pictures", 0)
    config = folder / "scheduler" / "scheduler_config.json"
    path = jsonl(tmp_path / "data.jsonl", *({"prompt": "a cat"} for _ in range(64)))["params"]["path"]
    own = [f"model.path={folder}", *(f"{place}.params.path={path}" for place in ("data.source", "eval.fixed.source"))]
    own += ["rollout.sampling.shift=checkpoint", "model.lora=null"]
    for about, words in ({}, "names no shift"), ({"shift": 3.0, "shift_terminal": 0.02}, "stretches a static shift"):
        config.write_text(json.dumps(about))
        with pytest.raises(BadInput, match=f"rollout.sampling.shift.*{words}"):
            prepare(compose("diffusion/sd3_cps", own), replace(settings, roots=(tmp_path,)))
