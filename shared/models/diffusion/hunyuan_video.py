"""HunyuanVideo: guidance is distilled into the model, which takes its scale as an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from shared.models.diffusion.family import Conditions, Family, video_shape


class HunyuanVideo(Family):
    pipeline = "HunyuanVideoPipeline"
    video = True

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        text, pooled, mask = pipe.encode_prompt(prompts)
        return {"text": text, "pooled": pooled, "mask": mask}

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return video_shape(pipe, pipe.transformer.config.in_channels, height, width, frames)

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        found: Tensor = model(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            pooled_projections=cond["pooled"],
            guidance=cond["guidance"] * 1000,
            return_dict=False,
        )[0]
        return found

    def guides(self, scale: float, second: float | None = None) -> bool:
        return False

    def predict(
        self,
        model: Any,
        x: Tensor,
        sigma: Tensor,
        cond: Conditions,
        negative: Conditions | None,
        scale: float,
        second: float | None = None,
    ) -> Tensor:
        return self.velocity(model, x, sigma, cond | {"guidance": torch.full_like(sigma, scale)})

    def grid(self, steps: int) -> Any:
        return torch.linspace(1, 0, steps + 1)[:-1].tolist()
