"""Golden topic 3: every AR loss, value, gradient and figures; masks, clip schedules, drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import ALGORITHMS, policy
from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.cppo import cppo_keep
from services.trainer.algorithms.dppo import dppo_keep
from services.trainer.algorithms.ppo import Ppo, value_losses
from shared.config import specs
from shared.config.algorithms import TABLE
from shared.config.algorithms import Ppo as PpoParams
from tests.trainer.test_golden import refused, tensor
from tests.vectors import Case, cases

NAMES = {
    "loss_agg_mode": "aggregation",
    "dppo_delta": "delta",
    "cppo_delta": "delta",
    "cppo_w_min": "least_weight",
    "cppo_delta_b": "delta_b",
    "drpo_epsilon": "epsilon",
    "penalty_mu_weighted": "weighted",
}
"""The vectors' names of parameters → ours."""
FIGURES = {
    "masked_fraction",
    "clipfrac_upper",
    "clipfrac_lower",
    "ratio_mean",
    "ratio_std",
    "ratio_min",
    "ratio_max",
    "clipfrac_gt_one",
    "clipfrac_lt_one",
    "clip_fraction",
    "approx_kl",
    "explained_variance",
    "value_clip_fraction",
}
PARAMS = {name: params for _, name, params, _, _ in TABLE}


def algorithm(case: Case) -> Any:
    kind = PARAMS[case.function]
    given = {NAMES.get(k, k): v for k, v in case.params.items() if NAMES.get(k, k) in kind.model_fields}
    if case.function == "gspo":
        given.pop("aggregation", None)
    return ALGORITHMS[case.function](kind.model_validate(given))


def micro_of(case: Case, new: torch.Tensor, values: torch.Tensor | None) -> Micro:
    p, x = case.params, case.inputs
    if p.get("old_logp_source", "rollout") not in ("rollout", "replay"):
        raise ValueError("the anchor is frozen by the stack: there is no other source to choose")
    lengths = torch.tensor(p["lengths"])
    mask = torch.ones(int(lengths.sum())) if x.get("loss_mask") is None else tensor(x["loss_mask"]).float()
    replayed = x.get("replay_anchor_logp")
    column = {name: None if x.get(name) is None else tensor(x[name]) for name in ("values", "returns", "token_advantages")}
    return Micro(
        new=new,
        anchor=tensor(x["old_logp"] if replayed is None else replayed),
        rollout=tensor(x["old_logp"]),
        advantages=tensor(x["advantages"]),
        mask=mask,
        lengths=lengths,
        values=values,
        old_values=column["values"],
        returns=column["returns"],
        token_advantages=column["token_advantages"],
        progress=p.get("training_progress", 0.0),
    )


@pytest.mark.parametrize("case", cases("03_ar_losses", "grpo", "gspo", "dppo", "cppo", "drpo", "ppo"))
def test_loss_gradient_and_figures(case: Case) -> None:
    new = tensor(case.inputs["new_logp"]).requires_grad_()
    values = case.inputs.get("new_values")
    critic = None if values is None else tensor(values).requires_grad_()
    with refused(case):
        own, tally = algorithm(case), Tally()
        micro = micro_of(case, new, critic)
        loss = own.loss(micro, tally)
        (loss * case.params.get("loss_scale", 1.0)).backward()
        case.close(loss.detach(), case.outputs["loss"])
        case.close(new.grad, case.outputs["grad_new_logp"])
        if case.outputs.get("grad_new_values") is not None:
            assert critic is not None
            case.close(critic.grad, case.outputs["grad_new_values"])
        if not (micro.mask > 0).any():  # the vectors then tell of all tokens; here nothing that counts is told of
            return
        wanted = {k: v for k, v in case.expect["metrics"].items() if k in FIGURES}
        assert len(wanted) >= 4
        for name, value in wanted.items():
            case.close(tally.figures()[name], value, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("case", cases("03_ar_losses", "clip_schedule"))
def test_clip_schedule(case: Case) -> None:
    p = case.params
    case.close(policy.scheduled(p["clip_range"], p["schedule"], p["progress"]), case.outputs["value"])


@pytest.mark.parametrize("case", cases("03_ar_losses", "dppo_mask", "cppo_mask"))
def test_keep_masks(case: Case) -> None:
    p, x = case.params, {k: tensor(v) for k, v in case.inputs.items()}
    columns = (x["new_logp"], x["old_logp"], x["token_advantages"])
    if case.function == "dppo_mask":
        keep, most = dppo_keep(*columns, p["delta"]), 0
    else:
        keep, most = cppo_keep(*columns, torch.tensor(p["lengths"]), p["delta"], p["w_min"], p["delta_b"]), 1
    assert int((keep != tensor(case.outputs["keep"])).sum()) <= most


@pytest.mark.parametrize("case", cases("03_ar_losses", "ppo_value_loss"))
def test_value_loss(case: Case) -> None:
    x = {k: tensor(v) for k, v in case.inputs.items()}
    case.close(value_losses(x["values"], x["old_values"], x["returns"], case.params["clip_range"]), case.outputs["loss"])


@pytest.mark.parametrize("case", cases("03_ar_losses", "drift_metrics"))
def test_drift(case: Case) -> None:
    x = case.inputs
    mask = None if x.get("loss_mask") is None else tensor(x["loss_mask"])
    found = policy.drift(tensor(x["new_logp"]), tensor(x["old_logp"]), mask)
    names = {"rollout_replay_logp_absdiff_mean": "rollout_gap", "rollout_replay_logp_absdiff_max": "rollout_gap_max"}
    for name, value in case.outputs.items():
        case.close(found[names.get(name, name)], value)
    assert len(found) == len(case.outputs)


@pytest.mark.parametrize("case", cases("03_ar_losses", "select_active_tokens"))
def test_select_active(case: Case) -> None:
    mask = case.inputs["mask"]
    found = policy.select_active(tensor(case.inputs["values"]), None if mask is None else tensor(mask))
    case.close(found, case.outputs["selected"])


@pytest.mark.parametrize("case", cases("02_loss_aggregation", "ppo_aggregate"))
def test_ppo_reduces_over_what_counts(case: Case) -> None:
    """Through the loss itself: with ratio 1 and advantages -l the policy loss is the reduction of l."""
    p = case.params
    with refused(case):
        own = Ppo(PpoParams(aggregation=p["mode"], horizon=p["horizon"], vf_coef=0.0, clip_range=1e9))
        losses, active = tensor(case.inputs["losses"]), tensor(case.inputs["active"]).float()
        zeros = torch.zeros_like(losses)
        new = zeros.clone().requires_grad_()
        micro = Micro(new, zeros, None, None, active, torch.tensor(p["lengths"]))
        micro.values = micro.old_values = micro.returns = zeros
        micro.token_advantages = -losses
        loss = own.loss(micro, Tally())
        loss.backward()  # type: ignore[no-untyped-call]
        case.close(loss.detach(), case.outputs["loss"])
        case.close(new.grad, np.asarray(case.outputs["grad"]) * case.inputs["losses"])


def test_specs_declare_what_the_classes_do() -> None:
    """The controller reads the contract from the spec, the stack from the class."""
    for name in specs.names("algorithm"):
        flags, kind = specs.find("algorithm", name, "x").flags, ALGORITHMS[name]
        for flag in (
            "requires_advantages",
            "supports_multi_update",
            "anchor_fields",
            "recomputes_anchor",
            "requires_ema_rollout",
        ):
            assert flags[flag] == getattr(kind, flag), (name, flag)
    assert set(ALGORITHMS) == set(specs.names("algorithm"))
