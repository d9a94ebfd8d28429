"""Golden topic 10: packing, balancing, plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.trainer import planner
from services.trainer.planner import Size
from shared.config.problems import BadInput
from shared.config.sections import Train
from tests.trainer.test_golden import refused
from tests.vectors import Case, cases


def sizes(case: Case) -> list[Size]:
    prompts = case.params.get("prompt") or [0] * len(case.params["response"])
    return [planner.clean(p, r) for p, r in zip(prompts, case.params["response"], strict=True)]


def packed(found: list[Size], updates: int, budget: Any, kind: Any) -> tuple[list[int], list[list[list[int]]]]:
    """(permutation, ranges over it): each update's rows packed by themselves."""
    order: list[int] = []
    plan = []
    for rows in planner.updates(len(found), updates):
        ranges = []
        for micro in planner.first_fit_decreasing([found[i] for i in rows], budget, kind):
            ranges.append([len(order), len(order) + len(micro)])
            order += [rows[i] for i in micro]
        plan.append(ranges)
    return order, plan


def ranges(micros: Any) -> list[list[int]]:
    return [[micro[0], micro[-1] + 1] for micro in micros]


@pytest.mark.parametrize("case", cases("10_planner", "first_fit_decreasing", "balance_into_k"))
def test_packing(case: Case) -> None:
    p, found = case.params, sizes(case)
    if case.raises:
        with pytest.raises(ValueError, match="must be"):
            planner.balance_into(found, p.get("k", 1), "sum")
            planner.first_fit_decreasing(found, p["budget"], "sum")
        return
    if case.function == "balance_into_k":
        micros = planner.balance_into(found, p["k"], p["cost_model"])
    else:
        micros = planner.first_fit_decreasing(found, p["budget"], p["cost_model"])
    assert micros == case.expect["micros"]
    assert [planner.cost([found[i] for i in m], p["cost_model"]) for m in micros] == case.expect["costs"]


@pytest.mark.parametrize("case", cases("10_planner", "arrange_packed", "planner_on_part"))
def test_plans_by_tokens(case: Case) -> None:
    p = case.params
    with refused(case):
        if case.params.get("response") is None:  # media: nothing is known of lengths, so micro-batches are counted
            rows = planner.updates(p["num_samples"], p["num_updates"])
            assert [ranges(planner.chunks(r, p["micro_batch_size"])) for r in rows] == case.expect["plan"]
            return
        order, plan = packed(sizes(case), p["num_updates"], p.get("budget") or p["token_budget"], p["cost_model"])
        assert order == case.expect.get("permutation", case.expect.get("sample_order")) and plan == case.expect["plan"]


@pytest.mark.parametrize("case", cases("10_planner", "count_plan", "count_slices"))
def test_plans_by_count(case: Case) -> None:
    p = case.params
    with refused(case):
        if p["total"] < 1:
            raise ValueError("a batch has rows: the controller forms no empty one")
        plan = [
            ranges(planner.chunks(rows, p["micro_batch_size"])) for rows in planner.updates(p["total"], p.get("num_updates", 1))
        ]
        assert plan == case.expect["plan"] if "plan" in case.expect else plan[0] == case.expect["slices"]


@pytest.mark.parametrize("case", cases("10_planner", "lpt_permutation"))
def test_shares(case: Case) -> None:
    lengths, count = case.params["lengths"], case.params["num_shards"]
    with refused(case):
        found = planner.shares(lengths, count)
        assert [i for share in found for i in share] == case.expect["permutation"]
        assert [sum(lengths[i] for i in share) for share in found] == case.expect["shard_sums"]
        step = len(lengths) // count
        before = planner.spread([sum(lengths[i * step : (i + 1) * step]) for i in range(count)])
        case.close(before, case.expect["spread_before"])
        case.close(planner.spread(case.expect["shard_sums"]), case.expect["spread_after"])


@pytest.mark.parametrize("case", cases("10_planner", "balance_shards"))
def test_ranks_share_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    p = case.params
    monkeypatch.setattr(planner, "SPREAD", p["min_spread"])
    lengths, count = p["lengths"], max(1, p["num_shards"])
    found = [planner.of_rank(range(len(lengths)), lengths, rank, count) for rank in range(count)]
    step = len(lengths) // count
    wanted = case.expect["sample_order"]
    if len(lengths) % count == 0:  # within a rank the order of rows does not matter to a sum
        assert [set(rows) for rows in found] == [set(wanted[i * step : (i + 1) * step]) for i in range(count)]
    else:
        assert [i for rows in found for i in rows] == wanted


@pytest.mark.parametrize("case", cases("10_planner", "shuffled_updates"))
def test_shuffled(case: Case) -> None:
    p = case.params
    if case.raises:  # without a step there is no order; and what is packed by tokens is not shuffled
        with pytest.raises((ValueError, TypeError, BadInput)):
            if "planner" in p:
                Train.model_validate({"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 9, "shuffle_updates": True})
            planner.shuffled(4, 0, p["shuffle_step"])
        return
    order = planner.shuffled(p["batch"], p["shuffle_seed"], p["shuffle_step"]) if p["num_updates"] > 1 else None
    assert (order or list(range(p["batch"]))) == (case.expect["order"] or list(range(p["batch"])))
    plan = [ranges(planner.chunks(rows, p["micro_batch_size"])) for rows in planner.updates(p["batch"], p["num_updates"])]
    assert plan == case.expect["plan"]


@pytest.mark.parametrize("case", cases("10_planner", "shuffled_updates_aligned"))
def test_parts_are_shuffled_together(case: Case) -> None:
    p = case.params
    if case.raises:
        with pytest.raises(ValueError, match="has no parent"):
            planner.shuffled_aligned(["a0/0"], [f"{p['fine_parent_prefix']}0/0/0"], 3, 9)
        return
    orders = planner.shuffled_aligned(p["coarse"], p["fine"], p["shuffle_seed"], p["shuffle_step"])
    assert list(orders) == case.expect["orders"]
    for order, plan in zip(orders, case.expect["plans"], strict=True):
        updates = planner.updates(len(order), p["num_updates"])
        assert [ranges(planner.chunks(rows, p["micro_batch_size"])) for rows in updates] == plan


@pytest.mark.parametrize("case", cases("10_planner", "restore_row_order"))
def test_rows_find_back(case: Case) -> None:
    """What was computed in a plan's order is scattered back by it, as anchors are."""
    out = np.zeros_like(case.inputs["arranged"])
    out[case.params["order"]] = case.inputs["arranged"]
    case.close(out, case.outputs["restored"])


@pytest.mark.parametrize("case", cases("10_planner", "token_budget_planner"))
def test_a_planner_that_cannot_be_is_refused(case: Case) -> None:
    p = case.params
    section = {
        "optimizer": {"lr": 1e-3},
        "micro_batch_tokens": p["token_budget"],
        "micro_batch_cost": p.get("cost_model", "sum"),
    }
    with pytest.raises((ValueError, BadInput)):
        Train.model_validate(section)
