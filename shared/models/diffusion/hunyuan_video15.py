"""HunyuanVideo 1.5, text to video: a second encoder for quoted text, and empty channels where an image would stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from shared.models.diffusion.family import Conditions, Family, video_shape

IMAGE_TOKENS = 729


class HunyuanVideo15(Family):
    pipeline = "HunyuanVideo15Pipeline"
    video = True

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        text, mask, glyph, glyph_mask = pipe.encode_prompt(prompts, batch_size=len(prompts))
        return {"text": text, "mask": mask, "glyph": glyph, "glyph_mask": glyph_mask}

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return video_shape(pipe, pipe.num_channels_latents, height, width, frames)

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        no_image = x.new_zeros(len(x), IMAGE_TOKENS, model.config.image_embed_dim)
        found: Tensor = model(
            hidden_states=torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], 1),
            timestep=(sigma * 1000).to(x.dtype),  # the model asks for one dtype, as the pipeline gives it
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            encoder_hidden_states_2=cond["glyph"],
            encoder_attention_mask_2=cond["glyph_mask"],
            image_embeds=no_image,
            return_dict=False,
        )[0]
        return found

    def grid(self, steps: int) -> Any:
        return torch.linspace(1, 0, steps + 1)[:-1].tolist()

    def clean(self, pipe: Any, pixels: Tensor) -> Tensor:
        return torch.cat([super(HunyuanVideo15, self).clean(pipe, pixels[i : i + 1]) for i in range(len(pixels))])

    def decode(self, pipe: Any, x: Tensor) -> Tensor:
        """One by one: the VAE's mask allows no more."""
        return torch.cat([super(HunyuanVideo15, self).decode(pipe, x[i : i + 1]) for i in range(len(x))])
