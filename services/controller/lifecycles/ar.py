"""ar: rollout → reward → advantage → train → publish. Text from one autoregressive track."""

from __future__ import annotations

from typing import Literal

from services.controller.lifecycles.common import check_components, rolled_out
from services.controller.lifecycles.state import Branch, Plan
from shared.config.problems import bad
from shared.config.sections import RolloutRecipe


class Recipe(RolloutRecipe):
    domain: Literal["ar"]


def plan(recipe: RolloutRecipe) -> Plan:
    """BadInput if sections contradict each other or would deadlock."""
    check_components(recipe)
    if recipe.schedule.max_staleness:
        raise bad("schedule.max_staleness", recipe.schedule.max_staleness, "ar is synchronous", "0, or domain async_ar")
    return text_plan(recipe, "exactly")


def text_plan(recipe: RolloutRecipe, need: Literal["exactly", "at_least"]) -> Plan:
    return rolled_out(
        recipe,
        branches=(Branch(track="policy", n=recipe.rollout.group_size),),
        route=("rollout.policy", "reward"),
        tracks=("policy",),
        slice=recipe.rollout.slice,
        reward=recipe.reward,
        schedule=recipe.schedule,
        suites=recipe.eval,
        need=need,
    )
