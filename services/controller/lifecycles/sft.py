"""sft: records → train, targets built by the trainer. No rollout, reward or advantage; publishes only at the end."""

from __future__ import annotations

from typing import Literal

from services.controller.lifecycles.common import check_algorithm, check_name, check_optimizer, check_placement, check_updates
from services.controller.lifecycles.state import Plan, SuitePlan
from shared.config import specs
from shared.config.sections import LossSuite, SftRecipe


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
        suites={name: _suite(name, suite) for name, suite in recipe.eval.items()},
    )


def _suite(name: str, suite: LossSuite) -> SuitePlan:
    """BadInput for a name that cannot be, or a source that is none. Its size may be known only when the source is open."""
    check_name(f"eval.{name}", name)
    specs.check("source", suite.source.name, suite.source.params, f"eval.{name}.source")
    return SuitePlan(at=suite.at, every=suite.every, size=suite.size or 0, batch_size=suite.batch_size)
