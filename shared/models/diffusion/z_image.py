"""Z-Image: ragged texts, time that runs the other way, and an output of the other sign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.models.diffusion.family import Conditions, Family


class ZImage(Family):
    pipeline = "ZImagePipeline"

    unguided = 0.0
    ragged = ("text",)

    def encode(self, pipe: Any, prompts: list[str], pictures: Sequence[Image.Image] = (), frames: int = 1) -> Conditions:
        texts, _ = pipe.encode_prompt(list(prompts), do_classifier_free_guidance=False)  # it edits the list that it is given
        return ragged(texts)

    def latent_shape(self, pipe: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        cell = pipe.vae_scale_factor * 2
        return (pipe.transformer.in_channels, 2 * (height // cell), 2 * (width // cell))

    def velocity(self, model: Any, x: Tensor, sigma: Tensor, cond: Conditions) -> Tensor:
        texts = [text[:length] for text, length in zip(cond["text"], cond["length"].tolist(), strict=True)]
        found = model(list(x.unsqueeze(2)), 1 - sigma, texts, return_dict=False)[0]
        return -torch.stack(found).squeeze(2)

    def guided(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """Its scale is one less than elsewhere."""
        return cond + scale * (cond - uncond)


def ragged(texts: list[Tensor]) -> Conditions:
    lengths = torch.tensor([len(text) for text in texts], device=texts[0].device)
    return {"text": pad_sequence(texts, batch_first=True), "length": lengths}
