"""Training on trajectories that the engine made: ratio exactly 1, any split the same, what is rewarded becomes likelier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.algorithms.diffusion_nft import DiffusionNft
from services.trainer.algorithms.diffusion_opd import DiffusionOpd
from services.trainer.algorithms.flow_dppo import FlowDppo
from services.trainer.algorithms.flow_grpo import FlowGrpo
from services.trainer.algorithms.unigrpo import FlowUniGrpo
from services.trainer.backend import Backend
from services.trainer.flow_batch import FlowBatch, FlowRow
from services.trainer.flow_stack import FlowStack
from services.trainer.forward_stack import ForwardStack
from services.trainer.world import World
from shared.config import algorithms
from shared.config.builtin import Diffusers
from shared.config.sections import Lora, Optimizer, Placement, Train
from shared.engines.base import fill
from shared.engines.diffusers_engine import DiffusersEngine
from shared.models import lora
from shared.models.diffusion.bundle import DiffusionBundle
from shared.models.diffusion.family import Conditions, Family
from shared.models.diffusion.wan import Wan22
from shared.sde import loop
from shared.sde.sigmas import static_sigmas
from shared.types import Sample
from shared.wire import codec
from shared.wire.codec import pack, unpack
from shared.wire.envelope import PartHead, SliceHead, TrainSlice
from tests.models.tiny_pipelines import TINY, sd3, wan
from tests.rollout.test_diffusers_engine import PARAMS, STEPS, Worded, request
from tests.trainer import torchrun
from tests.trainer.test_stack import distance, flat, gradient_of, whole

GROUP = 4
ALGORITHMS: dict[str, Any] = {
    "flow_grpo": lambda **p: FlowGrpo(algorithms.FlowGrpo(clip_range=1e-3, **p)),
    "flow_dppo": lambda **p: FlowDppo(algorithms.FlowDppo(**p)),
    "unigrpo": lambda **p: FlowUniGrpo(algorithms.FlowUniGrpo(clip_range=1e-3, **p)),
}
OTHERS: dict[str, Any] = {
    "nft": lambda **p: DiffusionNft(algorithms.DiffusionNft(**p)),
    "opd": lambda **p: DiffusionOpd(algorithms.DiffusionOpd(teachers={"cats": "a", "dogs": "b"}, **p)),
}
"""Without a ratio."""


class WordedWan(Wan22):
    """Wan 2.2 without encoders."""

    def encode(self, pipe: Any, prompts: list[str], pictures: Any = (), frames: int = 1) -> Conditions:
        return {"text": Worded().encode(pipe, prompts)["text"]}


def pipe(kind: str = "sd3") -> Any:
    torch.manual_seed(0)
    return (sd3() if kind == "sd3" else wan(kind)).pipe


def family_of(kind: str) -> Family:
    return Worded() if kind == "sd3" else WordedWan()


def batch_of(slices: list[list[Sample]], advantages: Any = None, rewards: Any = None) -> FlowBatch:
    rng = np.random.default_rng(0)
    found, bodies = [], []
    for number, samples in enumerate(slices):
        ids = samples[0].frontier.sample_ids
        head = SliceHead(parts=(PartHead(ids=ids, track="policy"),))
        own = advantages[number] if advantages is not None else tuple(float(a) for a in rng.normal(0, 1, len(ids)))
        score = rewards[number] if rewards is not None else (1.0,) * len(ids)
        found.append(TrainSlice(head=head, rewards=(tuple(score),), advantages=(tuple(own),)))
        bodies.append(codec.encode(samples))
    return FlowBatch(found, "policy", lambda i: codec.decode(bodies[i], list[Sample]))


def made(groups: int = 2, kind: str = "sd3", **changes: Any) -> list[list[Sample]]:
    """What the engine fills, as it stands in a body: the track is the recipe's."""
    engine = DiffusersEngine(family_of(kind), pipe(kind), Diffusers(forward_batch_size=GROUP))
    params = msgspec.structs.replace(PARAMS, **changes)
    try:
        return fill(engine, [request(f"s:0:{g}", ("a cat", "a dog")[g % 2], GROUP, params) for g in range(groups)])
    finally:
        engine.close()


@pytest.fixture(scope="module")
def slices() -> list[list[Sample]]:
    return made()


def write_batch(path: Path, batch: FlowBatch) -> None:
    bodies = [codec.encode(batch.open_slice(i)) for i in range(len(batch.slices))]
    path.write_bytes(pack((tuple(batch.slices), tuple(bodies))))


def read_batch(path: Path) -> FlowBatch:
    found, bodies = unpack(path.read_bytes(), tuple[tuple[TrainSlice, ...], tuple[bytes, ...]])
    return FlowBatch(found, "policy", lambda i: codec.decode(bodies[i], list[Sample]))


