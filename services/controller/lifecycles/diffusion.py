"""diffusion: rollout → reward → advantage → train → publish. Images or video from one denoising track."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from services.controller.lifecycles.common import (
    check_algorithm,
    check_optimizer,
    check_scorers,
    check_updates,
    rolled_out,
)
from services.controller.lifecycles.state import Branch, Plan
from shared.config import sections, specs
from shared.config.problems import bad
from shared.config.sections import Algorithm, Component, MediaModel, Reward, Schedule, Section
from shared.sde.indices import Window
from shared.sde.sigmas import policy_of, scheduler_sigmas, static_shift, static_sigmas

LEAST_ETA = 1e-7
"""Less is no noise: steps that draw would have no density."""


class MediaSampling(Section):
    num_inference_steps: int = Field(..., ge=1)
    height: int = Field(..., ge=1)
    width: int = Field(..., ge=1)
    num_frames: int = Field(1, ge=1)
    guidance_scale: float | None = Field(None, allow_inf_nan=False)
    """None: no guidance, which is 1 (of Z-Image 0)."""
    guidance_scale_2: float | None = Field(None, allow_inf_nan=False)
    """Of the second expert, where a family has two; None: the same."""
    negative_prompt: str = ""
    eta: float = Field(0.7, ge=0, allow_inf_nan=False)
    """How much noise the steps that draw bring in."""
    kernel: Literal["flow", "dance", "cps"] = "flow"
    sde_indices: tuple[int, ...] | None = None
    """Steps that draw; None: all, or those of the window."""
    sde_window: Window | None = None
    """Steps that draw and are trained, other ones from batch to batch (MixGRPO)."""
    shared_noise: bool = False
    """The samples of a prompt begin with the same noise."""
    shift: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["checkpoint"] = 3.0
    """Static shift of the sigma schedule; checkpoint: that of the model's own scheduler, which may go by the picture's size."""

    sigma_grid: Literal["linear", "scheduler"] = "linear"
    """What a static shift acts on: evenly spaced times, or the grid of diffusers' own scheduler, which the pipelines of SD3 and
    Wan leave it to (its ends are shifted twice)."""

    @pydantic.model_validator(mode="after")
    def _steps(self) -> MediaSampling:
        outside = [i for i in self.sde_indices or () if not 0 <= i < self.num_inference_steps]
        if outside:
            raise ValueError(f"sde_indices {outside}: must be 0 to {self.num_inference_steps - 1}")
        if len(set(self.sde_indices or ())) < len(self.sde_indices or ()):
            raise ValueError(f"sde_indices {list(self.sde_indices or ())}: a step stands twice")
        if (window := self.sde_window) is not None:
            if self.sde_indices is not None:
                raise ValueError("sde_indices and sde_window: give one of them")
            first = 0 if window.strategy in ("all", "random") else window.init_timestep
            if window.strategy != "all" and first + window.window_size > self.num_inference_steps:
                raise ValueError(
                    f"sde_window of {window.window_size} steps from step {first} on: must end within the "
                    f"{self.num_inference_steps} steps of the schedule"
                )
        return self

    def drawing(self, rollout: int) -> tuple[int, ...] | None:
        """The steps that draw in this rollout, as numbers of the schedule; None: all."""
        if self.sde_window is None:
            return self.sde_indices
        return self.sde_window.indices(self.num_inference_steps, rollout)


class MediaEvaluation(Section):
    """How pictures are made to be looked at: never with eta, otherwise as in training where nothing else is said."""

    num_inference_steps: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=1)
    num_frames: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, allow_inf_nan=False)
    guidance_scale_2: float | None = Field(None, allow_inf_nan=False)
    negative_prompt: str | None = None
    shift: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["checkpoint"] | None = None
    solver: Literal["euler", "dpm2", "unipc"] = "euler"

    def applied(self, training: MediaSampling) -> MediaSampling:
        given = self.model_dump(exclude={"solver"}, exclude_none=True)
        return training.model_copy(update=given | {"eta": 0.0, "sde_indices": (), "sde_window": None})


class MediaSuite(sections.Suite):
    sampling: MediaEvaluation | None = None  # type: ignore[assignment]
    """None: as in training, with eta 0."""


MediaSuites = Annotated[dict[str, MediaSuite], pydantic.BeforeValidator(lambda value: {} if value is None else value)]


class MediaRollout(Section):
    engine: Component = Component(name="diffusers")
    group_size: int = Field(..., ge=1)
    slice: int | None = Field(1, ge=1)
    """Samples a message; None: the whole group."""
    sampling: MediaSampling
    stall_s: float = Field(600.0, gt=0)
    """Without a denoising step for so long the message goes to another worker."""
    deadline_s: float = Field(7200.0, gt=0)


class DiffusionRecipe(sections.Recipe):
    model: MediaModel
    rollout: MediaRollout
    reward: Reward
    algorithm: Algorithm
    schedule: Schedule = Schedule()
    eval: MediaSuites = Field({})

    def made(self) -> dict[str, MediaSampling]:
        """How pictures are made, by the field that says it: in training, and in each suite that says otherwise."""
        training = self.rollout.sampling
        own = {f"eval.{n}.sampling": s.sampling.applied(training) for n, s in self.eval.items() if s.sampling is not None}
        return {"rollout.sampling": training, **own}


class Recipe(DiffusionRecipe):
    domain: Literal["diffusion"]


def plan(recipe: DiffusionRecipe) -> Plan:
    if recipe.schedule.max_staleness:
        raise bad("schedule.max_staleness", recipe.schedule.max_staleness, "diffusion is synchronous", "0")
    return media_plan(recipe, "exactly")


def media_plan(recipe: DiffusionRecipe, need: Literal["exactly", "at_least"]) -> Plan:
    check_media(recipe)
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


def unguided(recipe: Any) -> float:
    """The guidance scale that is none in the recipe's family."""
    return float(specs.find("family", recipe.model.family, "model.family").flags["unguided"])


