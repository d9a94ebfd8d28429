"""agentic: several turns with tools; the terminal reward's trajectory advantage stands on every generated turn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.controller.lifecycles.common import check_scorers, rolled_out
from services.controller.lifecycles.state import Branch, Plan
from shared.config.sections import Component, RolloutRecipe


class Recipe(RolloutRecipe):
    domain: Literal["agentic"]
    environment: Component
    max_turns: int = Field(8, ge=1)


def plan(recipe: Recipe) -> Plan:
    check_scorers(recipe.reward)
    return rolled_out(
        recipe,
        branches=(Branch(track="policy", n=recipe.rollout.group_size),),
        route=("rollout.policy", "reward"),
        tracks=("policy",),
        slice=recipe.rollout.slice,
        trajectories=True,
        reward=recipe.reward,
        schedule=recipe.schedule,
        suites=recipe.eval,
    )
