"""The tensors of a checkpoint: optimizer and RNG state in safetensors, what is no tensor as JSON in the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_optimizer(path: Path, state: dict[str, Any]) -> None:
    """Tensors as `{parameter}|{field}`; what is no tensor stands in the file's metadata as JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, fields in state["state"].items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                tensors[f"{name}|{field}"] = value.detach().cpu().contiguous().clone()
            else:
                plain.setdefault(name, {})[field] = value
    save_file(tensors, path, {"groups": json.dumps(state["param_groups"]), "plain": json.dumps(plain)})


def load_optimizer(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    state: dict[str, dict[str, Any]] = json.loads(metadata["plain"])
    for key, value in load_file(path).items():
        name, _, field = key.rpartition("|")
        state.setdefault(name, {})[field] = value
    return {"state": state, "param_groups": json.loads(metadata["groups"])}


def rng_state() -> Tensor:
    return torch.get_rng_state()
