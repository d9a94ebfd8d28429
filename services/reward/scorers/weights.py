"""Weights of scorers that are models: what lies below the configured roots. Nothing is fetched, nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.config.problems import bad
from shared.config.settings import from_environment

WIDTHS = (1024, 128, 64, 16, 1)


def device() -> torch.device:
    """Where models compute: on a device where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_folder(path: str, download: str) -> Path:
    """BadInput unless it is a folder below a configured root; it says what to download."""
    folder = from_environment().allowed(path, "path")
    if not folder.is_dir():
        raise bad("path", path, "no folder", f"a folder with the files of {download}")
    return folder


def open_tensors(path: str, field: str, legal: str) -> dict[str, Tensor]:
    """Of a safetensors file. BadInput for another one."""
    place = from_environment().allowed(path, field)
    try:
        found: dict[str, Tensor] = load_file(place)
        return found
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise bad(field, path, str(error).partition("\n")[0], legal) from error


def rating_head(width: int) -> nn.Sequential:
    """The linear layers that rate an embedding, numbered as in the published files (of LAION's predictor and ImageReward)."""
    layers: list[nn.Module] = []
    for size in WIDTHS:
        layers += [nn.Linear(width, size), *([nn.Dropout(0.0)] if size > 16 else [])]
        width = size
    return nn.Sequential(*layers)
