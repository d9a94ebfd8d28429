"""sft: records → train, targets built by the trainer. No rollout, reward or advantage; publishes only at the end."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.controller.lifecycles.common import check_algorithm, check_name, check_optimizer, check_placement, check_updates
from services.controller.lifecycles.state import Plan, SuitePlan
from shared.config import specs
from shared.config.problems import bad
from shared.config.sections import Component, LossSuite, MediaModel, Section, SftRecipe


class Recipe(SftRecipe):
    domain: Literal["sft"]


class Size(Section):
    height: int = Field(..., ge=1)
    width: int = Field(..., ge=1)


class MediaRecipe(Recipe):
    """Of a model that makes pictures: records hold a prompt and the path of a picture."""

    model: MediaModel
    picture: Size
    """Pictures are brought to it."""
    algorithm: Component = Component(name="flow_matching")


def recipe_of(document: dict[str, Any]) -> type[Recipe]:
    """The model of a document: one with a family makes pictures."""
    model = document.get("model")
    return MediaRecipe if isinstance(model, dict) and "family" in model else Recipe


def plan(recipe: SftRecipe) -> Plan:
    specs.check("source", recipe.data.source.name, recipe.data.source.params, "data.source")
    media = isinstance(recipe, MediaRecipe)
    check_algorithm(recipe.algorithm, recipe.train.num_updates_per_batch, supervised=True, media=media)
    if isinstance(recipe, MediaRecipe):
        specs.find("family", recipe.model.family, "model.family")
        if recipe.model.family in ("wan22", "wan22_i2v"):
            why = "its two experts have times of their own, and imitation draws a time for each picture"
            raise bad("model.family", recipe.model.family, why, "a family of one model")
        if recipe.train.micro_batch_tokens is not None or recipe.train.replay == "packed":
            raise bad("train.replay", recipe.train.replay, "pictures have no tokens: give train.micro_batch_size", "padded")
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
