"""What differs between diffusers' flow-matching models, behind one face: `x_t = (1 - sigma) x0 + sigma noise` and
`velocity = noise - x0`.

Signs, time scales, packing and position ids stay inside a family. Latents are kept unpacked, so sampling, replay and losses
need no family code, and a mean over latent elements means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

Conditions = dict[str, Tensor]
"""Encoded inputs by name, batch first: ready to be concatenated, and for the wire."""


NEGATIVE = "negative."
"""Beginning of the names of a negative prompt's conditions, where both stand in one place."""


class Family:
    """Defaults are those of most families. `pipe` is a diffusers pipeline, `model` the trained part of it alone."""

    pipeline: ClassVar[str]
    """Name of its class in diffusers."""
    unguided: ClassVar[float] = 1.0
    """The guidance scale that is none."""
    cell: ClassVar[int] = 16
    """Height and width in pixels must be multiples of it, in the checkpoints that people have."""
    video: ClassVar[bool] = False
    """Frames are 4 k + 1."""
    trained: ClassVar[tuple[str, ...]] = ("transformer",)
    """Parts of the pipeline that are trained, by their names."""

    pictured: ClassVar[bool] = False
    """A prompt is a text and a picture, the reference: image to image, image to video."""
    of_reference: ClassVar[tuple[str, ...]] = ()
    """Conditions that are made of the reference alone: guidance leads away from the text, and keeps them."""

    ragged: ClassVar[tuple[str, ...]] = ()
    """Conditions [rows, tokens, …] that a mask or a length covers: where texts of different lengths meet, zeros fill up."""

    def configure(self, index: Mapping[str, Any]) -> None:
        """Takes what a folder's model_index.json says of the pipeline beside its parts."""

    def stacked(self, conditions: Sequence[Conditions], device: torch.device) -> Conditions:
        """Rows under each other. ValueError for texts of different lengths in a family that would attend to the padding."""
        found = {}
        for name in conditions[0]:
            values = [cond[name] for cond in conditions]
            if name in self.ragged:
                most = max(value.shape[1] for value in values)
                values = [_longer(value, most) for value in values]
            shapes = {tuple(value.shape[1:]) for value in values}
            if len(shapes) > 1:
                raise ValueError(
                    f"condition {name!r} differs in shape: {shapes}; {type(self).__name__} has texts of one length"
                )
            found[name] = torch.cat(values).to(device)
        return found

    def cell_of(self, pipe: Any) -> int:
        """Of this pipeline: VAEs and patches may be smaller."""
        return self.cell

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        """Rows in the order of the prompts. Call it without gradients.

        Args:
            pictures: the prompts' references in families that take one, at the size of what is made.
            frames: of the video that is made.
        """
        raise NotImplementedError

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        """[B, *latent] at sigma [B], in x's dtype; one forward pass."""
        raise NotImplementedError

    def model(self, pipe: Any) -> Any:
        """What is trained."""
        return self.joined({name: getattr(pipe, name) for name in self.trained})

    def joined(self, parts: Mapping[str, Any]) -> Any:
        """The trained parts as one module."""
        [found] = parts.values()
        return found

    def parts(self, model: Any) -> dict[str, Any]:
        """The trained parts by their names: what `joined` has made one of."""
        [name] = self.trained
        return {name: model}

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Without the batch."""
        scale = pipe.vae_scale_factor
        return (pipe.transformer.config.in_channels, height // scale, width // scale)

    def guided(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance of two velocities."""
        return uncond + scale * (cond - uncond)

    def guides(self, scale: float, second: float | None = None) -> bool:
        """Whether a guidance scale needs a second forward pass, with the negative prompt, at some step."""
        return max(scale, scale if second is None else second) > self.unguided

    def scale_at(self, sigma: Tensor, scale: float, second: float | None) -> float:
        """The guidance scale of a step; `second`: of the second expert, in families that have two."""
        return scale

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
        """The velocity that is sampled and trained, guidance included. ValueError if guidance lacks the negative conditions."""
        velocity, scale = self.velocity(model, x, sigma, cond), self.scale_at(sigma, scale, second)
        if not self.guides(scale):
            return velocity
        if negative is None:
            raise ValueError(f"guidance_scale {scale}: needs a negative prompt's conditions")
        negative = negative | {name: cond[name] for name in self.of_reference if name in cond}
        return self.guided(velocity, self.velocity(model, x, sigma, negative), scale)

    def sigmas(self, pipe: Any, steps: int, shape: tuple[int, ...]) -> Tensor:
        """The pipeline's own schedule, float32 [steps + 1] down to 0; recipes pin that of shared/sde/sigmas.py by default."""
        given = {"sigmas": self.grid(steps), "mu": self.mu(pipe, shape, steps)}
        pipe.scheduler.set_timesteps(steps, **{k: v for k, v in given.items() if v is not None})
        found: Tensor = pipe.scheduler.sigmas.clone()
        return found

    def grid(self, steps: int) -> Any:
        """What the pipeline gives to its scheduler before the shift; None: the scheduler's own."""
        return np.linspace(1.0, 1 / steps, steps)

    def mu(self, pipe: Any, shape: tuple[int, ...], steps: int) -> float | None:
        """Of the dynamic shift; None for a static one."""
        config = pipe.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return None
        tokens = shape[-1] * shape[-2] // 4
        slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
        return float(config.base_shift + slope * (tokens - config.base_image_seq_len))

    def clean(self, pipe: Any, pixels: Tensor) -> Tensor:
        """The latents of pictures [B, 3, H, W] in -1 … 1: what decode undoes."""
        config = pipe.vae.config
        shift = getattr(config, "shift_factor", None) or 0.0
        found: Tensor = (mode(pipe, pixels.unsqueeze(2) if self.video else pixels) - shift) * config.scaling_factor
        return found

    def decode(self, pipe: Any, x: Tensor) -> Tensor:
        """Pixels of clean latents, about -1 … 1: [B, 3, H, W], of videos [B, 3, F, H, W]."""
        config = pipe.vae.config
        shift = getattr(config, "shift_factor", None) or 0.0
        found: Tensor = pipe.vae.decode(x / config.scaling_factor + shift, return_dict=False)[0]
        return found


