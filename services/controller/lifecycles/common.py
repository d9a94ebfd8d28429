"""What the domains' plans have in common, and the checks that span sections."""

from __future__ import annotations

from typing import Any

from services.controller.lifecycles.state import Branch, Plan
from shared.config import specs
from shared.config.problems import bad
from shared.config.sections import Component, Eval, Recipe, Reward, RolloutRecipe, Schedule


def check_placement(recipe: Recipe) -> None:
    if recipe.placement.layout != "separate":
        raise bad("placement.layout", recipe.placement.layout, "is not there yet", "separate")


def check_schedule(schedule: Schedule, batch_size: int) -> int:
    """The largest number of groups in flight. BadInput for what would deadlock."""
    if schedule.max_staleness < schedule.weight_sync_interval - 1:
        raise bad(
            "schedule.max_staleness",
            schedule.max_staleness,
            "rollouts would wait for a publish that waits for them",
            f"at least weight_sync_interval - 1 = {schedule.weight_sync_interval - 1}",
        )
    if schedule.max_inflight is not None and schedule.max_inflight < batch_size:
        raise bad("schedule.max_inflight", schedule.max_inflight, "no batch could form", f"at least {batch_size}")
    return schedule.max_inflight or (schedule.max_staleness + 1) * batch_size


def rolled_out(
    recipe: RolloutRecipe | Recipe,
    *,
    branches: tuple[Branch, ...],
    route: tuple[str, ...],
    tracks: tuple[str, ...],
    reward: Reward,
    schedule: Schedule,
    evaluation: Eval | None,
    **more: Any,
) -> Plan:
    """The plan of a domain that rolls out."""
    check_placement(recipe)
    return Plan(
        domain=recipe.domain,
        steps=recipe.steps,
        batch_size=recipe.data.batch_size,
        branches=branches,
        route=route,
        tracks=tracks,
        scorers=tuple(reward.scorers),
        updates_per_batch=recipe.train.num_updates_per_batch,
        max_staleness=schedule.max_staleness,
        max_inflight=check_schedule(schedule, recipe.data.batch_size),
        sync_interval=schedule.weight_sync_interval,
        max_reissues=schedule.max_reissues,
        log_budget=int(recipe.train.log_budget_mb * 2**20),
        on_failed=reward.on_failed,
        aggregation=reward.aggregation,
        weights={name: scorer.weight for name, scorer in reward.scorers.items()},
        normalize_weights=reward.normalize_weights,
        truncation=reward.truncation,
        overlong_buffer=reward.overlong_buffer,
        overlong_factor=reward.overlong_factor,
        propagate=reward.propagate,
        checkpoint_every=recipe.train.checkpoint_every,
        eval_at=evaluation.at if evaluation else (),
        eval_every=evaluation.every if evaluation else 0,
        eval_size=evaluation.size if evaluation else 0,
        eval_n=check_eval(evaluation) if evaluation else 1,
        eval_solved=evaluation.solved if evaluation else 1.0,
        previews=recipe.logging.previews,
        **more,
    )


def check_eval(evaluation: Eval) -> int:
    """Samples for each prompt. BadInput for several greedy ones: they are all the same."""
    greedy = evaluation.sampling is None or evaluation.sampling.temperature == 0
    if evaluation.n > 1 and greedy:
        raise bad("eval.n", evaluation.n, "greedy samples are all the same", "1, or eval.sampling with a temperature above 0")
    return evaluation.n


def check_components(recipe: RolloutRecipe) -> None:
    """Every named component exists and its parameters are right. BadInput names the field."""
    specs.check("source", recipe.data.source.name, recipe.data.source.params, "data.source")
    specs.check("engine", recipe.rollout.engine.name, recipe.rollout.engine.params, "rollout.engine")
    check_algorithm(recipe.algorithm, recipe.train.num_updates_per_batch)
    check_optimizer(recipe)
    check_scorers(recipe.reward)
    if recipe.eval is not None:
        specs.check("source", recipe.eval.source.name, recipe.eval.source.params, "eval.source")
    sampling = recipe.rollout.sampling
    if sampling.temperature == 0:
        raise bad("rollout.sampling.temperature", 0, "a greedy policy gives no gradient", "more than 0 for training")
    if sampling.top_p < 1 or sampling.top_k:
        value = {"top_p": sampling.top_p, "top_k": sampling.top_k}
        raise bad("rollout.sampling", value, "training replays the whole distribution", "top_p 1 and top_k 0")


def check_optimizer(recipe: Recipe) -> None:
    optimizer = recipe.train.optimizer
    total = recipe.steps * recipe.train.num_updates_per_batch
    try:
        optimizer.check_total(total)
    except ValueError as error:
        raise bad("train.optimizer.warmup_steps", optimizer.warmup_steps, str(error), f"0 to {total - 1}") from error


def check_algorithm(algorithm: Component, updates: int) -> None:
    specs.check("algorithm", algorithm.name, algorithm.params, "algorithm")
    flags = specs.find("algorithm", algorithm.name, "algorithm.name").flags
    if updates > 1 and not flags.get("supports_multi_update"):
        raise bad("train.num_updates_per_batch", updates, f"{algorithm.name} makes one update a batch", "1")


def check_scorers(reward: Reward) -> None:
    for name, scorer in reward.scorers.items():
        at = f"reward.scorers.{name}"
        if "." in name or "/" in name or ":" in name:
            raise bad(at, name, "a component's name holds no '.', '/' or ':'")
        specs.check("scorer", scorer.name, scorer.params, at)
