"""Golden topic 1: group advantages, GAE, reward propagation, lineage."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.types import ARSamplingParams, Part, Sample, ids
from shared.types import advantages as adv
from tests.vectors import Case, cases

TOPIC = "01_advantages"


def refused(case: Case) -> Any:
    """Cases that are rejected must raise; which error class is UniRL's own."""
    return pytest.raises(ValueError) if case.raises else contextlib.nullcontext()


@pytest.mark.parametrize("case", cases(TOPIC, "group_advantages"))
def test_group_advantages(case: Case) -> None:
    p = dict(case.params)
    sample_ids = tuple(p.pop("sample_ids"))
    rewards = case.inputs.get("rewards")
    with refused(case):
        part = Part(sample_ids=sample_ids, role="assistant", rewards=rewards).compute_advantages(**p)
        if case.outputs.get("advantages") is None:
            assert part.advantages is None
            return
        assert part.advantages is not None and part.advantages.dtype == np.float32
        case.close(part.advantages, case.outputs["advantages"])


@pytest.mark.parametrize("case", cases(TOPIC, "finite_mean_std"))
def test_finite_mean_std(case: Case) -> None:
    mean, std = adv.finite_mean_std(case.inputs["values"])
    case.close(mean, case.outputs["mean"])
    case.close(std, case.outputs["std"])


@pytest.mark.parametrize("case", cases(TOPIC, "gae"))
def test_gae(case: Case) -> None:
    with refused(case):
        found, returns = adv.gae(
            case.inputs["rewards"],
            case.inputs["values"],
            case.params["gamma"],
            case.params["lambda"],
            case.inputs.get("mask"),
        )
        case.close(found, case.outputs["advantages"])
        case.close(returns, case.outputs["returns"])


@pytest.mark.parametrize("case", cases(TOPIC, "scatter_terminal_rewards"))
def test_scatter(case: Case) -> None:
    with refused(case):
        found = adv.scatter_terminal_rewards(case.inputs["rewards"], case.params["cu_seqlens"])
        case.close(found, case.outputs["token_rewards"])


@pytest.mark.parametrize("case", cases(TOPIC, "part_gae"))
def test_part_gae(case: Case) -> None:
    found = adv.part_gae(
        case.inputs["rewards"],
        case.inputs["values"],
        case.params["lengths"],
        case.params["gamma"],
        case.params["lambda"],
        case.inputs.get("loss_mask"),
    )
    for name, value in zip(("token_advantages", "returns", "sample_advantages"), found, strict=True):
        case.close(value, case.outputs[name])


def lineage(prompts: list[str], branches: list[int]) -> Sample:
    sample = Sample((Part(sample_ids=tuple(prompts)),))
    for n in branches:
        sample = sample.fork(n, ARSamplingParams(max_new_tokens=1))
    return sample


@pytest.mark.parametrize("case", cases(TOPIC, "propagate_rewards"))
def test_propagate(case: Case) -> None:
    sample = lineage(case.params["prompts"], case.params["branches"])
    parts = [msgspec.structs.replace(part, rewards=case.inputs.get(f"rewards_part{k}")) for k, part in enumerate(sample.parts)]
    with refused(case):
        found = Sample(tuple(parts)).propagate_rewards(case.params["op"])
        for name, wanted in case.outputs.items():
            rewards = found.parts[int(name.removeprefix("rewards_part"))].rewards
            assert (rewards is None) == (wanted is None)
            if rewards is not None:
                case.close(rewards, wanted)


@pytest.mark.parametrize("case", cases(TOPIC, "parent_id", "branch_of", "ancestor_id", "child_id"))
def test_ids(case: Case) -> None:
    call: Any = vars(ids)[case.function]
    with refused(case):
        assert call(*case.params["args"]) == case.expect["value"]


@pytest.mark.parametrize("case", cases(TOPIC, "fork_ids"))
def test_fork(case: Case) -> None:
    with refused(case):
        part = lineage(case.params["prompts"], case.params["branches"]).parts[-1]
        assert list(part.sample_ids) == case.expect["sample_ids"]
        assert adv.group_keys(part.sample_ids, None) == case.expect["group_ids"]


@pytest.mark.parametrize("case", cases(TOPIC, "part_input", "sample_lineage_valid"))
def test_lineage(case: Case) -> None:
    parts = case.params.get("parts") or [case.params["sample_ids"]]
    with refused(case):
        Sample(tuple(Part(sample_ids=tuple(row)) for row in parts))
