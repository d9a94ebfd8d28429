"""async_ar: ar with a staleness budget. The same path; rollout runs ahead as far as admission lets it."""

from __future__ import annotations

from typing import Literal

from services.controller.lifecycles.ar import text_plan
from services.controller.lifecycles.common import check_components
from services.controller.lifecycles.state import Plan
from shared.config.sections import RolloutRecipe, Schedule


class Recipe(RolloutRecipe):
    domain: Literal["async_ar"]
    schedule: Schedule = Schedule(max_staleness=1)


def plan(recipe: RolloutRecipe) -> Plan:
    check_components(recipe)
    return text_plan(recipe, "at_least")
