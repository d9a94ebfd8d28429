"""Engines by name. Each is imported only in a child that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.rollout.engines.base import Engine


def transformers(recipe: dict[str, Any], files: Any, weights: Any, params: Any) -> Engine:
    from services.rollout.engines.transformers_engine import TransformersEngine
    from shared.config.sections import Model
    from shared.models import lora
    from shared.models.ar.bundle import load, placed

    model = Model.model_validate(recipe["model"])
    bundle = load(files, weights, model.dtype, model.attention)
    if model.lora is not None:
        lora.inject(bundle.model, model.lora)
    return TransformersEngine(placed(bundle), params, recipe["schedule"].get("interrupt") == "keep")


def diffusers(recipe: dict[str, Any], files: Any, weights: Any, params: Any) -> Engine:
    from services.rollout.engines.diffusers_engine import DiffusersEngine
    from shared.config.sections import MediaModel
    from shared.models import lora
    from shared.models.ar.bundle import placed
    from shared.models.diffusion import family
    from shared.models.diffusion.bundle import DiffusionBundle, load_pipeline, load_version

    model = MediaModel.model_validate(recipe["model"])
    own = family(model.family)
    pipe = load_pipeline(files)
    own.configure(pipe.config)
    if weights is not None:
        load_version(own.model(pipe), weights)
    if model.lora is not None:
        lora.inject(own.model(pipe), model.lora)
    bundle = placed(DiffusionBundle(own.model(pipe), own))
    pipe.to(next(bundle.model.parameters()).device)
    return DiffusersEngine(own, pipe, params)


ENGINES: dict[str, Callable[[dict[str, Any], Any, Any, Any], Engine]] = {"transformers": transformers, "diffusers": diffusers}
