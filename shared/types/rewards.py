"""From scores to one reward a sample: truncation policy, aggregation over scorers, failures. Golden topic 9 holds vectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from shared.types.arrays import Array
from shared.types.part import Media

Aggregation = Literal["weighted_sum", "mean", "min", "max"]
SubMetric = Literal["first", "mean", "max"]
Truncation = Literal["keep", "zero", "soft"]
AGGREGATIONS: tuple[str, ...] = ("weighted_sum", "mean", "min", "max")
_REDUCE: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max}
SUB_METRICS: tuple[str, ...] = ("first", "mean", "max")


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a scorer sees of one row."""

    sample_id: str
    prompt: str
    completion: str
    truncated: bool = False
    tokens: int = 0
    metadata: dict[str, Any] = {}
    media: Media | None = None
    """The picture or video, where one was made."""
    reference: str = ""
    """Path of the picture that the prompt is about, where there is one."""


class RewardResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One scorer's verdict on the rows of a slice: float32 scores, NaN = failed, with the reason."""

    scores: tuple[float, ...]
    errors: dict[int, str] = {}
    """Row → why it failed; rows without an entry succeeded."""


class Blend(msgspec.Struct, frozen=True, kw_only=True):
    """How the components of a row become one reward, and each component's weight."""

    method: Aggregation = "weighted_sum"
    weights: dict[str, float] = {}
    """A scorer that is not named weighs 1."""
    normalize: bool = True
    """weighted_sum divides by the sum of weights."""


def truncated_reward(
    rewards: Array,
    lengths: Array,
    max_new_tokens: int,
    mode: Truncation = "keep",
    buffer_len: int = 4096,
    penalty_factor: float = 1.0,
) -> Array:
    """Rewards after the policy for completions that ran into the limit (DAPO's soft overlong punishment, arXiv 2503.14476).

    `zero`: 0 where length ≥ limit. `soft`: `r + min(0, -(length - (limit - buffer)) / buffer * factor)`.
    """
    if mode == "keep":
        return rewards
    if mode == "zero":
        return np.where(lengths >= max_new_tokens, np.float32(0), rewards).astype(np.float32)
    if mode == "soft":
        over = lengths.astype(np.float64) - (max_new_tokens - buffer_len)
        return (rewards + np.minimum(0.0, -over / buffer_len * penalty_factor)).astype(np.float32)
    raise ValueError(f"truncation {mode!r}: legal are keep, zero, soft")


def is_score(value: Any) -> bool:
    """A finite number that is not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def reduce_sub_metrics(metrics: Mapping[str, Any], how: SubMetric) -> float | None:
    """One number of a scorer's sub-metrics; None if any is no finite number. ValueError if there are none."""
    if not metrics:
        raise ValueError("a reward has no sub-metrics")
    values = list(metrics.values())
    if not all(map(is_score, values)):
        return None
    if how == "first":
        return float(values[0])
    return float(np.mean(values)) if how == "mean" else float(max(values))


def combine(values: Mapping[str, float], method: str, weights: Mapping[str, float]) -> float:
    """One reward of the valid components; 0 without any, and for weights that do not sum to more than 0."""
    if not values:
        return 0.0
    if method == "weighted_sum":
        total = sum(weights.get(name, 1.0) for name in values)
        return sum(weights.get(n, 1.0) * v for n, v in values.items()) / total if total > 0 else 0.0
    return float(_REDUCE[method](np.asarray(list(values.values()))))


def remote_aggregate(
    results: Sequence[Mapping[str, Mapping[str, Any]]],
    required: Sequence[str],
    weights: Mapping[str, float] | None = None,
    method: Aggregation = "weighted_sum",
    sub_metric: SubMetric = "first",
) -> tuple[list[float], dict[str, list[float]], list[bool]]:
    """(rewards, components, successes) of per-sample results `{reward: {sub-metric: value}}`.

    A missing reward or a sub-metric that is no finite number makes that component 0 and its sample unsuccessful.
    """
    check_aggregation(required, method, sub_metric)
    rewards: list[float] = []
    components: dict[str, list[float]] = {name: [] for name in required}
    successes: list[bool] = []
    for result in results:
        found = {name: reduce_sub_metrics(result[name], sub_metric) if name in result else None for name in required}
        valid = {name: value for name, value in found.items() if value is not None}
        for name in required:
            components[name].append(valid.get(name, 0.0))
        rewards.append(combine(valid, method, weights or {}))
        successes.append(len(valid) == len(required))
    return rewards, components, successes


def check_aggregation(required: Sequence[str], method: str, sub_metric: str) -> None:
    """ValueError names the field, its value and what is legal."""
    if not required:
        raise ValueError("required rewards: at least one must be named")
    if method not in AGGREGATIONS:
        raise ValueError(f"aggregation method {method!r}: legal are {', '.join(AGGREGATIONS)}")
    if sub_metric not in SUB_METRICS:
        raise ValueError(f"sub-metric reduction {sub_metric!r}: legal are {', '.join(SUB_METRICS)}")


def weighted_blend(
    components: Mapping[str, Array], weights: Mapping[str, float], covering: Collection[str] | None = None
) -> Array:
    """float32 `sum of weight * component`, weights not normalized.

    `covering`: components that judge whether the media follow the prompt; ValueError unless one has a positive weight.
    None: it does not matter.
    """
    if covering is not None and not any(weights.get(name, 1.0) > 0 for name in covering if name in components):
        raise ValueError(f"weights {dict(weights)}: a scorer that judges the prompt must weigh more than 0")
    total = sum(np.float64(weights.get(name, 1.0)) * np.asarray(v, np.float64) for name, v in components.items())
    return np.asarray(total, np.float32)


def blend(components: Mapping[str, Array], how: Blend) -> Array:
    """float32 [rows]; a row with any failed component (not finite) is NaN: failed, never 0."""
    if len(components) == 1 and (how.method != "weighted_sum" or how.weights.get(next(iter(components)), 1.0) == 1.0):
        [only] = components.values()
        values = np.asarray(only, np.float32)
        return values if np.isfinite(values).all() else np.where(np.isfinite(values), values, np.float32(np.nan))
    stacked = np.stack([np.asarray(values, np.float32) for values in components.values()])
    if how.method == "weighted_sum":
        weights = np.asarray([how.weights.get(name, 1.0) for name in components], np.float64)
        total = weights @ stacked.astype(np.float64)
        out = total / weights.sum() if how.normalize and weights.sum() > 0 else total
    else:
        out = _REDUCE[how.method](stacked, axis=0)
    return np.where(np.isfinite(stacked).all(axis=0), out, np.nan).astype(np.float32)


def require_success(rewards: Array, failed: Sequence[bool], already_scored: bool = False) -> Array:
    """The policy `on_failed: abort`: RuntimeError if any sample failed, or was scored before."""
    if already_scored:
        raise RuntimeError("the Part has rewards already")
    if any(failed):
        raise RuntimeError(f"scoring failed for {sum(failed)} of {len(failed)} samples")
    return rewards