def _guided(recipe: Any, scale: float | None) -> bool:
    return scale is not None and scale > unguided(recipe)


def check_picture(recipe: Any, folder: Path) -> None:
    """Of pictures to imitate: as check_size."""
    _index(recipe, folder)
    _check_cells(recipe, folder, "picture", recipe.picture)


def check_size(recipe: DiffusionRecipe, folder: Path) -> None:
    """Against the pipeline's own configs, before anything loads. BadInput names the nearest legal value."""
    index = _index(recipe, folder)
    for place, sampling in recipe.made().items():
        _check_cells(recipe, folder, place, sampling)
        if index.get("is_distilled") and _guided(recipe, sampling.guidance_scale):
            why = "this model is distilled: guidance is in it, and another one would spoil it"
            raise bad(f"{place}.guidance_scale", sampling.guidance_scale, why, f"{unguided(recipe):g}")


def _index(recipe: Any, folder: Path) -> dict[str, Any]:
    """The pipeline's own account of its parts. BadInput if it is of another family."""
    index: dict[str, Any] = json.loads((folder / "model_index.json").read_text())
    own, kind = index.get("_class_name"), specs.find("family", recipe.model.family, "model.family").flags["pipeline"]
    if own != kind:
        fitting = [name for name in specs.names("family") if specs.find("family", name, "").flags["pipeline"] == own]
        why = f"the folder of model.path holds a {own}, and this family is a {kind}"
        raise bad(
            "model.family", recipe.model.family, why, ", ".join(fitting) or "a family of that pipeline, of which there is none"
        )
    return index


def _check_cells(recipe: Any, folder: Path, place: str, size: Any) -> None:
    cell = _cell(recipe, folder)
    for field in ("height", "width"):
        if (value := getattr(size, field)) % cell:
            nearest = str(max(cell, round(value / cell) * cell))
            raise bad(f"{place}.{field}", value, f"must be a multiple of {cell} for this {recipe.model.family}", nearest)


def sigmas_of(recipe: DiffusionRecipe, folder: Path, sampling: MediaSampling) -> tuple[float, ...]:
    """The schedule that requests pin. BadInput for a checkpoint that names none."""
    kind = recipe.model.family
    own_grid = sampling.sigma_grid == "scheduler"
    if own_grid and not specs.find("family", kind, "model.family").flags["own_grid"]:
        why = f"the pipeline of {kind} gives its scheduler a linear grid"
        raise bad("rollout.sampling.sigma_grid", sampling.sigma_grid, why, "linear")
    static = scheduler_sigmas if own_grid else static_sigmas
    if sampling.shift != "checkpoint":
        return tuple(static(sampling.num_inference_steps, sampling.shift).tolist())
    own = static_shift(folder)
    policy = policy_of(folder, own or 1.0)
    if own_grid and own is not None and not policy.use_dynamic_shifting:
        return tuple(scheduler_sigmas(sampling.num_inference_steps, own).tolist())
    if own is None and not policy.use_dynamic_shifting:
        raise bad("rollout.sampling.shift", "checkpoint", "the model's scheduler_config.json names no shift", "a number")
    tokens: dict[str, Any] = {"vae_scale_factor": 1, "patch_size": _cell(recipe, folder)}
    mu = {"mu": "flux2_klein"} if kind == "flux2_klein" else {}
    if policy.shift_terminal and not policy.use_dynamic_shifting:
        raise bad(
            "rollout.sampling.shift", "checkpoint", "the model's scheduler_config.json stretches a static shift", "a number"
        )
    policy = policy.model_copy(update=tokens | mu)
    return tuple(policy.sigmas(sampling.num_inference_steps, sampling.height, sampling.width).tolist())


