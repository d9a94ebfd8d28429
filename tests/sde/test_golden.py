"""Golden topics 5 to 8: kernels and solvers, sigma schedules, steps that draw, initial noise."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.sde import indices, loop, seeds, sigmas
from shared.sde.kernels import step
from shared.sde.solvers import Dpm2, UniPC
from shared.types import DiffusionSamplingParams
from tests.vectors import Case, cases, numbers

SDE, SIGMAS, INDICES, NOISE = "05_sde_kernels", "06_sigma_schedules", "07_sde_index_schedules", "08_initial_noise"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp32": torch.float32}
DTYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(value))


def refused(case: Case) -> Any:
    return pytest.raises((ValueError, RuntimeError, TypeError)) if case.raises else contextlib.nullcontext()


# kernels ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(SDE, "sde_step"))
def test_sde_step(case: Case) -> None:
    p, given = case.params, case.inputs
    with refused(case):
        sample = tensor(given["sample"]).to(DTYPES[p["sample_dtype"]])
        velocity = tensor(given["noise_pred"]).to(DTYPES[p["pred_dtype"]]).requires_grad_()
        sigma, after = tensor(given["sigma"]), tensor(given["sigma_next"])
        how = {"noise": "noise", "given": "given_prev_sample"}
        more = {name: tensor(given[key]) for name, key in how.items() if given.get(key) is not None}
        found = step(p["kernel"], sample, velocity, sigma, after, p["eta"], tensor(given["sigma_max"]), **more)
        _nearly(case, found.sample, case.outputs["prev_sample"], p["sample_dtype"], p["eta"])
        case.close(found.mean.detach(), case.outputs["prev_sample_mean"])
        case.close(found.std, case.outputs["transition_std"])
        assert (found.log_prob is not None) == case.expect["has_log_prob"]
        assert found.sample.dtype == found.mean.dtype == torch.float32
        if found.log_prob is not None:
            case.close(found.log_prob.detach(), case.outputs["log_prob"])
            found.log_prob.sum().backward()  # type: ignore[no-untyped-call]
            assert velocity.grad is not None
            case.close(velocity.grad.float(), case.outputs["grad_noise_pred_of_sum_log_prob"])


def _nearly(case: Case, found: torch.Tensor, wanted: Any, dtype: str, eta: float) -> None:
    """Half precision: a few elements may differ by one place of the storage."""
    if dtype == "float32" or eta < 1e-7:
        case.close(found.detach(), wanted)
        return
    gap = (found.detach() - tensor(wanted)).abs()
    assert float((gap > case.atol + case.rtol * tensor(wanted).abs()).float().mean()) < 0.03
    assert float(gap.max()) <= 2 ** (-7 if dtype == "bfloat16" else -10) * float(found.detach().abs().max())


@pytest.mark.parametrize("case", cases(SDE, "dpm2", "unipc"))
def test_solvers(case: Case) -> None:
    p, schedule = case.params, tensor(case.inputs["sigmas"])
    solver: Any = Dpm2(schedule)
    if p["solver"] == "unipc":
        solver = UniPC(schedule, p["solver_order"], p["solver_type"], p["lower_order_final"], p["disable_corrector"])
    x, found = tensor(case.inputs["sample"]), []
    for index, velocity in zip(p["step_indices"], tensor(case.inputs["noise_preds"]), strict=True):
        x = solver.step(index, x, velocity)
        found.append(x)
    case.close(torch.stack(found), case.outputs["trajectory"])


def test_solvers_that_cannot_be() -> None:
    """Golden `solver_rejects`; a solver without a schedule cannot be made at all."""
    for make in (
        lambda: UniPC(torch.tensor([1.0, 0.0]), order=0),
        lambda: UniPC(torch.tensor([1.0, 0.0]), kind="bh3"),  # type: ignore[arg-type]
        lambda: UniPC(torch.tensor([1.0])),
        lambda: Dpm2(torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError):
            make()


class Toy:
    """`v = a x + b sigma + c mean(text)`, with guidance above 1."""

    def __init__(self, coefficients: Sequence[float], text: torch.Tensor, negative: Any, guidance: float) -> None:
        self.coefficients = torch.tensor(coefficients, requires_grad=True)
        self.text, self.guidance = text, guidance
        self.negative = torch.zeros_like(text) if negative is None else tensor(negative)

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        plain = self._velocity(x, sigma, self.text)
        if self.guidance <= 1:
            return plain
        against = self._velocity(x, sigma, self.negative)
        return against + self.guidance * (plain - against)

    def _velocity(self, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        a, b, c = self.coefficients
        ones = [1] * (x.dim() - 1)
        means = text.mean((-2, -1)).repeat(len(x) // len(text))
        found: torch.Tensor = a * x.float() + b * sigma.reshape(-1, *ones) + c * means.reshape(-1, *ones)
        return found


@pytest.mark.parametrize("case", cases(SDE, "sd3_like_loop"))
def test_loop(case: Case) -> None:
    p, given = case.params, case.inputs
    with refused(case):
        schedule, noise = tensor(given["sigmas"]), tensor(given["noise_per_step"])
        toy = Toy(p["coef_abc"], tensor(given["text_embeds"]), given["negative_embeds"], p["guidance_scale"])
        makers: dict[str, Any] = {"dpm2": Dpm2, "unipc": UniPC}
        solver = makers[p["kernel"]](schedule) if p["kernel"] in makers else None
        kernel: Any = "flow" if solver is not None else p["kernel"]
        how = (kernel, p["eta"], p["sde_indices"])
        storage = DTYPES[p["trajectory_precision"]]
        with torch.no_grad():
            found = loop.sample(toy, tensor(given["initial_latents"]), schedule, *how, lambda i: noise[i], storage, solver)
        assert list(found.positions) == case.expect["indices"] and found.latents.dtype == storage
        case.close(found.latents.float(), case.outputs["latents"])
        if not p["sde_indices"]:
            assert found.log_probs is None
            return
        assert found.log_probs is not None
        replayed = loop.replay(toy, found.latents, found.positions, schedule, *how, batched=p["batched_replay"])
        if p["logprob_precision"] == "fp32":
            case.close(found.log_probs, case.outputs["sde_logp"])
            case.close(replayed.log_probs.detach(), case.outputs["replay_logp"])
            assert (
                float((found.log_probs - replayed.log_probs).detach().abs().max())
                <= case.expect["max_abs_rollout_minus_replay"]
            )
        case.close(replayed.means.detach(), case.outputs["replay_means"])
        replayed.log_probs.sum().backward()  # type: ignore[no-untyped-call]
        assert toy.coefficients.grad is not None
        case.close(toy.coefficients.grad, case.outputs["grad_coef_of_sum_replay_logp"])


@pytest.mark.parametrize("case", cases(SDE, "trajectory_positions"))
def test_positions(case: Case) -> None:
    assert list(loop.positions(case.params["sde_indices"], case.params["num_steps"])) == case.expect["positions"]


# schedules -------------------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {"flux2_klein": {"mu": "flux2_klein"}, "ltx2": {"mu": 2.05}}


@pytest.mark.parametrize("case", cases(SIGMAS, "static_sigmas", "dynamic_sigmas"))
def test_sigmas(case: Case) -> None:
    p = case.params
    with refused(case):
        if "mu" in p:
            found = sigmas.dynamic_sigmas(p["num_steps"], p["mu"], p["time_shift_type"], p["shift_terminal"])
        else:
            found = sigmas.static_sigmas(p["num_steps"], p["shift"], p.get("shift_terminal"))
        assert found.dtype == np.float32
        case.close(found, case.outputs["sigmas"])


@pytest.mark.parametrize("case", cases(SIGMAS, "dynamic_mu", "flux2_klein_mu"))
def test_mu(case: Case) -> None:
    p = case.params
    if "num_steps" in p:
        found = sigmas.flux2_klein_mu(p["image_seq_len"], p["num_steps"])
    else:
        lengths = (p["base_seq_len"], p["max_seq_len"])
        found = sigmas.dynamic_mu(p["image_seq_len"], *lengths, p["base_shift"], p["max_shift"])
    case.close(found, case.expect["mu"])


@pytest.mark.parametrize("case", cases(SIGMAS, "model_sigmas"))
def test_sigmas_of_models(case: Case) -> None:
    p = case.params
    with refused(case):
        policy = sigmas.Policy.model_validate(p["policy"] | FAMILIES.get(p["model"], {}))
        case.close(policy.sigmas(p["num_steps"], p["height"], p["width"]), case.outputs["sigmas"])


@pytest.mark.parametrize("case", cases(SIGMAS, "compare_only"))
def test_wans_own_grid_is_another_one(case: Case) -> None:
    found = sigmas.static_sigmas(case.params["num_steps"], case.params["flow_shift"])
    case.close(found, case.outputs["sigmas"])
    assert np.abs(found - case.outputs["diffusers_unipc_sigmas"]).max() == pytest.approx(case.expect["max_abs_diff"], rel=1e-3)


@pytest.mark.parametrize("case", cases(SIGMAS, "policy_from_directory"))
def test_policies_of_checkpoints(case: Case, tmp_path: Path) -> None:
    p = case.params
    places = {"scheduler/scheduler_config.json": "scheduler_config", "transformer/config.json": "transformer_config"}
    for place, name in (places | {"vae/config.json": "vae_config"}).items():
        if p.get(name) is not None:
            (tmp_path / place).parent.mkdir()
            (tmp_path / place).write_text(json.dumps(p[name]))
    with refused(case):
        found = sigmas.policy_of(tmp_path, p["shift"])
        assert found.model_dump(exclude={"mu"}) == case.expect["policy"]
        if "sigmas" in case.outputs:
            schedule = found.sigmas(case.expect["num_steps"], case.expect["height"], case.expect["width"])
            case.close(schedule, case.outputs["sigmas"])


@pytest.mark.parametrize("case", cases(SIGMAS, "policy_missing_path"))
def test_policies_without_a_checkpoint(case: Case) -> None:
    p = case.params
    with refused(case):
        found = sigmas.policy_of(None, p["shift"], p.get("require_dynamic", False), p.get("dynamic_overrides"))
        assert found.model_dump(include=set(case.expect["policy"])) == case.expect["policy"]


@pytest.mark.parametrize("case", cases(SIGMAS, "pin_sigmas"))
def test_pinned_sigmas_stay(case: Case) -> None:
    preset, steps = case.inputs.get("preset"), case.params["num_steps"]
    given = None if preset is None else tuple(np.asarray(preset).tolist())
    params = DiffusionSamplingParams(num_inference_steps=steps, height=64, width=64, sigmas=given)
    found = params.sigmas or sigmas.Policy().sigmas(steps, 64, 64)
    case.close(found, case.outputs["sigmas"])


# steps that draw -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(INDICES, "window_schedule"))
def test_windows(case: Case) -> None:
    p = case.params
    with refused(case):
        window = indices.Window.model_validate({n: numbers(v) if v in ("inf", "nan") else v for n, v in p["config"].items()})
        found = [list(window.indices(p["num_timesteps"], rollout or 0)) for rollout in p["rollout_ids"]]
        assert found == case.expect["indices_by_rollout"]


@pytest.mark.parametrize("case", cases(INDICES, "all_schedule"))
def test_some_steps(case: Case) -> None:
    p = case.params
    more = {"count": p.get("num_sde_steps"), "fraction": p.get("timestep_fraction", 1.0)}
    with refused(case):
        found = [list(indices.some_of(p["num_timesteps"], rollout or 0, **more)) for rollout in p["rollout_ids"]]
        assert found == case.expect["indices_by_rollout"]


@pytest.mark.parametrize("case", cases(INDICES, "normalize_fraction"))
def test_fractions(case: Case) -> None:
    with refused(case):
        assert list(indices.fraction_range(case.params["value"])) == case.expect["range"]


@pytest.mark.parametrize("case", cases(INDICES, "request_sde_indices"))
def test_the_steps_of_a_request(case: Case) -> None:
    p, found = case.params, []
    for rollout in range(len(case.expect["by_rollout"])):
        chosen = None if p["preset"] is None else tuple(p["preset"])
        if chosen is None and p["scheduler"]:
            size, dwell, steps = map(int, re.findall(r"\d+", p["scheduler"]))
            chosen = indices.Window(strategy="progressive", window_size=size, iters_per_window=dwell).indices(steps, rollout)
        params = DiffusionSamplingParams(num_inference_steps=p["num_inference_steps"], height=8, width=8, sde_indices=chosen)
        found.append(list(params.resolve_sde_indices()))
    assert found == case.expect["by_rollout"]


# noise -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(NOISE, "group_seed", "prompt_seed_group_id", "denoise_step_seed"))
def test_seeds(case: Case) -> None:
    p = case.params
    with refused(case):
        if "group_id" in p:
            assert seeds.group_seed(p["base_seed"], p["group_id"]) == int(case.expect["seed"])
        elif "prompt" in p:
            assert seeds.prompt_group(p["prompt"], p["sample_ordinal"]) == case.expect["id"]
        else:
            assert seeds.step_seed(p["base_seed"], p["step_index"], p["sample_id"]) == int(case.expect["seed"])
            drawn = loop.step_noise(p["base_seed"], p["step_index"], [p["sample_id"]], [16])
            case.close(drawn[0], case.outputs["randn_first16"])


@pytest.mark.parametrize("case", cases(NOISE, "regen_initial_noise"))
def test_initial_noise(case: Case) -> None:
    p = case.params
    with refused(case):
        drawn = loop.initial_noise(p["base_seed"], p["noise_group_ids"], p["latent_shape"])
        kept = drawn.to(DTYPES[p["dtype"]]).float()
        assert [str(seeds.group_seed(p["base_seed"], i)) for i in p["noise_group_ids"]] == case.expect["seeds"]
        case.close(kept.flatten(1)[:, :16], case.outputs["first16"])
        rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in kept]
        if rows != case.expect.get("sha256_float32_rows", rows):  # another CPU's vector math
            case.close(kept.double().flatten(1).sum(1), case.outputs["sum"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases(NOISE, "recipe_from_request", "recipe_salt"))
def test_who_shares_noise(case: Case) -> None:
    p = case.params
    if p.get("disable_driver_xt"):
        assert case.expect["deferred_to_engine"]  # here noise always comes from the request
        return
    ids = seeds.noise_groups(
        p.get("sample_ids") or p["ids"], p.get("init_same_noise", False), p.get("explicit_ids"), p.get("salt", "")
    )
    if "noise_group_ids" in case.expect:
        assert list(ids) == case.expect["noise_group_ids"]
    given = case.inputs.get("initial_latents")
    found = loop.initial_noise(p.get("seed", p.get("base_seed", 0)), ids, p["latent_shape"])
    if given is not None and not p["salt"]:
        found = tensor(given)  # latents that a request brings win, unless another noise is asked for
    case.close(found, case.outputs.get("x_T", case.outputs.get("x")))


@pytest.mark.parametrize("case", cases(NOISE, "generate_shared_noise"))
def test_noise_ids_that_do_not_fit(case: Case) -> None:
    own = [f"a/{i}" for i in range(case.params["batch_size"])]
    with pytest.raises(ValueError, match="one each"):
        seeds.noise_groups(own, explicit=case.params["noise_group_ids"] or [])
