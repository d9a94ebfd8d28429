"""Golden topic 4, and the flow cases of topic 12: losses and gradients of denoising policies."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.diffusion_nft import DiffusionNft, Noised
from services.trainer.algorithms.diffusion_opd import DiffusionOpd
from services.trainer.algorithms.flow import FlowMicro, columns_of, gaussian_kl, step_kl, step_stds
from services.trainer.algorithms.flow_dppo import FlowDppo
from services.trainer.algorithms.flow_grpo import FlowGrpo
from services.trainer.algorithms.flow_matching import FlowMatching, eval_seed, shifted, squared_errors
from services.trainer.algorithms.unigrpo import FlowUniGrpo
from shared.config import algorithms
from tests.vectors import Case, cases, numbers

TOPIC = "04_diffusion_losses"


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(value))


def refused(case: Case) -> Any:
    return pytest.raises((ValueError, RuntimeError)) if case.raises else contextlib.nullcontext()


def given(case: Case, kind: Any, *names: str) -> Any:
    """The parameters that the case sets, as the recipe would."""
    values = {
        n: numbers(case.params[n]) if case.params[n] in ("nan", "inf") else case.params[n] for n in names if n in case.params
    }
    return kind.model_validate(values)


def micro_of(case: Case) -> FlowMicro:
    inputs, p = case.inputs, case.params
    held: dict[str, Any] = {name: None if inputs.get(name) is None else tensor(inputs[name]) for name in inputs}
    schedule = tensor(inputs["sigmas"])
    indices = p["sde_indices"]
    anchor = held["old_logp"]
    if p.get("old_logp_source") == "replay" and held.get("replay_anchor_logp") is not None:
        anchor = held["replay_anchor_logp"]
    places = torch.tensor(indices, dtype=torch.long)
    velocities = held.get("v_theta")
    return FlowMicro(
        new=held["new_logp"].requires_grad_(),
        anchor=anchor,
        means=held["new_means"].requires_grad_(),
        stds=step_stds(p.get("strategy", "flow"), schedule, indices, p["eta"]),
        advantages=held["advantages"],
        anchor_means=held.get("old_means"),
        reference_means=held.get("ref_means"),
        velocities=None if velocities is None else velocities[None].requires_grad_(),
        reference_velocities=None if held.get("v_ref") is None else held["v_ref"][None],
        gaps=schedule[places] - schedule[places + 1],
        progress=p.get("training_progress", 0.0),
    )


def check(case: Case, loss: torch.Tensor, micro: FlowMicro) -> None:
    case.close(loss.detach(), case.outputs["loss"])
    (loss * case.params["loss_scale"]).backward()
    for name, value in (("grad_logp", micro.new), ("grad_means", micro.means)):
        if case.outputs.get(name) is not None:
            found = torch.zeros_like(value) if value.grad is None else value.grad
            case.close(found, case.outputs[name])


@pytest.mark.parametrize("case", cases(TOPIC, "flow_grpo"))
def test_flow_grpo(case: Case) -> None:
    with refused(case):
        if case.params["old_logp_source"] not in ("rollout", "replay"):
            raise ValueError("here the anchor is always the trainer's own: there is no such choice")
        algorithm = FlowGrpo(given(case, algorithms.FlowGrpo, "clip_range", "beta", "clip_schedule"))
        micro = micro_of(case)
        check(case, algorithm.loss(micro, Tally()), micro)


@pytest.mark.parametrize("case", cases(TOPIC, "flow_dppo"))
def test_flow_dppo(case: Case) -> None:
    with refused(case):
        algorithm = FlowDppo(given(case, algorithms.FlowDppo, "kl_mask_threshold", "add_kl_coefficient", "beta"))
        micro, tally = micro_of(case), Tally()
        check(case, algorithm.loss(micro, tally), micro)
        assert tally.figures()["masked_fraction"] == pytest.approx(case.expect["metrics"]["masked_fraction"], abs=1e-6)


@pytest.mark.parametrize("case", cases(TOPIC, "bagel_flow_unigrpo"))
def test_unigrpo(case: Case) -> None:
    with refused(case):
        names = ("clip_range", "ratio_norm", "grad_reweight", "mse_weight")
        micro = micro_of(case)
        check(case, FlowUniGrpo(given(case, algorithms.FlowUniGrpo, *names)).loss(micro, Tally()), micro)
        assert micro.velocities is not None
        grad = micro.velocities.grad
        case.close(np.zeros(micro.velocities.shape[1:]) if grad is None else grad[0], case.outputs["grad_velocity"])


@pytest.mark.parametrize("case", cases(TOPIC, "diffusion_opd"))
def test_opd(case: Case) -> None:
    p = case.params
    with refused(case):
        names = [teacher["name"] for teacher in p["teachers"]]
        if len(set(names)) < len(names) or "nope" in names:
            raise ValueError("here teachers are a mapping, and each is loaded by its path")
        if p["add_kl_coefficient"] and not p["eta"]:
            raise ValueError("the recipe's check: eta")
        scales = {t["name"]: t["guidance_scale"] for t in p["teachers"] if "guidance_scale" in t}
        params = algorithms.DiffusionOpd(
            teachers=dict.fromkeys(names, "x"), guidance_scales=scales, add_kl_coefficient=p["add_kl_coefficient"]
        )
        algorithm = DiffusionOpd(params)
        teacher = algorithm.teacher(p["domains"])
        assert scales.get(teacher, p["student_guidance_scale"]) == case.expect["teacher_guidance"]
        student = tensor(case.inputs["student_means"]).requires_grad_()
        zeros = torch.zeros(student.shape[:2])
        stds = step_stds(p["strategy"], tensor(case.inputs["sigmas"]), p["sde_indices"], p["eta"])
        teachers = tensor(case.inputs["teacher_means"])
        micro = FlowMicro(zeros, zeros, student, stds, torch.zeros(len(student)), reference_means=teachers)
        check(case, algorithm.loss(micro, Tally()), micro)


@pytest.mark.parametrize("case", cases(TOPIC, "diffusion_nft"))
def test_nft(case: Case) -> None:
    p, inputs = case.params, case.inputs
    names = ("beta", "adv_std_saturate", "use_adaptive_weight", "training_timestep_fraction", "ref_deviation_coef")
    with refused(case):
        if "adv_mode" in p:
            raise ValueError("there is one mode")
        algorithm = DiffusionNft(given(case, algorithms.DiffusionNft, *names))
        clean, advantages = tensor(inputs["x0"]), tensor(inputs["advantages"])
        times = algorithm.times(tensor(inputs["sigmas"]))
        if "timesteps" in case.outputs:
            case.close(times, case.outputs["timesteps"])
        total, grads = 0.0, list[Any]()
        for k, t in enumerate(times):
            noised = Noised.of(clean, t, tensor(inputs["noise_per_iter"])[k])
            case.close(noised.noisy, case.outputs["xt"][k]) if "xt" in case.outputs else None
            new = tensor(inputs["new_pred"])[k].requires_grad_()
            reference = None if inputs["ref_pred"] is None else tensor(inputs["ref_pred"])[k]
            loss = algorithm.loss(noised, new, tensor(inputs["old_pred"])[k], reference, advantages, Tally())
            (loss * p["loss_scale"] / len(times)).backward()
            total += float(loss.detach())
            grads.append(new.grad)
        case.close(total, case.outputs["loss"])
        case.close(torch.stack(grads), case.outputs["grad_new_pred"])


@pytest.mark.parametrize("case", cases(TOPIC, "diffusion_nft_timesteps"))
def test_nft_times(case: Case) -> None:
    with refused(case):
        algorithm = DiffusionNft(given(case, algorithms.DiffusionNft, "training_timestep_fraction"))
        found, wanted = algorithm.times(tensor(case.inputs["sigmas"])), case.outputs["timesteps"]
        assert found.shape == tuple(np.shape(wanted))
        case.close(found, wanted)


@pytest.mark.parametrize("case", cases(TOPIC, "transition_sigma"))
def test_stds(case: Case) -> None:
    p = case.params
    found = step_stds(p["strategy"], tensor(case.inputs["sigmas"]), p["steps"], p["eta"])
    case.close(found, case.outputs["sigma_t"])


@pytest.mark.parametrize("case", cases(TOPIC, "gaussian_kl"))
def test_kl(case: Case) -> None:
    p, q, sigma = (tensor(case.inputs[name]) for name in ("p", "q", "sigma"))
    case.close(gaussian_kl(p, q, sigma), case.outputs["kl"])
    case.close(step_kl(p, q, sigma).mean(), case.outputs["mean_kl"])


@pytest.mark.parametrize("case", cases(TOPIC, "gather_sde_field"))
def test_columns(case: Case) -> None:
    with refused(case):
        found = columns_of(tensor(case.inputs["field"]), case.params["sde_indices"], case.params["target_steps"])
        case.close(found, case.outputs["gathered"])


@pytest.mark.parametrize("case", cases("12_supervised", "flow_shift", "draw_sigma", "eval_seed"))
def test_times_of_supervised_training(case: Case) -> None:
    p = case.params
    if case.function == "flow_shift":
        case.close(shifted(tensor(case.inputs["u"]), p["shift"]), case.outputs["sigma"])
    elif case.function == "eval_seed":
        assert eval_seed(p["eval_seed"], p["key"]) == int(case.expect["seed"])
    else:
        names = {"timestep_sampling": p["sampling"], "timestep_shift": p["shift"]}
        params = algorithms.FlowMatching.model_validate(names | {n: p[n] for n in ("logit_mean", "logit_std", "sigma_min")})
        found = FlowMatching(params).draw(p["batch"], torch.Generator().manual_seed(p["seed"]))
        case.close(found, case.outputs["sigma"])


@pytest.mark.parametrize("case", cases("12_supervised", "flow_match_eval", "flow_match_loss"))
def test_flow_matching(case: Case) -> None:
    p, clean = case.params, tensor(case.inputs["x0"])
    velocity = tensor(case.inputs["v_pred"]).requires_grad_()
    if case.function == "flow_match_loss":
        noise = tensor(case.inputs["noise"])
        loss = FlowMatching(algorithms.FlowMatching()).loss(velocity, clean, noise, Tally())
        case.close(squared_errors(velocity, clean, noise).detach(), case.outputs["per_sample"])
        case.close(loss.detach(), case.outputs["loss"])
        loss.backward()  # type: ignore[no-untyped-call]
        case.close(velocity.grad, case.outputs["grad_v"])
        return
    names = {"timestep_sampling": p["sampling"]} | {n: p[n] for n in ("timestep_shift", "logit_mean", "logit_std", "sigma_min")}
    algorithm = FlowMatching(algorithms.FlowMatching.model_validate(names))
    times, noise = algorithm.evaluation(p["eval_seed"], p["sample_ids"], clean.shape[1:])
    case.close(times, case.outputs["sigma"])
    case.close(noise, case.outputs["noise"])
    case.close(Noised.of(clean, times, noise).noisy, case.outputs["xt"])
    mask = torch.ones(len(clean)) if case.inputs["loss_mask"] is None else tensor(case.inputs["loss_mask"])
    errors = squared_errors(velocity.detach(), clean, noise) * mask
    case.close(errors.double().sum(), case.outputs["mse_sum"])
    case.close(mask.sum(), case.outputs["weight"])


@pytest.mark.parametrize("case", cases("12_supervised", "flow_match_config"))
def test_flow_matching_that_cannot_be(case: Case) -> None:
    with refused(case):
        algorithms.FlowMatching.model_validate(case.params)
