"""DiffusionNFT on the forward process, and distillation from a teacher for each domain, on what the engine made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.flow_stack import FlowStack
from services.trainer.forward_stack import ForwardStack
from shared.types import Sample
from tests.trainer import torchrun
from tests.trainer.test_flow_stack import batch_of, gradient, made, make_stack, write_batch
from tests.trainer.test_stack import distance, flat, whole

EMA = {"schedule": "constant", "decay": 0.5, "timing": "rollout_end"}
NFT: dict[str, Any] = {"algorithm": "nft", "ema": EMA}


@pytest.fixture(scope="module")
def clean() -> list[list[Sample]]:
    """Of a sampler that never drew: nothing but the end of each trajectory is stored."""
    found = made(sde_indices=(), eta=0.0)
    segment: Any = found[0][0].frontier.segment
    assert segment.positions == (5,) and segment.log_probs is None
    return found


@pytest.fixture(scope="module")
def taught() -> list[list[Sample]]:
    """A group of each domain."""
    found = []
    for samples, domain in zip(made(), ("cats", "dogs"), strict=True):
        prompt = msgspec.structs.replace(samples[0].parts[0], metadata=({"domain": domain},))
        found.append([Sample((prompt, *samples[0].parts[1:]))])
    return found


def test_the_average_is_what_it_is_held_against(clean: list[list[Sample]]) -> None:
    """Before the first update live weights and average are one, so both errors are equal; later they are not."""
    stack = make_stack(lr=1e-2, **NFT)
    assert isinstance(stack, ForwardStack)
    first = stack.train_track(batch_of(clean)).metrics
    assert first["positive_loss"] == pytest.approx(first["negative_loss"], rel=1e-6)
    second = stack.train_track(batch_of(clean)).metrics
    assert second["positive_loss"] != pytest.approx(second["negative_loss"], rel=1e-4)
    assert np.isfinite(second["grad_norm"]) and "sde_step_first" not in second


@pytest.mark.parametrize("params", [{}, {"ref_deviation_coef": 0.1}], ids=["plain", "reference"])
def test_any_split_gives_the_same_gradient(clean: list[list[Sample]], params: dict[str, Any]) -> None:
    options: dict[str, Any] = NFT | {"params": params}
    if params:
        options["lora"] = {"rank": 2, "alpha": 4}
    one = gradient(make_stack(**options), batch_of(clean))
    for size in (1, 3):
        assert distance(gradient(make_stack(micro_batch_size=size, **options), batch_of(clean)), one) < 1e-5


def test_what_is_rewarded_becomes_likelier(clean: list[list[Sample]]) -> None:
    """The live model foresees the good picture better than before, and the bad one worse."""
    stack = make_stack(lr=1e-3, **NFT)
    assert isinstance(stack, ForwardStack)
    batch = batch_of(clean, [(3.0, -3.0, 0.0, 0.0)] * 2)

    def errors() -> torch.Tensor:
        rows = [batch.flow_row(i) for i in range(2)]
        velocity = stack._velocity(rows, stack.backend.model)
        with torch.no_grad():
            found = [velocity(n.noisy, n.at.expand(2)) - (n.noisy - n.clean) / n.at for n in stack._noised(rows)]
        return torch.stack(found).square().flatten(2).mean((0, 2))

    stack.begun, stack.times = 0, stack.algorithm.times(torch.tensor(batch.flow_row(0).sigmas))
    before = errors()
    for _ in range(5):
        stack.train_track(batch)
    stack.begun = 0
    good, bad = (errors() / before).tolist()
    assert good < 1 < bad, (good, bad)


def test_each_domain_has_a_teacher_of_its_own(taught: list[list[Sample]]) -> None:
    """Also where both stand in one batch; the student comes nearer to them."""
    stack = make_stack(algorithm="opd", lr=3e-3)
    assert type(stack) is FlowStack
    losses = [stack.train_track(batch_of(taught)).metrics["distill_loss"] for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0] and losses[0] > 0
    one = gradient(make_stack(algorithm="opd"), batch_of(taught))
    for size in (1, 3):
        assert distance(gradient(make_stack(algorithm="opd", micro_batch_size=size), batch_of(taught)), one) < 1e-5
    alone = make_stack(algorithm="opd").train_track(batch_of(taught[:1])).metrics["distill_loss"]
    other = make_stack(algorithm="opd").train_track(batch_of(taught[1:])).metrics["distill_loss"]
    assert losses[0] == pytest.approx((alone + other) / 2, rel=1e-4)


def test_a_prompt_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch has exactly one"):
        make_stack(algorithm="opd").train_track(batch_of(made()))


@pytest.mark.parametrize("algorithm", ["nft", "opd"])
def test_two_ranks_train_the_same(
    clean: list[list[Sample]], taught: list[list[Sample]], tmp_path: Path, algorithm: str
) -> None:
    nan = float("nan")
    options: dict[str, Any] = {"algorithm": algorithm, "num_updates_per_batch": 2, "micro_batch_size": 3}
    if algorithm == "nft":
        options["ema"] = EMA
    slices = clean if algorithm == "nft" else taught
    batch = batch_of(slices, rewards=[(1.0, 0.0, 1.0, 0.0), (nan, nan, 1.0, nan)])
    write_batch(tmp_path / "batch", batch)
    torchrun.run("tests.trainer.flow_rank", [str(tmp_path / "batch"), str(tmp_path), json.dumps(options)])
    one = make_stack(**options)
    assert [one.train_track(batch).updates for _ in range(2)] == [2, 2]
    found, wanted = load_file(tmp_path / "weights.safetensors"), whole(one)
    assert found.keys() == wanted.keys() and distance(flat({n: found[n] for n in wanted}), flat(wanted)) < 1e-5