def make_stack(world: World | None = None, algorithm: str = "flow_grpo", params: Any = None, **train: Any) -> FlowStack:
    world, kind = world or World(), train.pop("kind", "sd3")
    family = family_of(kind)
    model = family.model(pipe(kind))
    if adapter := train.pop("lora", None):
        lora.inject(model, Lora.model_validate(adapter), seed=3)
    placement = Placement(trainer_ranks=world.size) if world.size > 1 else None
    recompute = train.get("activation_checkpointing", False)
    backend = Backend(DiffusionBundle(model, family), world, "float32", placement, recompute)
    section = Train(optimizer=Optimizer(lr=train.pop("lr", 1e-3), grad_clip=1e9), **train)
    own = (ALGORITHMS | OTHERS)[algorithm](**(params or {}))
    teachers = {name: teacher(kind, seed) for seed, name in enumerate(("cats", "dogs"), 7)} if algorithm == "opd" else None
    stack = ForwardStack if algorithm == "nft" else FlowStack
    return stack(backend, family, own, section, world, 100, teachers=teachers)


def teacher(kind: str, seed: int) -> Any:
    """A model that knows something else."""
    found = family_of(kind).model(pipe(kind))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return found.requires_grad_(False)


def gradient(stack: FlowStack, batch: FlowBatch) -> torch.Tensor:
    return gradient_of(stack, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_first_ratio_is_exactly_1(algorithm: str, guidance: float) -> None:
    """Also with several updates, whose anchor is frozen before the first; and the engine scored the same to 1e-4."""
    batch = batch_of(made(guidance_scale=guidance, negative_prompt="ugly"))
    result = make_stack(algorithm=algorithm, micro_batch_size=3).train_track(batch)
    assert result.updates == 1 and result.metrics["rollout_gap_max"] <= 1e-4
    assert result.metrics["ratio_mean"] == 1.0 and result.metrics.get("ratio_max", 1.0) == 1.0
    several = make_stack(algorithm=algorithm, micro_batch_size=3, num_updates_per_batch=2).train_track(batch)
    assert several.updates == 2 and several.metrics["ratio_mean"] != 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TINY)
def test_an_anchor_over_the_same_micro_batch_gives_exactly_1(kind: str, dtype: str) -> None:
    """Of every family, also under autocast with activations that are computed again: before the first update new and old
    log-probs are the same bits, though the old ones were scored without a gradient, and all steps of a row together."""
    torch.manual_seed(0)
    tiny = TINY[kind]()
    backend = Backend(DiffusionBundle(tiny.family.model(tiny.pipe), tiny.family), World(), dtype, None, recompute=True)
    section = Train(optimizer=Optimizer(lr=1e-3), num_updates_per_batch=2)
    stack = FlowStack(backend, tiny.family, ALGORITHMS["flow_grpo"](), section, World(), 10)
    names, sigmas = ["a:0:0/0", "a:0:0/1"], torch.from_numpy(static_sigmas(STEPS, 3.0))
    with torch.no_grad():
        found = loop.sample(
            lambda x, sigma: tiny.family.predict(backend.model, x, sigma, tiny.cond, tiny.negative, *tiny.scales),
            loop.initial_noise(7, names, tiny.shape),
            sigmas,
            "flow",
            0.7,
            (0, 1),
            lambda i: loop.step_noise(7, i, names, tiny.shape),
        )
    params = msgspec.structs.replace(PARAMS, num_inference_steps=STEPS, guidance_scale=tiny.guidance)
    rows = [
        FlowRow(
            latents=found.latents[k],
            positions=found.positions,
            sigmas=tuple(sigmas.tolist()),
            indices=(0, 1),
            params=params,
            conditions={n: v[k : k + 1] for n, v in tiny.cond.items()},
            negative=None if tiny.negative is None else {n: v[k : k + 1] for n, v in tiny.negative.items()},
            rollout=None,
        )
        for k in range(2)
    ]
    anchor = stack._anchor(rows)
    for k in range(2):
        again = stack._replay(rows, backend.model, [k])
        assert torch.equal(again.log_probs.detach(), anchor.log_probs[:, [k]]) and again.log_probs.requires_grad
        assert torch.equal(again.means.detach(), anchor.means[:, [k]])


def test_batches_of_pictures_make_one_update_too(slices: list[list[Sample]]) -> None:
    alone = [gradient(make_stack(), batch_of([some])) for some in slices]
    stack = make_stack(accumulate_rollouts=2)
    kept: list[torch.Tensor] = []
    stack._step = lambda norm: kept.append(torch.cat([p.grad.flatten() for p in stack.parameters]))  # type: ignore
    assert [stack.train_track(batch_of([some])).updates for some in slices] == [0, 1]
    assert float((kept[0] - sum(alone) / 2).norm() / kept[0].norm()) < 1e-5


