"""Checkpoints: one cut of model, optimizer, RNG, log position and the controller's state; the marker is written last.

Only safetensors, JSON and MessagePack: loading one runs no code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

COMPLETE = "COMPLETE"
STATE_FILE = "controller.msgpack"


@dataclass(frozen=True)
class Position:
    """Where in the log and in training a checkpoint stands."""

    incarnation: int
    seq: int
    """The last record applied."""
    entry_id: str
    versions: dict[str, int]


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest (incarnation, seq)."""
    found = [p.parent for p in folder.glob(f"*/{COMPLETE}")]
    return max(found, key=lambda p: tuple(map(int, p.name.split("-"))), default=None)


@contextmanager
def writing(folder: Path, position: Position) -> Iterator[Path]:
    """A temporary folder that becomes the checkpoint, complete, when the block ends well."""
    target = folder / f"{position.incarnation}-{position.seq}"
    temporary = folder / f".{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    (temporary / "position.json").write_text(json.dumps(asdict(position)))
    for path in temporary.iterdir():
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    (target / COMPLETE).touch()
    _sync(target / COMPLETE)
    _sync(folder)


def read_position(folder: Path) -> Position:
    return Position(**json.loads((folder / "position.json").read_text()))


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints."""
    found = sorted((p.parent for p in folder.glob(f"*/{COMPLETE}")), key=lambda p: tuple(map(int, p.name.split("-"))))
    for old in found[:-keep]:
        (old / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
