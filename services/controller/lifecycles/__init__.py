"""The domains: each file holds a recipe model and the plan that follows from it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from services.controller.lifecycles import (
    agentic,
    ar,
    async_ar,
    async_diffusion,
    diffusion,
    pe,
    sft,
    unified_model,
)
from services.controller.lifecycles.state import Plan
from shared.config.problems import bad, unknown, validated

DOMAINS: dict[str, ModuleType] = {
    "agentic": agentic,
    "ar": ar,
    "async_ar": async_ar,
    "async_diffusion": async_diffusion,
    "diffusion": diffusion,
    "pe": pe,
    "sft": sft,
    "unified_model": unified_model,
}
RUNNABLE = ("ar", "async_ar", "async_diffusion", "diffusion", "sft")
"""Domains whose engines and losses exist."""


def parse(document: Any) -> tuple[Any, Plan]:
    """The validated recipe and its plan. BadInput lists every problem."""
    if not isinstance(document, dict):
        raise bad("document", type(document).__name__, "a recipe is a mapping")
    domain = document.get("domain")
    if domain not in DOMAINS:
        raise unknown("domain", str(domain), DOMAINS, "unknown domain")
    module = DOMAINS[domain]
    recipe = validated(sft.recipe_of(document) if domain == "sft" else module.Recipe, document)
    return recipe, module.plan(recipe)
