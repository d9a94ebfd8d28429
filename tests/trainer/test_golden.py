"""Golden topics 2, 11 and 12: reductions, scales, learning rates, clipping, supervised fine-tuning."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.aggregation import aggregate, loss_scale
from services.trainer.algorithms.base import Micro, Tally
from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.optim import clip_, global_norm, lr_factor
from shared.config import algorithms
from shared.config.sections import Optimizer
from tests.vectors import Case, cases


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(value))


def refused(case: Case) -> Any:
    return pytest.raises((ValueError, RuntimeError)) if case.raises else contextlib.nullcontext()


@pytest.mark.parametrize("case", cases("02_loss_aggregation", "aggregate_token_losses"))
def test_aggregate(case: Case) -> None:
    losses = tensor(case.inputs["losses"]).requires_grad_()
    mask = case.inputs.get("loss_mask")
    with refused(case):
        lengths = torch.tensor(case.params["lengths"])
        weight = None if mask is None else tensor(mask)
        loss = aggregate(losses, lengths, weight, case.params["mode"], case.params["horizon"])
        loss.backward()  # type: ignore[no-untyped-call]
        case.close(loss.detach(), case.outputs["loss"])
        case.close(losses.grad, case.outputs["grad"])


@pytest.mark.parametrize("case", cases("02_loss_aggregation", "token_mean_loss_scales"))
def test_scales(case: Case) -> None:
    p, mask = case.params, case.inputs.get("loss_mask")
    cu = np.concatenate([[0], np.cumsum(p["lengths"])])
    weight = np.ones(cu[-1]) if mask is None else np.asarray(mask, np.float64)
    active = [float(weight[cu[lo] : cu[hi]].sum()) for lo, hi in p["micros"]]
    total = sum(active) + p["other_ranks_active_tokens"]
    with refused(case):
        found = [loss_scale("token-mean", a, total, 0, 1) for a in active]
        case.close(np.asarray(found) * p["dp_world"], case.outputs["loss_scales"])
        case.close(total, case.outputs["global_weight"])


@pytest.mark.parametrize("case", cases("12_supervised", "sft"))
def test_sft(case: Case) -> None:
    p = case.params
    logp = tensor(case.inputs["logp"]).requires_grad_()
    lengths = torch.tensor(p["lengths"])
    mask = torch.ones(len(logp)) if case.inputs.get("loss_mask") is None else tensor(case.inputs["loss_mask"]).float()
    micro = Micro(new=logp, anchor=logp.detach(), rollout=None, advantages=None, mask=mask, lengths=lengths)
    algorithm = CrossEntropy(algorithms.CrossEntropy.model_construct(aggregation=p["mode"], horizon=p["horizon"]))
    loss = algorithm.loss(micro, Tally())
    (loss * p["loss_scale"]).backward()
    case.close(loss.detach(), case.outputs["loss"])
    case.close(logp.grad, case.outputs["grad_logp"])
    total, weight = algorithm.measure(micro)
    case.close(total, case.outputs["eval_sum"])
    case.close(weight, case.outputs["eval_weight"])


@pytest.mark.parametrize("case", cases("11_optim", "lr_schedule"))
def test_lr(case: Case) -> None:
    p = case.params
    if p["type"] not in ("constant", "linear", "cosine", "linear_warmup"):
        with pytest.raises(ValueError, match="schedule"):
            Optimizer.model_validate({"lr": 1.0, "schedule": p["type"]})
        return
    with refused(case):
        section = Optimizer(lr=1.0, schedule=p["type"], warmup_steps=p["warmup_steps"])
        section.check_total(p["total_steps"])
        wanted = case.outputs["lr_used_at_step"]
        found = [lr_factor(section, k, p["total_steps"]) * np.asarray(p["base_lrs"]) for k in range(len(wanted))]
        case.close(np.asarray(found), wanted)


@pytest.mark.parametrize("case", cases("11_optim", "grad_clip"))
def test_clip(case: Case) -> None:
    parameters = []
    for name in sorted(case.inputs):
        parameter = torch.nn.Parameter(torch.zeros_like(tensor(case.inputs[name])))
        parameter.grad = tensor(case.inputs[name]).clone()
        parameters.append(parameter)
    norm = global_norm(parameters)
    clip_(parameters, norm, case.params["max_norm"])
    case.close(norm, case.outputs["norm"])
    for index, parameter in enumerate(parameters):
        case.close(parameter.grad, case.outputs[f"clipped{index}"])
