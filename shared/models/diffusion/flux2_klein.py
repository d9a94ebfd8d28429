"""FLUX.2 klein: latents normalized by the VAE's own batch norm, position ids for text and image, no embedded guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from shared.models.diffusion.family import Conditions, Family, mode
from shared.sde.sigmas import flux2_klein_mu


class Flux2Klein(Family):
    pipeline = "Flux2KleinPipeline"

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        return {"text": pipe.encode_prompt(prompts)[0]}

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        cell = pipe.vae_scale_factor * 2
        return (pipe.transformer.config.in_channels, height // cell, width // cell)

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        from diffusers import Flux2KleinPipeline

        tokens: Tensor = model(
            hidden_states=x.flatten(2).transpose(1, 2),
            timestep=sigma,
            encoder_hidden_states=cond["text"],
            txt_ids=Flux2KleinPipeline._prepare_text_ids(cond["text"]).to(x.device),
            img_ids=Flux2KleinPipeline._prepare_latent_ids(x).to(x.device),
            guidance=None,
            return_dict=False,
        )[0]
        return tokens.transpose(1, 2).reshape(x.shape)

    def mu(self, pipe: Any, shape: tuple[int, ...], steps: int) -> float:
        return flux2_klein_mu(shape[-1] * shape[-2], steps)

    def clean(self, pipe: Any, pixels: Tensor) -> Tensor:
        norm, found = pipe.vae.bn, pipe._patchify_latents(mode(pipe, pixels))
        std = (norm.running_var + pipe.vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
        cleaned: Tensor = (found - norm.running_mean.view(1, -1, 1, 1).to(found)) / std.to(found)
        return cleaned

    def decode(self, pipe: Any, x: Tensor) -> Tensor:
        norm = pipe.vae.bn
        std = (norm.running_var + pipe.vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
        found: Tensor = pipe._unpatchify_latents(x * std.to(x) + norm.running_mean.view(1, -1, 1, 1).to(x))
        pixels: Tensor = pipe.vae.decode(found, return_dict=False)[0]
        return pixels
