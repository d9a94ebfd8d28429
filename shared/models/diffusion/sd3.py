"""Stable Diffusion 3 and 3.5: two CLIP encoders and T5, their texts one after the other; padding is attended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from shared.models.diffusion.family import Conditions, Family

CLIP_TOKENS = 77
"""Which the tokenizers of all published checkpoints have."""


class SD3(Family):
    pipeline = "StableDiffusion3Pipeline"

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        """Where a small pipeline (the demo's) has no T5, one zero token stands for its text; otherwise as many as diffusers'
        own pipeline puts there, which are attended."""
        toy = pipe.text_encoder_3 is None and pipe.tokenizer_max_length < CLIP_TOKENS
        longest = {"max_sequence_length": 1} if toy else {}
        text, _, pooled, _ = pipe.encode_prompt(prompts, None, None, do_classifier_free_guidance=False, **longest)
        return {"text": text, "pooled": pooled}

    def cell_of(self, pipe: Any) -> int:
        return int(pipe.vae_scale_factor * pipe.transformer.config.patch_size)

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        found: Tensor = model(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            return_dict=False,
        )[0]
        return found

    def grid(self, steps: int) -> None:
        """The scheduler's own, whose end points are shifted twice."""
