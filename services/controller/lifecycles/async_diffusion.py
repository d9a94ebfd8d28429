"""async_diffusion: diffusion with a staleness budget."""

from __future__ import annotations

from typing import Literal

from services.controller.lifecycles.diffusion import DiffusionRecipe, media_plan
from services.controller.lifecycles.state import Plan
from shared.config.problems import bad
from shared.config.sections import Schedule


class Recipe(DiffusionRecipe):
    domain: Literal["async_diffusion"]
    schedule: Schedule = Schedule(max_staleness=1)


def plan(recipe: DiffusionRecipe) -> Plan:
    window = recipe.rollout.sampling.sde_window
    if window is not None and window.strategy != "all":
        why = "groups that run ahead may be trained in another batch, and all rows of a batch share the steps that draw"
        raise bad("rollout.sampling.sde_window", window.strategy, why, "sde_indices, or domain diffusion")
    return media_plan(recipe, "at_least")
