"""sft: records → train, targets built by the trainer. No rollout, reward or advantage; publishes only at the end."""

from __future__ import annotations

from typing import Literal

from services.controller.lifecycles.common import check_algorithm, check_optimizer, check_placement, check_updates
from services.controller.lifecycles.state import Plan
from shared.config import specs
from shared.config.sections import SftRecipe


class Recipe(SftRecipe):
    domain: Literal["sft"]


def plan(recipe: SftRecipe) -> Plan:
    specs.check("source", recipe.data.source.name, recipe.data.source.params, "data.source")
    check_algorithm(recipe.algorithm, recipe.train.num_updates_per_batch, supervised=True)
    check_updates(recipe, recipe.data.batch_size)
    check_optimizer(recipe)
    check_placement(recipe)
    return Plan(
        domain="sft",
        steps=recipe.steps,
        batch_size=recipe.data.batch_size,
        branches=(),
        route=(),
        tracks=("policy",),
        updates_per_batch=recipe.train.num_updates_per_batch,
        max_inflight=2 * recipe.data.batch_size,  # the next batch is read while one trains
        publish_at_end_only=True,
        advantages=False,
        log_budget=int(recipe.train.log_budget_mb * 2**20),
        checkpoint_every=recipe.train.checkpoint_every,
        previews=recipe.logging.previews,
    )