def opened(path: str, height: int, width: int) -> Image.Image:
    """A picture in a file, brought to this size. ValueError for a file that is none."""
    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)
            return upright.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no picture that can be read: {error}") from error


def pixels_of(pipe: Any, pictures: Sequence[Image.Image]) -> Tensor:
    """float32 [B, 3, height, width] in -1 … 1, where the VAE is."""
    stacked = np.stack([np.asarray(picture, np.float32) for picture in pictures])
    found: Tensor = torch.from_numpy(stacked).movedim(3, 1) / 127.5 - 1
    return found.to(next(pipe.vae.parameters()).device)


def mode(pipe: Any, pixels: Tensor) -> Tensor:
    """Where the VAE's distribution of latents is densest."""
    found: Tensor = pipe.vae.encode(pixels).latent_dist.mode()
    return found


def normalized(vae: Any, x: Tensor) -> Tensor:
    """The inverse of per_channel."""
    mean, std = _moments(vae, x)
    return (x - mean) / std


def per_channel(vae: Any, x: Tensor) -> Tensor:
    """Undoes the normalization of VAEs with a mean and a std a channel; x [B, C, F, H, W]."""
    mean, std = _moments(vae, x)
    return x * std + mean


def _moments(vae: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1).to(x) for v in (vae.config.latents_mean, vae.config.latents_std))
    return mean, std


def video_shape(pipe: Any, channels: int, height: int, width: int, frames: int) -> tuple[int, ...]:
    """[channels, frames, height, width] of latents."""
    space, time = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
    return (channels, (frames - 1) // time + 1, height // space, width // space)


def _longer(value: Tensor, length: int) -> Tensor:
    """[rows, length, …], filled up with zeros."""
    more = length - value.shape[1]
    return torch.cat([value, value.new_zeros(len(value), more, *value.shape[2:])], 1) if more else value


def full_mask(text: Tensor, mask: Tensor | None) -> Tensor:
    """A pipeline that returns no mask means all ones."""
    return torch.ones(text.shape[:2], dtype=torch.long, device=text.device) if mask is None else mask
