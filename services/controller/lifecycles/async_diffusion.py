"""async_diffusion: diffusion with a staleness budget."""

from __future__ import annotations

from typing import Literal

from services.controller.lifecycles.diffusion import DiffusionRecipe, media_plan
from services.controller.lifecycles.state import Plan
from shared.config.sections import Schedule


class Recipe(DiffusionRecipe):
    domain: Literal["async_diffusion"]
    schedule: Schedule = Schedule(max_staleness=1)


def plan(recipe: DiffusionRecipe) -> Plan:
    return media_plan(recipe, "at_least")
