"""Wan 2.1 and 2.2, text or a first frame to video. 2.2 has two experts: one for high noise, one for low."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from shared.models.diffusion.family import Conditions, Family, mode, normalized, per_channel, pixels_of, video_shape

TEXT_TOKENS = 512
"""Padding is attended: texts keep this length."""


class Wan21(Family):
    pipeline = "WanPipeline"
    video = True

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        text, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)
        return {"text": text}

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return video_shape(pipe, pipe.transformer.config.in_channels, height, width, frames)

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        seen: dict[str, Any] = {"encoder_hidden_states_image": cond["seen"]} if "seen" in cond else {}
        if (first := cond.get("first_frame")) is not None:
            x = torch.cat([x, first.to(x)], 1)
        text = cond["text"]
        found: Tensor = model(hidden_states=x, timestep=sigma * 1000, encoder_hidden_states=text, **seen, return_dict=False)[0]
        return found

    def grid(self, steps: int) -> None:
        """The scheduler's own."""

    def clean(self, pipe: Any, pixels: Tensor) -> Tensor:
        return normalized(pipe.vae, mode(pipe, pixels.unsqueeze(2)))

    def decode(self, pipe: Any, x: Tensor) -> Tensor:
        found: Tensor = pipe.vae.decode(per_channel(pipe.vae, x), return_dict=False)[0]
        return found


class Wan22(Wan21):
    """All rows of a forward pass, and under FSDP all ranks, must be on the same side of the boundary: one expert computes."""

    trained = ("transformer", "transformer_2")

    def __init__(self, boundary: float = 0.875) -> None:
        """`boundary`: the sigma from which on the expert for high noise computes, where the folder says nothing else."""
        self.boundary = boundary

    def configure(self, index: Mapping[str, Any]) -> None:
        self.boundary = float(index.get("boundary_ratio") or self.boundary)

    def joined(self, parts: Mapping[str, Any]) -> Any:
        return Experts({"high": parts["transformer"], "low": parts["transformer_2"]})

    def parts(self, model: Any) -> dict[str, Any]:
        return {"transformer": model["high"], "transformer_2": model["low"]}

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        return super().velocity(functools.partial(model, "high" if self._high(sigma) else "low"), x, sigma, cond)

    def scale_at(self, sigma: Tensor, scale: float, second: float | None) -> float:
        return scale if second is None or self._high(sigma) else second

    def _high(self, sigma: Tensor) -> bool:
        """Whether the expert for high noise computes."""
        high = sigma >= self.boundary
        if bool(high.any()) != bool(high.all()):
            raise ValueError(f"sigmas {sigma.tolist()} lie on both sides of the experts' boundary {self.boundary}")
        return bool(high[0])


class Wan21I2V(Wan21):
    """The video begins with the reference: its latents, and a mask of the frames that are given, are channels of the input; in
    2.1 the text's attention also sees CLIP's tokens of it.
    """

    pipeline = "WanImageToVideoPipeline"
    pictured = True
    of_reference = ("first_frame", "seen")

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        return super().encode(pipe, prompts) | self.seen(pipe, pictures, frames)

    def seen(self, pipe: Any, pictures: Sequence[Image.Image], frames: int) -> Conditions:
        """Of the references alone."""
        first = pixels_of(pipe, pictures).unsqueeze(2)
        rest = first.new_zeros(*first.shape[:2], frames - 1, *first.shape[3:])
        latents = normalized(pipe.vae, mode(pipe, torch.cat([first, rest], 2)))
        mask = latents.new_zeros(len(latents), pipe.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        found = {"first_frame": torch.cat([mask, latents], 1)}
        if pipe.transformer.config.image_dim is not None:
            found["seen"] = pipe.encode_image(list(pictures))
        return found

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return video_shape(pipe, pipe.vae.config.z_dim, height, width, frames)


class Wan22I2V(Wan21I2V, Wan22):
    def __init__(self, boundary: float = 0.9) -> None:
        super().__init__(boundary)


class Experts(torch.nn.ModuleDict):
    """Models of one kind, by name. A forward pass is of one of them and enters here: FSDP gathers what is in no block."""

    def forward(self, expert: str, **given: Any) -> Any:
        return self[expert](**given)

    @property
    def _no_split_modules(self) -> list[str]:
        parts: list[Any] = list(self.values())
        return [name for part in parts for name in part._no_split_modules or ()]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def save_pretrained(self, folder: Path) -> None:
        """Beside each other as diffusers' variants: `from_pretrained(folder, variant="high")`."""
        parts: dict[str, Any] = dict(self.items())
        for name, part in parts.items():
            part.save_pretrained(folder, variant=name)
