"""What the domains' plans have in common, and the checks that span sections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.controller.lifecycles.state import Branch, Plan, SuitePlan
from shared.config import specs
from shared.config.problems import bad
from shared.config.sections import Component, Recipe, Reward, RolloutRecipe, Schedule, Suite, scorer_name


def check_placement(recipe: Any) -> None:
    """BadInput for a layout that is not there, or does not go with what else is said."""
    layout = recipe.placement.layout
    if layout == "separate":
        return
    if layout != "trainside":
        raise bad("placement.layout", layout, "is not there yet", "separate, trainside")
    if not hasattr(recipe, "rollout"):
        raise bad("placement.layout", layout, f"in domain {recipe.domain} nothing is rolled out", "separate")
    engine, schedule = recipe.rollout.engine.name, recipe.schedule
    if not specs.find("engine", engine, "rollout.engine.name").flags.get("live"):
        raise bad(
            "rollout.engine.name", engine, "cannot compute with the weights that a trainer holds", "transformers, diffusers"
        )
    if recipe.placement.rollout is not None:
        why = "the trainer's ranks are the rollout workers (placement.layout trainside)"
        raise bad("placement.rollout", recipe.placement.rollout, why, "none; see placement.trainer_ranks")
    for field, value, only in (
        ("max_staleness", schedule.max_staleness, 0),
        ("weight_sync_interval", schedule.weight_sync_interval, 1),
        ("interrupt", schedule.interrupt, "drain"),
    ):
        if value != only:
            why = "with placement.layout trainside rollouts and training take turns, with one version of the weights"
            raise bad(f"schedule.{field}", value, why, str(only))


def check_schedule(schedule: Schedule, batch_size: int, group_size: int) -> int:
    """The largest number of groups in flight. BadInput for what would deadlock, or has no effect."""
    if schedule.max_staleness < schedule.weight_sync_interval - 1:
        raise bad(
            "schedule.max_staleness",
            schedule.max_staleness,
            "rollouts would wait for a publish that waits for them",
            f"at least weight_sync_interval - 1 = {schedule.weight_sync_interval - 1}",
        )
    if schedule.max_inflight is not None and schedule.max_inflight < batch_size:
        raise bad("schedule.max_inflight", schedule.max_inflight, "no batch could form", f"at least {batch_size}")
    wanted = math.ceil(batch_size * schedule.oversample)
    if schedule.max_inflight is not None and schedule.max_inflight < wanted and schedule.oversample > 1:
        why = f"no batch could be oversampled {schedule.oversample:g} times"
        raise bad("schedule.max_inflight", schedule.max_inflight, why, f"at least {wanted}")
    if schedule.filter == "zero_variance" and group_size < 2:
        raise bad("schedule.filter", schedule.filter, "a group of 1 has no variance: nothing would be trained", "none")
    if schedule.filter == "none" and schedule.max_backfill is not None:
        raise bad("schedule.max_backfill", schedule.max_backfill, "nothing is filtered", "schedule.filter zero_variance")
    for field, value, off in (
        ("on_stale", schedule.on_stale, "drop_and_reissue"),
        ("version_mixing", schedule.version_mixing, "allow"),
    ):
        if value != off and not schedule.max_staleness:
            raise bad(f"schedule.{field}", value, "with max_staleness 0 all groups are of one version, the newest", off)
    if schedule.oversample > 1 and schedule.version_mixing == "never":
        raise bad("schedule.oversample", schedule.oversample, "a cohort is a batch, and has no more groups", "1")
    if schedule.oversample > 1 and schedule.on_stale == "wait":
        raise bad(
            "schedule.oversample", schedule.oversample, "what is left over is dropped, and on_stale says that nothing is", "1"
        )
    return schedule.max_inflight or math.ceil((schedule.max_staleness + 1) * batch_size * schedule.oversample)


def check_filter(recipe: Any) -> None:
    """BadInput where groups of equal rewards do teach something."""
    if recipe.schedule.filter == "none":
        return
    algorithm, why = recipe.algorithm, ""
    if not specs.find("algorithm", algorithm.name, "algorithm.name").flags.get("requires_advantages"):
        why = f"{algorithm.name} learns from more than how siblings differ"
    elif algorithm.advantage.scope == "global":
        why = "with algorithm.advantage.scope global they are compared with other groups"
    if why:
        raise bad("schedule.filter", recipe.schedule.filter, f"{why}: groups of equal rewards teach something", "none")


def check_interrupt(recipe: Any) -> None:
    if recipe.schedule.interrupt == "drain":
        return
    engine = recipe.rollout.engine.name
    if not specs.find("engine", engine, "rollout.engine.name").flags.get("interruptible"):
        raise bad("schedule.interrupt", recipe.schedule.interrupt, f"{engine} finishes what it has begun", "drain")
    if recipe.deterministic:
        why = "a row that is continued is not the same to the last bit (deterministic)"
        raise bad("schedule.interrupt", recipe.schedule.interrupt, why, "drain")


def _backfill(schedule: Schedule, batch_size: int) -> int | None:
    if schedule.filter == "none":
        return None
    return batch_size if schedule.max_backfill is None else schedule.max_backfill


def rolled_out(
    recipe: RolloutRecipe | Recipe,
    *,
    branches: tuple[Branch, ...],
    route: tuple[str, ...],
    tracks: tuple[str, ...],
    reward: Reward,
    schedule: Schedule,
    suites: Mapping[str, Suite],
    **more: Any,
) -> Plan:
    """The plan of a domain that rolls out."""
    check_placement(recipe)
    check_window(recipe)
    check_filter(recipe)
    check_interrupt(recipe)
    return Plan(
        domain=recipe.domain,
        steps=recipe.steps,
        batch_size=recipe.data.batch_size,
        branches=branches,
        route=route,
        tracks=tracks,
        **scoring(reward),
        updates_per_batch=recipe.train.num_updates_per_batch,
        live=recipe.placement.layout == "trainside",
        publish_at_end_only=recipe.placement.layout == "trainside",
        max_staleness=schedule.max_staleness,
        max_inflight=check_schedule(schedule, recipe.data.batch_size, branches[0].n),
        mixing=schedule.version_mixing == "allow",
        waits_for_old=schedule.on_stale == "wait",
        max_backfill=_backfill(schedule, recipe.data.batch_size),
        oversample=schedule.oversample,
        group_deadline=schedule.group_deadline_s,
        sync_interval=schedule.weight_sync_interval,
        max_reissues=schedule.max_reissues,
        log_budget=int(recipe.train.log_budget_mb * 2**20),
        on_failed=reward.on_failed,
        truncation=reward.truncation,
        overlong_buffer=reward.overlong_buffer,
        overlong_factor=reward.overlong_factor,
        propagate=reward.propagate,
        checkpoint_every=recipe.train.checkpoint_every,
        suites={name: suite_plan(name, suite, reward, branches[0].media) for name, suite in suites.items()},
        previews=recipe.logging.previews,
        **more,
    )


def scoring(reward: Reward, suite: str = "") -> dict[str, Any]:
    """Streams and blend of a reward section, as plans hold them."""
    weights = {scorer_name(suite, name) if suite else name: scorer.weight for name, scorer in reward.scorers.items()}
    return {
        "scorers": tuple(weights),
        "aggregation": reward.aggregation,
        "weights": weights,
        "normalize_weights": reward.normalize_weights,
    }


def suite_plan(name: str, suite: Suite, training: Reward, media: bool = False) -> SuitePlan:
    """BadInput for several greedy samples of a text: they are all the same. Pictures begin with noises of their own."""
    check_name(f"eval.{name}", name)
    greedy = not media and (suite.sampling is None or suite.sampling.temperature == 0)
    if suite.n > 1 and greedy:
        legal = f"1, or eval.{name}.sampling with a temperature above 0"
        raise bad(f"eval.{name}.n", suite.n, "greedy samples are all the same", legal)
    own = scoring(training) if suite.reward is None else scoring(suite.reward, name)
    return SuitePlan(at=suite.at, every=suite.every, size=suite.size, n=suite.n, solved=suite.solved, **own)


def check_components(recipe: RolloutRecipe) -> None:
    """Every named component exists and its parameters are right. BadInput names the field."""
    specs.check("source", recipe.data.source.name, recipe.data.source.params, "data.source")
    specs.check("engine", recipe.rollout.engine.name, recipe.rollout.engine.params, "rollout.engine")
    check_algorithm(recipe.algorithm, recipe.train.num_updates_per_batch, supervised=False)
    check_updates(recipe, recipe.data.batch_size * recipe.rollout.group_size)
    check_optimizer(recipe)
    check_scorers(recipe.reward, media=False)
    for name, suite in recipe.eval.items():
        specs.check("source", suite.source.name, suite.source.params, f"eval.{name}.source")
        if suite.reward is not None:
            check_scorers(suite.reward, f"eval.{name}.reward", media=False)
    sampling = recipe.rollout.sampling
    if sampling.temperature == 0:
        raise bad("rollout.sampling.temperature", 0, "a greedy policy gives no gradient", "more than 0 for training")
    if sampling.top_p < 1 or sampling.top_k:
        value = {"top_p": sampling.top_p, "top_k": sampling.top_k}
        raise bad("rollout.sampling", value, "training replays the whole distribution", "top_p 1 and top_k 0")


def check_optimizer(recipe: Recipe) -> None:
    optimizer = recipe.train.optimizer
    total = recipe.train.updates(recipe.steps)
    try:
        optimizer.check_total(total)
    except ValueError as error:
        raise bad("train.optimizer.warmup_steps", optimizer.warmup_steps, str(error), f"0 to {total - 1}") from error


def check_window(recipe: Any) -> None:
    """BadInput for a publish that would be due where no version has moved."""
    window, interval = recipe.train.accumulate_rollouts, recipe.schedule.weight_sync_interval
    if window > 1 and interval > 1:
        why = f"one update is made of {window} batches (train.accumulate_rollouts), and each is published"
        raise bad("schedule.weight_sync_interval", interval, why, "1")


def check_updates(recipe: Recipe, rows: int) -> None:
    """BadInput unless the updates divide the rows of a batch, and batches that make one update the steps."""
    updates, window = recipe.train.num_updates_per_batch, recipe.train.accumulate_rollouts
    if recipe.steps % window:
        why = f"no multiple of train.accumulate_rollouts, which is {window}: the last update would lack batches"
        raise bad("steps", recipe.steps, why, str(max(window, round(recipe.steps / window) * window)))
    if rows % updates:
        nearest = min((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: (abs(n - updates), n))
        raise bad("train.num_updates_per_batch", updates, f"does not divide the {rows} rows of a batch", f"such as {nearest}")


def check_algorithm(algorithm: Component, updates: int, supervised: bool, media: bool = False) -> None:
    """BadInput for parameters that are wrong, and for an algorithm of the other kind of data."""
    specs.check("algorithm", algorithm.name, algorithm.params, "algorithm")
    flags = specs.find("algorithm", algorithm.name, "algorithm.name").flags
    if bool(flags.get("media")) != media:
        fitting = [n for n in specs.names("algorithm") if media == bool(specs.find("algorithm", n, "").flags.get("media"))]
        what = "pictures" if media else "tokens"
        raise bad("algorithm.name", algorithm.name, f"its loss is not one of {what}", ", ".join(fitting))
    if bool(flags.get("supervised")) != supervised:
        known = [
            n for n in specs.names("algorithm") if supervised == bool(specs.find("algorithm", n, "").flags.get("supervised"))
        ]
        why = "it learns from rewards, and sft has none" if supervised else "it imitates targets whatever their reward"
        raise bad("algorithm.name", algorithm.name, why, ", ".join(known))
    if updates > 1 and not flags.get("supports_multi_update"):
        raise bad("train.num_updates_per_batch", updates, f"{algorithm.name} makes one update a batch", "1")


def check_name(at: str, name: str) -> None:
    if not name or "." in name or "/" in name or ":" in name:
        raise bad(at, name, "a component's name is not empty and holds no '.', '/' or ':'")


def check_scorers(reward: Reward, where: str = "reward", media: bool | None = None) -> None:
    """`media`: whether pictures are scored; None: both may be."""
    for name, scorer in reward.scorers.items():
        at = f"{where}.scorers.{name}"
        check_name(at, name)
        specs.check("scorer", scorer.name, scorer.params, at)
        kind = specs.find("scorer", scorer.name, at).flags.get("media")
        if media is not None and kind is not None and kind != media:
            what = "pictures, and there are none" if kind else "texts, and there are only pictures"
            raise bad(f"{at}.name", scorer.name, f"scores {what}")
