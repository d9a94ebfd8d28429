"""Families of denoising models as recipes name them: what the controller checks without torch, one row each."""

from __future__ import annotations

from typing import Any

from shared.config.algorithms import Params

UNGUIDED = {"z_image": 0.0}
"""The guidance scale that is none, where it is not 1."""
FAMILIES: tuple[tuple[str, str, str, bool, bool, tuple[tuple[str, int], ...]], ...] = (
    ("sd3", "Stable Diffusion 3 and 3.5", "StableDiffusion3", False, False, (("tokenizer_3", 256), ("tokenizer", 77))),
    ("qwen_image", "Qwen-Image", "QwenImage", False, False, (("tokenizer", 1024),)),
    ("qwen_image_edit", "Qwen-Image-Edit", "QwenImageEdit", False, True, (("tokenizer", 1024),)),
    ("flux2_klein", "FLUX.2 klein", "Flux2Klein", False, False, (("tokenizer", 496),)),
    ("z_image", "Z-Image", "ZImage", False, False, (("tokenizer", 496),)),
    ("wan21", "Wan 2.1, text to video", "Wan", True, False, (("tokenizer", 512),)),
    ("wan22", "Wan 2.2, text to video, two experts", "Wan", True, False, (("tokenizer", 512),)),
    ("wan21_i2v", "Wan 2.1, first frame to video", "WanImageToVideo", True, True, (("tokenizer", 512),)),
    ("wan22_i2v", "Wan 2.2, first frame to video, two experts", "WanImageToVideo", True, True, (("tokenizer", 512),)),
    ("hunyuan_video", "HunyuanVideo", "HunyuanVideo", True, False, (("tokenizer", 256),)),
    ("hunyuan_video15", "HunyuanVideo 1.5, text to video", "HunyuanVideo15", True, False, (("tokenizer", 1000),)),
)
"""Name, model, its pipeline's class in diffusers, whether it makes videos, whether a prompt is a text and a picture, and the
tokens of a prompt that its encoder reads for certain (512 less its chat template for some), by the folder of the tokenizer, of
which the first that is there counts."""
CELL = 16
"""Pixels of which height and width are multiples, in the checkpoints that people have."""


def _family(
    name: str, about: str, pipeline: str, video: bool, pictured: bool, text: tuple[tuple[str, int], ...]
) -> tuple[Any, str, type[Params], str, dict[str, Any]]:
    own_grid = name == "sd3" or pipeline.startswith("Wan")
    facts = {
        "own_grid": own_grid,
        "unguided": UNGUIDED.get(name, 1.0),
        "pipeline": f"{pipeline}Pipeline",
        "cell": CELL,
        "video": video,
        "experts": 2 if name.startswith("wan22") else 1,
        "pictured": pictured,
        "text": text,
    }
    return "family", name, Params, about, facts


TABLE = tuple(_family(*row) for row in FAMILIES)
