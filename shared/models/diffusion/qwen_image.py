"""Qwen-Image and Qwen-Image-Edit: 2 x 2 patches as tokens, masked text, guidance that keeps the norm of the conditional
velocity. The picture to edit is seen twice: by the text encoder, and as latents behind those that are denoised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from shared.models.diffusion.family import Conditions, Family, full_mask, mode, normalized, per_channel, pixels_of


class QwenImage(Family):
    pipeline = "QwenImagePipeline"

    ragged = ("text", "mask")

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        text, mask = pipe.encode_prompt(prompts)
        return {"text": text, "mask": full_mask(text, mask)}

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        cell = pipe.vae_scale_factor * 2
        return (pipe.transformer.config.in_channels // 4, 2 * (height // cell), 2 * (width // cell))

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        mask, tokens = cond["mask"], patches(x)
        shapes = [(1, x.shape[2] // 2, x.shape[3] // 2)]
        if (reference := cond.get("reference")) is not None:
            tokens = torch.cat([tokens, patches(reference.to(x))], 1)
            shapes.append((1, reference.shape[2] // 2, reference.shape[3] // 2))
        found = model(
            hidden_states=tokens,
            timestep=sigma,
            encoder_hidden_states=cond["text"],
            encoder_hidden_states_mask=None if bool(mask.all()) else mask,
            img_shapes=[shapes] * len(x),
            return_dict=False,
        )[0]
        return unpatched(found[:, : x.shape[2] * x.shape[3] // 4], x)

    def guided(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """Rescaled to the conditional's norm, token by token."""
        plain = super().guided(cond, uncond, scale)
        return plain * (_patch_norm(cond) / _patch_norm(plain))

    def clean(self, pipe: Any, pixels: Tensor) -> Tensor:
        found: Tensor = normalized(pipe.vae, mode(pipe, pixels.unsqueeze(2)))[:, :, 0]
        return found

    def decode(self, pipe: Any, x: Tensor) -> Tensor:
        found: Tensor = pipe.vae.decode(per_channel(pipe.vae, x.unsqueeze(2)), return_dict=False)[0]
        return found[:, :, 0]


class QwenImageEdit(QwenImage):
    pipeline = "QwenImageEditPipeline"
    pictured = True
    of_reference = ("reference",)

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        text, mask = pipe.encode_prompt(prompts, image=list(pictures))
        return {"text": text, "mask": full_mask(text, mask), "reference": self.clean(pipe, pixels_of(pipe, pictures))}


def patches(x: Tensor) -> Tensor:
    """[B, C, H, W] as tokens [B, H W / 4, 4 C], each channel's patch in a row."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def unpatched(tokens: Tensor, like: Tensor) -> Tensor:
    """The inverse of patches, shaped as `like`."""
    b, c, h, w = like.shape
    return tokens.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)


def _patch_norm(v: Tensor) -> Tensor:
    """Over channels and each 2 x 2 patch, spread out again: [B, 1, H, W]."""
    square = v.square().sum(1, keepdim=True)
    b, _, h, w = square.shape
    norm = square.view(b, 1, h // 2, 2, w // 2, 2).sum((3, 5)).sqrt()
    return norm.repeat_interleave(2, 2).repeat_interleave(2, 3)
