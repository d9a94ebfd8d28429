"""Engines by name, each imported only in a child that runs it: one of rollouts, or (LIVE) a trainer that samples by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.engines.base import Engine
from shared.engines.batching import BatchingEngine


def transformers(recipe: dict[str, Any], files: Any, weights: Any, params: Any) -> Engine:
    from shared.config.sections import Model
    from shared.engines.transformers_engine import TransformersEngine
    from shared.models import lora
    from shared.models.ar.bundle import load, placed

    model = Model.model_validate(recipe["model"])
    bundle = load(files, weights, model.dtype, model.attention)
    if model.lora is not None:
        lora.inject(bundle.model, model.lora)
    return TransformersEngine(placed(bundle), params, recipe["schedule"].get("interrupt") == "keep")


def diffusers(recipe: dict[str, Any], files: Any, weights: Any, params: Any) -> Engine:
    from shared.config.sections import MediaModel
    from shared.engines.diffusers_engine import DiffusersEngine
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


def live_transformers(files: Any, params: Any, bundle: Any) -> BatchingEngine:
    from shared.engines.transformers_engine import TransformersEngine

    return TransformersEngine(bundle, params, threaded=False)


def live_diffusers(files: Any, params: Any, bundle: Any) -> BatchingEngine:
    from shared.engines.diffusers_engine import DiffusersEngine
    from shared.models.diffusion.bundle import encoders

    return DiffusersEngine(bundle.family, encoders(files, bundle), params, bundle.model)


LIVE: dict[str, Callable[[Any, Any, Any], BatchingEngine]] = {"transformers": live_transformers, "diffusers": live_diffusers}
"""Of the bundle that is being trained: they compute in the caller's thread, with the weights as they are."""
