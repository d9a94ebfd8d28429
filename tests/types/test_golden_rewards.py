"""Golden topic 9: truncation, aggregation, failures, blending."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest

from shared.types import rewards
from tests.vectors import Case, cases, same_float

TOPIC = "09_rewards"


def refused(case: Case, *errors: type[Exception]) -> Any:
    return pytest.raises(errors or ValueError) if case.raises else contextlib.nullcontext()


@pytest.mark.parametrize("case", cases(TOPIC, "truncated_reward"))
def test_truncation(case: Case) -> None:
    p = case.params
    if p["frontier_params"] != "ar" or not p["has_segment"]:
        case.close(case.inputs["raw_rewards"], case.outputs["rewards"])  # fixed-length media are untouched
        return
    with refused(case):
        found = rewards.truncated_reward(
            case.inputs["raw_rewards"],
            np.asarray(p["lengths"]),
            p["max_new_tokens"],
            p["mode"],
            p["overlong_buffer_len"],
            p["overlong_penalty_factor"],
        )
        case.close(found, case.outputs["rewards"])


@pytest.mark.parametrize("case", cases(TOPIC, "reward_failures_raise"))
def test_failures(case: Case) -> None:
    failed = [not ok for ok in case.params.get("successes", [])]
    values = np.ones(len(failed), np.float32)
    with refused(case, RuntimeError):
        rewards.require_success(values, failed, case.params.get("frontier_already_has_rewards", False))


def metrics(raw: Any) -> Any:
    """Sub-metrics as JSON wrote them: `nan` and `inf` are strings there."""
    if isinstance(raw, dict):
        return {k: metrics(v) for k, v in raw.items()}
    return float(raw) if raw in ("nan", "inf", "-inf") else raw


@pytest.mark.parametrize("case", cases(TOPIC, "remote_aggregate"))
def test_aggregate(case: Case) -> None:
    p = case.params
    with refused(case):
        found, components, successes = rewards.remote_aggregate(
            metrics(p["results"]) if isinstance(p["results"], dict) else [metrics(r) for r in p["results"]],
            p["required_rewards"],
            p["weights"],
            p["method"],
            p["sub_metric_reduce"],
        )
        assert all(map(same_float, found, case.expect["rewards"]))
        for name, values in case.expect["components"].items():
            assert all(map(same_float, components[name], values))
        assert successes == case.expect.get("successes", successes)


@pytest.mark.parametrize("case", cases(TOPIC, "weighted_blend"))
def test_blend(case: Case) -> None:
    scores = {n: np.asarray(v, np.float32) for n, v in case.params["scores"].items()}
    covering = {"v"} if case.params["v_covers_prompt_video"] else set()
    with refused(case):
        case.close(rewards.weighted_blend(scores, case.params["weights"], covering), case.expect["rewards"])


def test_a_failed_component_fails_the_row_and_is_never_zero() -> None:
    found = rewards.blend({"a": np.asarray([1, math.nan], np.float32), "b": np.asarray([0, 1], np.float32)}, rewards.Blend())
    assert found[0] == 0.5 and math.isnan(found[1])
