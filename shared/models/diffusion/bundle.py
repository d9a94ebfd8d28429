"""A denoising model as the trainer holds it: what is trained, and its family. Encoders and VAE stay with the rollouts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shared.models import lora
from shared.models.ar.bundle import where
from shared.models.diffusion.family import Family
from shared.weights.store import COMPLETE

OPTIONAL = {f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")} | {
    "image_encoder",
    "feature_extractor",
}
"""Parts that a pipeline can do without."""


def load_pipeline(folder: Path, parts: Mapping[str, Any] | None = None) -> Any:
    """The whole pipeline of a folder, in float32, for the rollouts. Nothing is fetched, and no code of the folder's runs.

    `parts` are taken as they are in place of the folder's own.
    """
    import diffusers

    index = json.loads((folder / "model_index.json").read_text())
    kind: Any = getattr(diffusers, str(index.get("_class_name")), None)
    if kind is None:
        raise ValueError(
            f"model_index.json names {index.get('_class_name')!r}, which is no pipeline of diffusers {diffusers.__version__}"
        )
    there = {name for name, about in index.items() if about and about != [None, None]}
    absent = (set(inspect.signature(kind.__init__).parameters) & OPTIONAL) - there - set(kind._optional_components)
    given: dict[str, Any] = dict.fromkeys(absent) | dict(parts or {})
    if index.get("processor") == ["transformers", "Qwen2VLProcessor"]:
        from shared.models.diffusion.qwen_processor import load_processor

        given["processor"] = load_processor(folder / "processor")
    pipe = kind.from_pretrained(str(folder), local_files_only=True, **given)
    pipe.set_progress_bar_config(disable=True)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name not in (parts or {}):
            part.eval().requires_grad_(False)
    return pipe


def encoders(folder: Path, bundle: DiffusionBundle) -> Any:
    """The pipeline of a folder around the part that is trained: its encoders and its VAE are on this process's device."""
    parts = bundle.family.parts(bundle.model)
    pipe = load_pipeline(folder, parts)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name not in parts:
            part.to(where())
    return pipe


def load_trained(folder: Path, family: Family, weights: Path | None = None) -> DiffusionBundle:
    """The trained part alone, in float32; with a version's weights in place of the folder's own."""
    import diffusers

    kind: Any = diffusers.AutoModel
    family.configure(json.loads((folder / "model_index.json").read_text()))
    parts = {name: kind.from_pretrained(str(folder), subfolder=name, local_files_only=True) for name in family.trained}
    model = family.joined(parts)
    if weights is not None:
        load_version(model, weights)
    return DiffusionBundle(model.eval(), family)


def load_version(model: Any, weights: Path) -> None:
    """The weights of a version's folder, or its adapter added to what it was trained on."""
    tensors = {n: v for path in sorted(weights.glob("*.safetensors")) for n, v in load_file(path).items()}
    if not (weights / lora.CONFIG).exists():
        model.load_state_dict(tensors)
        return
    adapter = lora.read_config(weights)
    if (adapter.base / COMPLETE).exists():
        load_version(model, adapter.base)
    elif not (adapter.base / "model_index.json").exists():  # a pipeline, whose weights the model has
        raise ValueError(f"{weights} is an adapter of {adapter.base}, where no weights are")
    lora.merge_into(model, adapter, tensors)


@dataclass
class DiffusionBundle:
    model: Any
    """The trained part of a diffusers pipeline."""
    family: Family
    tied: frozenset[str] = frozenset()
    """State-dict names that are views of others: there are none."""
