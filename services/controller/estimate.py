"""What a recipe will cost, before anything starts: updates, tokens, bytes, memory. Estimates say how they were made."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from services.controller.jobs import Job, measured
from services.controller.models import adapted
from shared.config.sections import MediaModel
from shared.weights.locate import ModelFiles

BYTES_A_TOKEN = 12
"""Token id (int32), log-prob (float32), about four characters of text."""
BYTES_A_PARAMETER = 16
"""Trainer: fp32 master weights and gradients, two fp32 moments of AdamW."""


def estimate(job: Job) -> dict[str, Any]:
    """Figures of the derived plan. Tokens are at most; memory leaves out activations."""
    plan, recipe = job.doc.plan, job.recipe
    rows = plan.batch_size * plan.group_size
    updates, total = recipe.train.num_updates_per_batch, recipe.train.updates(plan.steps)
    found: dict[str, Any] = {
        "updates_per_batch": updates,
        "total_updates": total,
        "samples_per_step": rows,
        "total_samples": rows * plan.steps,
        "epochs": None if job.train.order.length is None else round(plan.steps * plan.batch_size / job.train.order.length, 3),
    }
    media = isinstance(recipe.model, MediaModel)
    prompt = [] if media else measured(job.train, bool(plan.route))
    figures = {"mean": round(sum(prompt) / len(prompt), 1), "max": max(prompt)} if prompt else None
    found["prompt_tokens" if plan.route else "example_tokens"] = figures
    if plan.route and prompt:
        completion = plan.group_size * recipe.rollout.sampling.max_new_tokens
        tokens = max(prompt) + completion
        found["tokens_per_group"] = tokens
        found["tokens_per_step"] = tokens * plan.batch_size
        found["bytes_per_group"] = tokens * BYTES_A_TOKEN
        found["log_bytes_per_step"] = tokens * BYTES_A_TOKEN * plan.batch_size
    files = ModelFiles.of(job.doc.files, job.doc.weights)
    if recipe.model.lora is not None:
        found["adapted_modules"] = adapted(recipe.model, files)
    place = files.weights or files.files
    count = parameters(place / "transformer" if media and not job.doc.weights else place)
    if count is not None:
        width = {"float64": 8, "float32": 4, "bfloat16": 4}[recipe.model.dtype]
        found["parameters"] = count
        found["memory_bytes"] = {
            "trainer_per_rank": _per_rank(count, recipe),
            "rollout": count * width,
            "version": count * width,
        }
    return found


def _per_rank(count: int, recipe: Any) -> int:
    """Gradients that are added up over ranks at the end of an update are whole until then."""
    ranks, place = recipe.placement.trainer_ranks, recipe.placement
    whole = ranks > 1 and recipe.train.gradient_sync == "last" and not place.cpu_offload
    return int(count * (BYTES_A_PARAMETER - 4) // ranks + count * 4 if whole else count * BYTES_A_PARAMETER // ranks)


def parameters(folder: Path) -> int | None:
    """Of the safetensors files in a folder, by their headers; None if there are none. Tied weights stand once."""
    count = 0
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                product = 1
                for side in entry["shape"]:
                    product *= side
                count += product
    return count if files else None
