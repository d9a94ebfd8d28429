"""diffusion: rollout → reward → advantage → train → publish. Images or video from one denoising track."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.controller.lifecycles.common import check_scorers, rolled_out
from services.controller.lifecycles.state import Branch, Plan
from shared.config import sections
from shared.config.problems import bad
from shared.config.sections import Algorithm, Component, Reward, Schedule, Section, Suites


class MediaSampling(Section):
    num_inference_steps: int
    height: int
    width: int
    num_frames: int = 1
    guidance_scale: float = 1.0
    eta: float = 0.7
    shift: float = 3.0
    """Static shift of the sigma schedule."""


class MediaRollout(Section):
    engine: Component = Component(name="diffusers")
    group_size: int
    slice: int | None = 1
    sampling: MediaSampling


class DiffusionRecipe(sections.Recipe):
    rollout: MediaRollout
    reward: Reward
    algorithm: Algorithm
    schedule: Schedule = Schedule()
    eval: Suites = Field({})


class Recipe(DiffusionRecipe):
    domain: Literal["diffusion"]


def plan(recipe: DiffusionRecipe) -> Plan:
    check_scorers(recipe.reward)
    if recipe.schedule.max_staleness:
        raise bad("schedule.max_staleness", recipe.schedule.max_staleness, "diffusion is synchronous", "0")
    return media_plan(recipe, "exactly")


def media_plan(recipe: DiffusionRecipe, need: Literal["exactly", "at_least"]) -> Plan:
    return rolled_out(
        recipe,
        branches=(Branch(track="policy", n=recipe.rollout.group_size, media=True),),
        route=("rollout.policy", "reward"),
        tracks=("policy",),
        slice=recipe.rollout.slice,
        reward=recipe.reward,
        schedule=recipe.schedule,
        suites=recipe.eval,
        need=need,
    )
