"""pe (prompt enhancement): rewrites, then images of each; image rewards propagate to the rewrites; both tracks train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.controller.lifecycles.common import check_scorers, rolled_out
from services.controller.lifecycles.diffusion import MediaSampling
from services.controller.lifecycles.state import Branch, Plan
from shared.config import sections
from shared.config.sections import Algorithm, Component, Model, Reward, Sampling, Schedule, Section, Suites


class Rewrites(Section):
    engine: Component = Component(name="transformers")
    n: int
    sampling: Sampling


class Images(Section):
    engine: Component = Component(name="diffusers")
    n: int
    sampling: MediaSampling


class Rollout(Section):
    ar: Rewrites
    diffusion: Images
    slice: int | None = None


class Algorithms(Section):
    ar: Algorithm
    diffusion: Algorithm


class Recipe(sections.Recipe):
    domain: Literal["pe"]
    diffusion_model: Model
    rollout: Rollout
    reward: Reward
    algorithm: Algorithms
    schedule: Schedule = Schedule()
    eval: Suites = Field({})


def plan(recipe: Recipe) -> Plan:
    check_scorers(recipe.reward)
    rollout = recipe.rollout
    return rolled_out(
        recipe,
        branches=(
            Branch(track="ar", n=rollout.ar.n),
            Branch(track="diffusion", n=rollout.diffusion.n, media=True),
        ),
        route=("rollout.ar", "rollout.diffusion", "reward"),
        tracks=("ar", "diffusion"),
        slice=rollout.slice,
        reward=recipe.reward,
        schedule=recipe.schedule,
        suites=recipe.eval,
    )
