"""Flow-matching families by name: adding one is a file and a row here (docs/add_a_family.md)."""

from __future__ import annotations

from importlib import import_module

from shared.models.diffusion.family import Family

FAMILIES: dict[str, tuple[str, str]] = {
    "sd3": ("sd3", "SD3"),
    "qwen_image": ("qwen_image", "QwenImage"),
    "qwen_image_edit": ("qwen_image", "QwenImageEdit"),
    "flux2_klein": ("flux2_klein", "Flux2Klein"),
    "z_image": ("z_image", "ZImage"),
    "wan21": ("wan", "Wan21"),
    "wan22": ("wan", "Wan22"),
    "wan21_i2v": ("wan", "Wan21I2V"),
    "wan22_i2v": ("wan", "Wan22I2V"),
    "hunyuan_video": ("hunyuan_video", "HunyuanVideo"),
    "hunyuan_video15": ("hunyuan_video15", "HunyuanVideo15"),
}
"""Name → module of this package and class."""


def family(name: str) -> Family:
    """ValueError for a name that is not there."""
    if name not in FAMILIES:
        raise ValueError(f"family {name!r}: legal are {', '.join(FAMILIES)}")
    module, kind = FAMILIES[name]
    found: Family = getattr(import_module(f"{__name__}.{module}"), kind)()
    return found