def test_steps_at_once_are_the_steps_one_by_one(slices: list[list[Sample]]) -> None:
    one = gradient(make_stack(), batch_of(slices))
    both = gradient(make_stack(steps_at_once=True, micro_batch_size=3), batch_of(slices))
    assert float((one - both).norm() / one.norm()) < 1e-4


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "joint"])
def test_any_split_into_micro_batches_gives_the_same_gradient(slices: list[list[Sample]], algorithm: str) -> None:
    options: dict[str, Any] = {"algorithm": algorithm}
    if algorithm == "joint":
        options = {"algorithm": "unigrpo", "params": {"ratio_norm": True, "grad_reweight": True}}
    batch = batch_of(slices)
    one = gradient(make_stack(**options), batch)
    for size in (1, 3, 5):
        assert distance(gradient(make_stack(micro_batch_size=size, **options), batch), one) < 1e-5
    again = gradient(make_stack(micro_batch_size=3, activation_checkpointing=True, **options), batch)
    assert distance(again, one) < 1e-5


def test_failed_rewards_have_no_weight(slices: list[list[Sample]]) -> None:
    nan, advantages = float("nan"), [(1.0, 0.0, -1.0, 0.0), (0.5, -0.5, 0.0, 0.0)]
    with_failed = batch_of(slices, advantages, [(1.0, nan, 0.0, nan), (1.0, 0.0, nan, nan)])
    kept = [[slices[0][0].select([0, 2])], [slices[1][0].select([0, 1])]]
    without = batch_of(kept, [(1.0, -1.0), (0.5, -0.5)])
    first, second = (gradient(make_stack(micro_batch_size=2), batch) for batch in (with_failed, without))
    assert distance(first, second) < 1e-5
    stack = make_stack()
    result = stack.train_track(batch_of(slices, advantages, [(nan,) * GROUP] * 2))
    assert result.updates == 0 and "every reward failed" in result.reason and stack.progress.version == 0


def test_what_is_rewarded_becomes_likelier(slices: list[list[Sample]]) -> None:
    batch, stack = batch_of(slices, [(1.0, -1.0, 0.0, 0.0)] * 2), make_stack(lr=1e-4)

    def scores() -> torch.Tensor:
        with torch.no_grad():
            return stack._replay([batch.flow_row(i) for i in range(2)], stack.backend.model).log_probs.mean(1)

    before = scores()
    for _ in range(5):
        stack.train_track(batch)
    good, bad = (scores() - before).tolist()
    assert good > bad


def test_adapters_are_compared_with_the_model_without_them(slices: list[list[Sample]]) -> None:
    stack = make_stack(lr=1e-2, lora={"rank": 2, "alpha": 4}, params={"beta": 0.1})
    first = stack.train_track(batch_of(slices)).metrics["kl_reference"]
    second = stack.train_track(batch_of(slices)).metrics["kl_reference"]
    assert first == 0.0 < second
    assert all(".lora_" in name for name in stack.backend.weights())
    with pytest.raises(ValueError, match="give the stack one"):
        make_stack(params={"beta": 0.1})


def test_what_cannot_be_one_batch_is_refused(slices: list[list[Sample]]) -> None:
    other = made(1, sde_indices=(1, 2))
    with pytest.raises(ValueError, match="differ in"):
        make_stack().train_track(batch_of([*slices, *other]))
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        make_stack(micro_batch_tokens=10)
    with pytest.raises(ValueError, match="num_updates_per_batch 3"):
        make_stack(num_updates_per_batch=3).train_track(batch_of(slices))


@pytest.mark.parametrize(
    "options",
    [
        {"num_updates_per_batch": 2, "micro_batch_size": 3},
        {"lora": {"rank": 2, "alpha": 4}},
        {"lora": {"rank": 2, "alpha": 4}, "params": {"beta": 0.1}, "micro_batch_size": 1},
        {"kind": "wan22", "micro_batch_size": 3},
    ],
    ids=["full", "lora", "lora with a penalty", "wan22"],
)
def test_two_ranks_train_the_same(slices: list[list[Sample]], tmp_path: Path, options: dict[str, Any]) -> None:
    """Also where one rank has fewer micro-batches, since rewards failed; and with two experts, where all ranks compute by the
    same one at a time."""
    nan = float("nan")
    if "kind" in options:
        slices = made(kind=options["kind"], height=16, width=16, num_frames=5, sde_indices=(0, 1, 2, 3))
    batch = batch_of(slices, rewards=[(1.0, 0.0, 1.0, 0.0), (nan, nan, 1.0, nan)])
    write_batch(tmp_path / "batch", batch)
    torchrun.run("tests.trainer.flow_rank", [str(tmp_path / "batch"), str(tmp_path), json.dumps(options)])
    one = make_stack(**options)
    one.train_track(batch)
    result = one.train_track(batch)
    updates, _ = json.loads((tmp_path / "result.json").read_text())
    found, wanted = load_file(tmp_path / "weights.safetensors"), whole(one)
    assert updates == result.updates > 0 and found.keys() == wanted.keys()
    assert distance(flat({n: found[n] for n in wanted}), flat(wanted)) < 1e-5