def _cell(recipe: Any, folder: Path) -> int:
    """Pixels of a token's side."""
    if recipe.model.family == "sd3":  # whose configs say all of it
        policy = policy_of(folder)
        return policy.vae_scale_factor * policy.patch_size
    return int(specs.find("family", recipe.model.family, "model.family").flags["cell"])


def _divides_by_std(algorithm: Algorithm) -> bool:
    """Whether its loss compares transitions by their std."""
    params = specs.check("algorithm", algorithm.name, algorithm.params, "algorithm").model_dump()
    penalty = algorithm.name != "diffusion_nft" and params.get("beta", 0) > 0
    return penalty or bool(params.get("add_kl_coefficient"))


def _drawing(sampling: MediaSampling, batch: int) -> tuple[int, ...]:
    found = sampling.drawing(batch)
    return tuple(range(sampling.num_inference_steps)) if found is None else found


def check_media(recipe: DiffusionRecipe) -> None:
    """BadInput names the field, the value and the nearest legal one."""
    specs.check("source", recipe.data.source.name, recipe.data.source.params, "data.source")
    specs.check("engine", recipe.rollout.engine.name, recipe.rollout.engine.params, "rollout.engine")
    check_scorers(recipe.reward, media=True)
    check_algorithm(recipe.algorithm, recipe.train.num_updates_per_batch, supervised=False, media=True)
    check_updates(recipe, recipe.data.batch_size * recipe.rollout.group_size)
    check_optimizer(recipe)
    for name, suite in recipe.eval.items():
        specs.check("source", suite.source.name, suite.source.params, f"eval.{name}.source")
        if suite.reward is not None:
            check_scorers(suite.reward, f"eval.{name}.reward", media=True)
    sampling = recipe.rollout.sampling
    facts = specs.find("family", recipe.model.family, "model.family").flags
    for place, made in recipe.made().items():
        frames = made.num_frames
        if not facts["video"] and frames != 1:
            raise bad(f"{place}.num_frames", frames, f"{recipe.model.family} makes images", "1")
        if facts["video"] and frames % 4 != 1:
            raise bad(f"{place}.num_frames", frames, "must be 4 k + 1", str(frames // 4 * 4 + 1))
        if made.guidance_scale_2 is not None and facts["experts"] < 2:
            why = f"{recipe.model.family} has no second expert"
            raise bad(f"{place}.guidance_scale_2", made.guidance_scale_2, why, "none; guidance_scale is for all steps")
    flags = specs.find("algorithm", recipe.algorithm.name, "algorithm.name").flags
    if flags.get("requires_ema_rollout") and recipe.train.ema is None:
        raise bad("train.ema", None, f"{recipe.algorithm.name} samples from a moving average", "such as {decay: 0.5}")
    if not flags.get("any_sampler") and (sampling.eta < LEAST_ETA or sampling.sde_indices == ()):
        field = "eta" if sampling.eta < LEAST_ETA else "sde_indices"
        value = getattr(sampling, field)
        raise bad(f"rollout.sampling.{field}", value, f"{recipe.algorithm.name} learns from steps that draw", "some noise")
    guided = {d: s for d, s in recipe.algorithm.params.get("guidance_scales", {}).items() if _guided(recipe, s)}
    if guided and not (_guided(recipe, sampling.guidance_scale) or _guided(recipe, sampling.guidance_scale_2)):
        why = "rollouts without guidance carry no negative prompt for a teacher's"
        legal = f"at most {unguided(recipe):g}, or rollout.sampling.guidance_scale above it"
        raise bad("algorithm.params.guidance_scales", guided, why, legal)
    if sampling.kernel == "cps" and _divides_by_std(recipe.algorithm):
        last = sampling.num_inference_steps - 1
        drawing = {i for batch in range(min(recipe.steps, 1000)) for i in _drawing(sampling, batch)}
        if last in drawing:
            why = f"step {last}, the last, draws nothing under cps, so a KL over it is not finite"
            raise bad("rollout.sampling.sde_indices", sorted(drawing), why, f"steps 0 to {last - 1}")
    if recipe.train.steps_at_once and facts["experts"] > 1:
        why = "its experts compute on either side of a boundary, so the steps of one forward pass must be one"
        raise bad("train.steps_at_once", True, why, "false")
    if recipe.train.micro_batch_tokens is not None or recipe.train.replay == "packed":
        raise bad("train.replay", recipe.train.replay, "pictures have no tokens: give train.micro_batch_size", "padded")
