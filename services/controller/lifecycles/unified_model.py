"""unified_model: an AR Part, then an image Part from one backbone; one optimizer step for both losses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.controller.lifecycles.common import check_scorers, rolled_out
from services.controller.lifecycles.diffusion import MediaSampling
from services.controller.lifecycles.state import Branch, Plan
from shared.config import sections
from shared.config.sections import Algorithm, Component, Reward, Sampling, Schedule, Section, Suites


class Rollout(Section):
    engine: Component
    group_size: int
    images: int = 1
    slice: int | None = 1
    text: Sampling
    image: MediaSampling


class Algorithms(Section):
    text: Algorithm
    image: Algorithm


class Recipe(sections.Recipe):
    domain: Literal["unified_model"]
    rollout: Rollout
    reward: Reward
    algorithm: Algorithms
    schedule: Schedule = Schedule()
    eval: Suites = Field({})


def plan(recipe: Recipe) -> Plan:
    check_scorers(recipe.reward)
    return rolled_out(
        recipe,
        branches=(
            Branch(track="policy", n=recipe.rollout.group_size),
            Branch(track="policy", n=recipe.rollout.images, media=True),
        ),
        route=("rollout.policy", "reward"),
        tracks=("policy",),
        slice=recipe.rollout.slice,
        reward=recipe.reward,
        schedule=recipe.schedule,
        suites=recipe.eval,
    )
