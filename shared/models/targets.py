"""Which modules of a model get adapters: by names alone, so that the controller can say so before anything loads."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from shared.config.sections import Lora


def matches(name: str, targets: Sequence[str], prefix: str = "") -> bool:
    """Whether a module's name ends in one of the targets, as whole dotted segments, and lies below the prefix."""
    prefix = prefix.strip(".")
    if prefix and not name.startswith(f"{prefix}."):
        return False
    return any(name == target or name.endswith(f".{target}") for target in targets)


def chosen(linear: Sequence[str], section: Lora) -> list[str]:
    """The linear modules that get adapters, in the model's order. ValueError names a target that fits none."""
    heads = ("lm_head", "embed_out", "output")
    if section.targets == "all-linear":
        found = [name for name in linear if name.rpartition(".")[2] not in heads and matches(name, [name], section.prefix)]
    else:
        for target in section.targets:
            if not any(matches(name, [target], section.prefix) for name in linear):
                known = sorted({name.rpartition(".")[2] for name in linear})
                raise ValueError(f"no linear module is named {target!r}: there are {', '.join(known)}")
        found = [name for name in linear if matches(name, section.targets, section.prefix)]
    if not found:
        raise ValueError(f"no linear module lies below {section.prefix!r}")
    return found


def linear_modules(folder: Path, deep: int = 8) -> list[str]:
    """Names of a model folder's matrices but its embeddings, from the headers of its safetensors files; empty without any.

    ValueError for files that are none.
    """
    found: list[str] = []
    adapter = folder / "adapter_config.json"
    if adapter.exists():  # a version that holds an adapter alone: its base says what there is
        base = (
            Path(json.loads(adapter.read_text())["base_model_name_or_path"])
            if deep and (folder / "COMPLETE").exists()
            else None
        )
        return [] if base is None else linear_modules(base, deep - 1)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, 1 << 28)))
            if not isinstance(header, dict):
                raise ValueError(f"{path.name} is no safetensors file")
        for name, entry in header.items():
            if name != "__metadata__" and name.endswith(".weight") and len(entry["shape"]) == 2 and "embed" not in name:
                found.append(name.removesuffix(".weight"))
    return found
