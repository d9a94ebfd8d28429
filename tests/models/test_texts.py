"""From a prompt's text to latents, as diffusers' own pipelines do it: encoders, negative prompts, guidance, references."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from shared.models.diffusion import family
from shared.models.diffusion.bundle import load_pipeline
from shared.sde import loop
from tests.models.test_families import FP32, near
from tests.models.tiny_folders import make_folder
from tests.models.tiny_pipelines import TINY, drawn
from tests.models.tiny_sd3 import make_folder as make_sd3

STEPS = 3
NO_NEGATIVE = ("flux2_klein", "hunyuan_video")
"""Their pipelines lead away from the empty text, or have their guidance in the model."""


@pytest.mark.parametrize("name", TINY)
def test_a_text_becomes_the_pipelines_own_latents(name: str, tmp_path: Path) -> None:
    tiny, own = TINY[name](), family(name)
    pipe = load_pipeline(make_sd3(tmp_path / name, seed=3) if name == "sd3" else make_folder(tmp_path / name, name, 3))
    height, width, frames = (16, 16, 1) if name == "sd3" else tiny.size
    prompts, negative = ["a red disc"], "" if name in NO_NEGATIVE else "blue"
    pictures = [drawn(height, width)] if own.pictured else []
    shape = own.latent_shape(pipe, height, width, frames)
    x = torch.randn(1, *shape)
    call: dict[str, Any] = {n: v for n, v in tiny.call.items() if n in ("guidance_scale", "guidance_scale_2", "true_cfg_scale")}
    call |= {"num_frames": frames} if own.video else {}
    call |= {} if name in NO_NEGATIVE else {"negative_prompt": [negative]}
    call |= {"image": pictures[0]} if pictures else {}
    call |= {"max_sequence_length": 1} if name == "sd3" else {}  # this one has no T5, and is small
    how: dict[str, Any] = {"height": height, "width": width, "num_inference_steps": STEPS, "output_type": "latent"}
    megapixel = patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda *_: (width, height, None))
    with torch.no_grad(), megapixel:
        made = pipe(prompt=list(prompts), latents=tiny.packed(x.clone()), **how, **call)
    with torch.no_grad():
        cond = own.encode(pipe, list(prompts), pictures, frames)
        against = own.encode(pipe, [negative], pictures, frames) if own.guides(*tiny.scales) else None
        model, sigmas = own.model(pipe), own.sigmas(pipe, STEPS, shape)
        found = loop.sample(
            lambda a, s: own.predict(model, a, s, cond, against, *tiny.scales), x, sigmas, "flow", 0.0, (), lambda i: x
        ).final
    if name == "flux2_klein":  # it returns what its VAE decodes
        norm = pipe.vae.bn
        std = (norm.running_var + pipe.vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
        found = pipe._unpatchify_latents(found * std + norm.running_mean.view(1, -1, 1, 1))
    near(found if name == "flux2_klein" else tiny.returned(found), made.frames if own.video else made.images, FP32)
