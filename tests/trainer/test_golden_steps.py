"""Golden topics 2 and 11: whole calls of the stack, and its optimizer's step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import ALGORITHMS
from services.trainer.backend import Backend
from services.trainer.batch import Batch, Row
from services.trainer.ema import Ema as Average
from services.trainer.ema import decay
from services.trainer.frozen import Frozen
from services.trainer.optim import clip_, global_norm, lr_factor, make_optimizer, param_groups
from services.trainer.stack import TrainStack, Work
from services.trainer.world import World
from shared.config.algorithms import TABLE
from shared.config.sections import Ema, Lora, Optimizer, Train
from shared.models.ar.bundle import load
from shared.models.ar.replay import Replayed
from shared.models.lora import LIVE, LoraLinear, inject, using
from shared.models.targets import matches
from tests.trainer.test_golden import refused, tensor
from tests.trainer.test_golden_losses import NAMES
from tests.vectors import Case, cases

PARAMS = {name: params for _, name, params, _, _ in TABLE}


class Table(TrainStack):
    """A stack whose model is a table of log-probs; a row's prompt is its place in it."""

    def prepare(self, theta: torch.nn.Parameter, old: torch.Tensor, starts: list[int], section: Train) -> None:
        self.theta, self.old, self.starts, self.section = theta, old, starts, section
        self.parameters, self.window = [theta], section.accumulate_rollouts
        self.optimizer = torch.optim.SGD([theta], lr=section.optimizer.lr)  # type: ignore[assignment]
        self.base_lrs = [section.optimizer.lr]
        self.micro_losses: list[float] = []
        self.gradients: list[np.ndarray[Any, Any]] = []

    def places(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.cat([torch.arange(self.starts[int(r.prompt[0])], self.starts[int(r.prompt[0]) + 1]) for r in rows])

    def _replay(self, members: Sequence[Row], bundle: Any = None) -> Replayed:
        return Replayed(self.theta[self.places(members)])

    def _freeze(self, work: Sequence[Work]) -> list[Frozen | None]:
        return [Frozen(Frozen.empty(own.rows).starts, self.old[self.places(own.rows)]) for own in work]

    def _micro(self, *args: Any) -> float:
        found = super()._micro(*args)
        self.micro_losses.append(found)
        return found

    def _step(self, norm: float) -> None:
        assert self.theta.grad is not None
        self.gradients.append(self.theta.grad.numpy().copy())
        super()._step(norm)


class Rows(Batch):
    def __init__(self, rows: list[Row]) -> None:
        self.given = rows
        self.heads = [type("Head", (), {"length": len(row.completion)})() for row in rows]

    def row(self, index: int) -> Row:
        return self.given[index]


@pytest.fixture(scope="module")
def backend(model_folder: Path) -> Backend:
    return Backend(load(model_folder, None), World(), "float32")


@pytest.mark.parametrize("case", cases("02_loss_aggregation", "train_track"))
def test_train_track(case: Case, backend: Backend) -> None:
    p, x = case.params, case.inputs
    kind = PARAMS[p["algorithm"]]
    given = {NAMES.get(k, k): v for k, v in p["algorithm_params"].items() if NAMES.get(k, k) in kind.model_fields}
    if p["algorithm"] == "gspo":
        given.pop("aggregation", None)
    algorithm: Any = ALGORITHMS[p["algorithm"]](kind.model_validate(given))
    algorithm.idle_without_advantage = False
    parts = p["window_parts"]
    lengths = p["lengths"] * parts
    starts = [0, *np.cumsum(lengths).tolist()]
    mask = np.ones(starts[-1]) if x.get("loss_mask") is None else x["loss_mask"]
    weights = [mask[low:high].astype(np.float32) for low, high in itertools.pairwise(starts)]
    rows = [
        Row(np.array([i]), np.zeros(n, np.int32), weights[i], None, float(x["advantages"][i])) for i, n in enumerate(lengths)
    ]
    train: dict[str, Any] = {"num_updates_per_batch": p["num_updates_per_batch"], "accumulate_rollouts": parts}
    if p["planner"] == "count":
        train["micro_batch_size"] = p["micro_batch_size"]
    else:
        train |= {"micro_batch_tokens": p["planner"]["token_budget"], "micro_batch_cost": p["planner"]["cost_model"]}
    stack = Table(backend, algorithm, Train(optimizer=Optimizer(lr=1.0)), World(), 1, 1.0)
    theta = torch.nn.Parameter(tensor(x["theta0"]))
    for row in rows:  # packing counts completions alone here
        assert len(row.prompt) == 1
    own = len(p["lengths"])
    with refused(case):
        section = Train(optimizer=Optimizer(lr=p["lr"], grad_clip=p["max_grad_norm"]), **train)
        stack.prepare(theta, tensor(x["old_logp"]), starts, section)
        if p["planner"] != "count":
            rows = [Row(_Light(row.prompt), row.completion, row.mask, None, row.advantage) for row in rows]
        found = [stack.train_track(Rows(rows[i * own : (i + 1) * own])) for i in range(parts)]
        result = found[-1]
        assert not any(one.updates for one in found[:-1]), "batches of a window make one update"
        if result.reason and not result.updates and not case.raises:  # a step of zeros there, no step here: nothing moves
            case.close(theta.detach(), case.outputs["theta_after"])
            return
        if result.reason and not result.updates:
            raise ValueError(result.reason)  # the inner update raises; the stack says it as a reason
        idle = sum(not weight.any() for weight in weights)  # rows that nothing counts of are not computed at all
        assert result.updates == case.expect["optimizer_steps"]
        assert case.expect["num_micros"] - idle <= len(stack.micro_losses) <= case.expect["num_micros"]
        for index, gradient in enumerate(stack.gradients):
            case.close(gradient, case.outputs[f"grad_update{index}"])
        case.close(result.metrics["grad_norm"], case.outputs["grad_norm"])
        losses = [one.metrics["loss"] for one in found if "loss" in one.metrics]
        case.close(float(np.mean(losses)), case.outputs["loss"])
        case.close(theta.detach(), case.outputs["theta_after"])


class _Light(np.ndarray[Any, Any]):
    """A prompt that weighs nothing, as in the vectors."""

    def __new__(cls, value: Any) -> Any:
        return np.asarray(value).view(cls)

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("case", cases("11_optim", "param_groups"))
def test_param_groups(case: Case) -> None:
    p = case.params
    names = [n for n in p["names"] if not n.startswith(p["frozen_prefix"])]
    found = [{"lr": lr, "names": own} for lr, own in param_groups(names, p["base_lr"], p["group_lrs"] or {})]
    assert found == case.expect["groups"]


@pytest.mark.parametrize("case", cases("11_optim", "optimizer_step"))
def test_optimizer_step(case: Case) -> None:
    """Clip; a norm that is not finite moves nothing; then AdamW and the schedule."""
    p = case.params
    schedule = p["lr_schedule"]
    section = Optimizer(
        lr=p["learning_rate"],
        betas=(p["beta1"], p["beta2"]),
        eps=p["eps"],
        weight_decay=p["weight_decay"],
        schedule=schedule["type"],
        warmup_steps=schedule["warmup_steps"],
        grad_clip=p["max_grad_norm"],
    )
    parameter = torch.nn.Parameter(tensor(case.inputs["param0"]))
    optimizer = make_optimizer({"p": parameter}, section)
    committed = 0
    for index, gradient in enumerate(case.inputs["grads"]):
        parameter.grad = tensor(gradient).clone()
        norm = global_norm([parameter])
        case.close(norm, case.outputs["reported_norm"][index])
        factor = lr_factor(section, committed, schedule["total_steps"])
        case.close(section.lr * factor, case.outputs["lr_before_step"][index])
        if np.isfinite(norm):
            clip_([parameter], norm, section.grad_clip)
            optimizer.param_groups[0]["lr"] = section.lr * factor
            optimizer.step()
            committed += 1
        case.close(parameter.detach(), case.outputs["param_after_step"][index])
        assert committed == case.expect["committed_steps"][index]


def layer(case: Case, a: str = "A", b: str = "B") -> LoraLinear:
    weight = tensor(case.inputs["W"])
    base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    base.weight.data.copy_(weight)
    found = LoraLinear(base, case.params["rank"], case.params["alpha"])
    assert not found.lora_B[LIVE].weight.any()
    found.lora_A[LIVE].weight.data.copy_(tensor(case.inputs[a]))
    found.lora_B[LIVE].weight.data.copy_(tensor(case.inputs[b]))
    return found


@pytest.mark.parametrize("case", cases("11_optim", "lora_forward"))
def test_lora_forward(case: Case) -> None:
    found = layer(case)
    model = torch.nn.ModuleDict({"q_proj": found})
    x = tensor(case.inputs["x"])
    case.close(found(x).detach(), case.outputs["y"])
    with using(model, None):
        case.close(found(x).detach(), case.outputs["y_adapter_disabled"])
    assert found.scaling == case.expect["scaling"]
    assert [n for n, p in model.named_parameters() if p.requires_grad] == case.expect["trainable"]


@pytest.mark.parametrize("case", cases("11_optim", "lora_shadow"))
def test_two_adapters_on_one_layer(case: Case) -> None:
    found = layer(case, "default_A", "default_B")
    found.add("old", trainable=False)
    found.lora_A["old"].weight.data.copy_(tensor(case.inputs["old_A"]))
    found.lora_B["old"].weight.data.copy_(tensor(case.inputs["old_B"]))
    model, x = torch.nn.ModuleDict({"q_proj": found}), tensor(case.inputs["x"])
    case.close(found(x).detach(), case.outputs["y_live"])
    with using(model, "old"):
        case.close(found(x).detach(), case.outputs["y_shadow"])
        trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        assert trainable == case.expect["requires_grad_while_shadow_active"]
    case.close(found(x).detach(), case.outputs["y_live_again"])


@pytest.mark.parametrize("case", cases("11_optim", "lora_targets"))
def test_lora_targets(case: Case) -> None:
    p = case.params
    targets, prefix = p["target_modules"], p.get("module_prefix") or ""
    if isinstance(targets, str) and targets != "all-linear":
        with pytest.raises(ValueError, match="targets"):  # patterns are not taken: names are
            Lora.model_validate({"rank": 1, "alpha": 1, "targets": targets})
        return
    with refused(case):
        section = Lora.model_validate({"rank": 1, "alpha": 1, "targets": targets, "prefix": prefix})
        assert all(matches(name, section.targets, section.prefix) for name in case.expect["matches"])
        assert not matches("other.q_proj.more", section.targets, section.prefix)


def test_adapters_start_equal_on_every_rank(model_folder: Path) -> None:
    one, two = (load(model_folder, None).model for _ in range(2))
    section = Lora(rank=2, alpha=2)
    assert inject(one, section, 5) == inject(two, section, 5)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    other = load(model_folder, None).model
    inject(other, section, 6)
    assert any(not torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def ema_section(params: dict[str, Any], timing: Any) -> Ema:
    given = params.get("decay_params", params)
    if "target_decay" in given:
        return Ema(schedule="full", decay=given["target_decay"], timing=timing)
    kind = given["ema_decay_type"]
    return Ema(
        schedule=kind if kind in ("linear", "warmup") else "constant",
        decay=given["ema_decay"],
        flat_steps=given["ema_flat_steps"],
        uprate=given["ema_uprate"],
        uphold=given["ema_uphold"],
        timing=timing,
    )


@pytest.mark.parametrize("case", cases("11_optim", "ema_decay"))
def test_ema_decay(case: Case) -> None:
    section = ema_section(case.params, "optimizer_step")
    case.close([decay(section, t) for t in case.params["t"]], case.outputs["decay"])


@pytest.mark.parametrize("case", cases("11_optim", "ema_run"))
def test_ema_run(case: Case) -> None:
    p = case.params
    live = torch.nn.Parameter(tensor(case.inputs["live0"]))
    average = Average(ema_section(p, p["timing"]), {"p": live})
    average.shadow["p"].copy_(tensor(case.inputs["shadow0"]))
    for index, gradient in enumerate(case.inputs["grads"]):
        live.data -= p["lr"] * tensor(gradient)
        average.stepped(index)
        if (index + 1) % p["optimizer_steps_per_rollout"] == 0:
            average.batch_done(index + 1)
        case.close(average.shadow["p"], case.outputs["shadow_after_each_step"][index])
    case.close(live.detach(), case.outputs["live_final"])
    before, shadow = live.detach().clone(), average.shadow["p"].clone()
    average.swap()
    assert torch.equal(live.detach(), shadow) and torch.equal(average.shadow["p"], before)
    average.swap()
    assert torch.equal(live.detach(), before)
