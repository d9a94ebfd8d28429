"""The stack: split of work changes nothing, ranks change nothing, what is not finite moves nothing, a checkpoint is exact."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from services.trainer import planner, publisher
from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.ppo import Ppo
from services.trainer.backend import Backend
from services.trainer.base_stack import Stack
from services.trainer.batch import Batch
from services.trainer.checkpoint import Saver
from services.trainer.stack import TrainStack
from services.trainer.world import World
from shared.config import algorithms
from shared.config.sections import Lora, Optimizer, Placement, Train
from shared.models import lora
from shared.models.ar import packed
from shared.models.ar.bundle import add_critic, assign, load
from shared.types import ARSamplingParams, Sample, TextSegment
from shared.weights import checkpoints
from shared.weights.checkpoints import Position
from shared.wire import codec
from shared.wire.envelope import PartHead, SliceHead, TrainSlice
from tests.conftest import own_tensors, saving

PARAMS = ARSamplingParams(max_new_tokens=8)


def make_batch(rows: int = 12, seed: int = 0, group: int = 4, **changes: Any) -> Batch:
    """Prompts of unequal lengths, completions of 0 to 8 tokens, rollout log-probs a little off, advantages of both signs."""
    rng = np.random.default_rng(seed)
    slices, bodies = [], []
    for g in range(rows // group):
        prompt = rng.integers(4, 99, rng.integers(1, 9)).tolist()
        lists = [rng.integers(4, 99, rng.integers(0, 9)).tolist() for _ in range(group)]
        lists[0] = lists[0] or [5]
        segment = TextSegment.of(lists)
        log_probs = rng.normal(-4, 0.3, len(segment.tokens)).astype(np.float32)
        segment = msgspec.structs.replace(segment, log_probs=log_probs)
        sample = Sample.request([f"s:0:{g}"], PARAMS, n=group, texts=["x"], tokens=[prompt]).fill(segment)
        ids, lengths = sample.frontier.sample_ids, tuple(map(len, lists))
        head = SliceHead(parts=(PartHead(ids=ids, track="policy", lengths=lengths),))
        advantages = changes.get("advantages") or tuple(float(a) for a in rng.normal(0, 1, group))
        rewards = changes.get("rewards") or (1.0,) * group
        slices.append(TrainSlice(head=head, rewards=(rewards,), advantages=(advantages,)))
        bodies.append(codec.encode([sample]))
    return Batch(slices, "policy", lambda i: codec.decode(bodies[i], list[Sample]))


def make_stack(
    folder: Path,
    dtype: str = "float32",
    world: World | None = None,
    algorithm: Any = None,
    placement: dict[str, Any] | None = None,
    **train: Any,
) -> TrainStack:
    world = world or World()
    bundle = load(folder, None, dtype)
    if adapter := train.pop("lora", None):
        lora.inject(bundle.model, Lora.model_validate(adapter), seed=3)
    if train.get("replay") == "packed":
        packed.enable(bundle.model)
    if algorithm == "cross_entropy":
        algorithm = CrossEntropy(algorithms.CrossEntropy())
    if algorithm == "ppo":
        algorithm = Ppo(algorithms.Ppo())
        add_critic(bundle)
    place = Placement(trainer_ranks=world.size, **(placement or {}))
    defer = train.get("gradient_sync", "last") == "last"
    backend = Backend(bundle, world, dtype, place, train.get("activation_checkpointing", False), defer)
    optimizer = Optimizer(lr=1e-3, grad_clip=train.pop("grad_clip", 1e9))
    section = Train(optimizer=optimizer, **train)
    return TrainStack(backend, algorithm or Grpo(algorithms.Grpo(clip_range=0.2)), section, world, 100, 1.0)


def whole(stack: Stack) -> dict[str, torch.Tensor]:
    """What is trained, gathered and copied; all ranks must call it."""
    tensors = stack.state().tensors
    return {name: _whole(value) for name, value in tensors.items() if name.startswith("model.")}


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([v.flatten() for v in weights.values()])


def gradient_of(stack: TrainStack, batch: Batch) -> torch.Tensor:
    """The first update's gradient, before the step clears it."""
    kept: list[torch.Tensor] = []
    original = stack._step

    def step(norm: float) -> None:
        kept.append(torch.cat([_whole(p.grad).flatten() for p in stack.parameters]))
        original(norm)

    stack._step = step  # type: ignore[method-assign]
    stack.train_track(batch)
    return kept[0]


def _whole(grad: Any) -> torch.Tensor:
    found: torch.Tensor = grad.full_tensor() if isinstance(grad, torch.distributed.tensor.DTensor) else grad
    return found.detach().clone()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_what_fills_up_counts_for_nothing(model_folder: Path) -> None:
    """Also where it is the id that ends a sequence, which is sampled and counts."""
    gradients = []
    for pad in (0, 1):
        stack = make_stack(model_folder, "float64")
        stack.backend.bundle.pad = pad
        gradients.append(gradient_of(stack, make_batch()))
    assert distance(gradients[0], gradients[1]) < 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_any_split_into_micro_batches_gives_the_same_gradient(model_folder: Path, dtype: str, limit: float, mode: str) -> None:
    algorithm = Grpo(algorithms.Grpo(clip_range=0.2, aggregation=mode, horizon=8))
    whole = gradient_of(make_stack(model_folder, dtype, algorithm=algorithm), make_batch())
    for size in (1, 3, 5):
        stack = make_stack(model_folder, dtype, algorithm=algorithm, micro_batch_size=size)
        assert distance(gradient_of(stack, make_batch()), whole) < limit


def test_activations_are_computed_again(model_folder: Path) -> None:
    """Twice as many forward passes of each block, half as many kept tensors, the same gradient."""
    found: dict[bool, tuple[torch.Tensor, int, int]] = {}
    for recompute in (False, True):
        stack = make_stack(model_folder, "float64", micro_batch_size=4, activation_checkpointing=recompute)
        block = stack.backend.model.model.layers[0].mlp
        calls, kept = [0], [0]
        block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))  # noqa: B023
        count = lambda tensor: kept.__setitem__(0, kept[0] + 1) or tensor  # noqa: E731, B023
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            gradient = gradient_of(stack, make_batch())
        found[recompute] = gradient, calls[0], kept[0]
    (plain, once, many), (again, twice, few) = found[False], found[True]
    assert torch.equal(plain, again) and twice == 2 * once and few < many


def test_rows_without_advantage_are_left_out_and_change_nothing(model_folder: Path) -> None:
    advantages = (1.0, 0.0, -0.5, 0.0)
    skipping = make_stack(model_folder, "float64")
    full = make_stack(model_folder, "float64")
    full.algorithm.idle_without_advantage = False
    batch = make_batch(advantages=advantages)
    assert distance(gradient_of(skipping, batch), gradient_of(full, make_batch(advantages=advantages))) < 1e-12


def test_equal_rewards_are_a_step_with_zero_gradient(model_folder: Path) -> None:
    stack = make_stack(model_folder)
    before = {n: v.clone() for n, v in stack.backend.weights().items()}
    result = stack.train_track(make_batch(advantages=(0.0,) * 4))
    assert result.updates == 1 and result.metrics["grad_norm"] == 0 and stack.progress.version == 1
    assert all(torch.equal(v, before[n]) for n, v in stack.backend.weights().items())


def test_the_first_updates_ratio_is_exactly_one(model_folder: Path) -> None:
    for updates in (1, 2):
        stack = make_stack(model_folder, num_updates_per_batch=updates, micro_batch_size=4)
        result = stack.train_track(make_batch(rows=8))
        assert result.updates == updates
        if updates == 1:
            assert result.metrics["ratio_mean"] == result.metrics["ratio_max"] == 1.0


def test_the_anchor_stays_frozen_over_the_updates(model_folder: Path) -> None:
    stack = make_stack(model_folder, num_updates_per_batch=2)
    result = stack.train_track(make_batch(rows=8))
    assert result.metrics["ratio_max"] != 1.0, "the second update sees the policy that the first one made"


@pytest.mark.parametrize("rewards", [(math.nan,) * 4])
def test_a_batch_without_a_token_that_counts_makes_no_update(model_folder: Path, rewards: Any) -> None:
    stack = make_stack(model_folder)
    before = stack.backend.weights()
    result = stack.train_track(make_batch(rewards=rewards))
    assert result.updates == 0 and "no token" in result.reason and stack.progress.version == 0
    assert all(torch.equal(v, before[n]) for n, v in stack.backend.weights().items())


def test_a_failed_row_has_no_weight(model_folder: Path) -> None:
    """As if the row were not in the batch's denominators."""
    rewards = (1.0, math.nan, 1.0, 1.0)
    batch = make_batch(rewards=rewards, advantages=(1.0, 0.0, -1.0, 0.5))
    stack = make_stack(model_folder, "float64")
    rows = [batch.row(i) for i in range(len(batch.heads))]
    assert [float(r.mask.sum()) == 0 for r in rows[:4]][1]
    counted = sum(float(r.mask.sum()) for r in rows)
    gradient = gradient_of(stack, batch)
    plain = make_stack(model_folder, "float64")
    whole = make_batch(advantages=(1.0, 0.0, -1.0, 0.5))
    all_tokens = sum(len(whole.row(i).completion) for i in range(len(whole.heads)))
    # the model's norms work in float32, so a loss of another scale is rounded differently on its way back
    assert distance(gradient * counted / all_tokens, gradient_of(plain, whole)) < 1e-6


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_parameters(model_folder: Path) -> None:
    stack = make_stack(model_folder)
    before = {n: v.clone() for n, v in stack.backend.weights().items()}
    result = stack.train_track(make_batch(advantages=(math.inf, 1.0, 1.0, 1.0)))
    assert result.updates == 0 and stack.progress.version == 0 and "gradient norm is" in result.reason
    assert "parameters, first model." in result.reason
    assert all(torch.equal(v, before[n]) for n, v in stack.backend.weights().items())
    assert stack.train_track(make_batch()).updates == 1, "the next batch goes on"


def test_updates_must_divide_the_batch(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="num_updates_per_batch 5"):
        make_stack(model_folder, num_updates_per_batch=5).train_track(make_batch(rows=12))


def test_sft_learns_a_sequence_by_heart(model_folder: Path) -> None:
    stack = make_stack(model_folder, algorithm=CrossEntropy(algorithms.CrossEntropy()), grad_clip=1.0)
    losses = [stack.train_track(make_batch(rows=4, group=1)).metrics["loss"] for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_held_out_loss_does_not_depend_on_how_it_is_computed(model_folder: Path, mode: Any) -> None:
    """Any batches, the last one partial; any micro-batches; padded or packed: the mean over all that counts."""
    batch = make_batch(rows=10, group=1)
    algorithm = CrossEntropy(algorithms.CrossEntropy(aggregation=mode, horizon=16))
    rows = [batch.row(i) for i in range(10)]
    stack = make_stack(model_folder, "float64", algorithm=algorithm)
    with torch.no_grad():
        each = [-stack._replay([row]).log_probs for row in rows if len(row.completion)]
    wanted = {
        "token-mean": float(torch.cat(each).mean()),
        "seq-mean-token-mean": float(torch.stack([nll.mean() for nll in each]).mean()),
        "seq-mean-token-sum-norm": float(torch.stack([nll.sum() / 16 for nll in each]).mean()),
    }[mode]
    for options in ({}, {"micro_batch_size": 3}, {"micro_batch_tokens": 20, "replay": "packed"}):
        other = make_stack(model_folder, "float64", algorithm=algorithm, **options)
        before = whole(other)
        for size in (10, 4, 1):
            pieces = [piece_of(batch, low, min(10, low + size)) for low in range(0, 10, size)]
            found = [other.measure(piece) for piece in pieces]
            mean = sum(f.total for f in found) / sum(f.weight for f in found)
            assert mean == pytest.approx(wanted, rel=1e-10), (options, size)
            assert sum(f.rows for f in found) == 10 and sum(f.tokens for f in found) == len(torch.cat(each))
        after = whole(other)
        assert other.progress.version == 0 and all(torch.equal(before[n], after[n]) for n in before)
    assert stack.measure(Batch([], "policy", lambda i: [])).rows == 0
    with pytest.raises(ValueError, match="Grpo has no loss of targets"):
        make_stack(model_folder).measure(batch)


def piece_of(batch: Batch, low: int, high: int) -> Batch:
    return Batch(batch.slices[low:high], "policy", lambda i: batch.open_slice(low + i))


def test_grpo_makes_rewarded_completions_more_likely(model_folder: Path) -> None:
    batch = make_batch(rows=4, advantages=(1.0, -1.0, 0.0, 0.0))
    stack = make_stack(model_folder, grad_clip=1.0)
    rows = [batch.row(i) for i in range(2)]

    def score() -> list[float]:
        with torch.no_grad():
            return [float(stack._replay([row]).log_probs.sum()) if len(row.completion) else 0.0 for row in rows]

    before = score()
    for _ in range(10):
        stack.train_track(make_batch(rows=4, advantages=(1.0, -1.0, 0.0, 0.0)))
    after = score()
    assert after[0] > before[0] and (after[1] < before[1] or not len(rows[1].completion))


def test_batches_of_a_window_make_one_update(model_folder: Path) -> None:
    """By the mean of their gradients; one of which nothing counts is left out, wherever it comes."""
    alone = [gradient_of(make_stack(model_folder, "float64"), make_batch(seed=seed)) for seed in range(2)]
    stack = make_stack(model_folder, "float64", accumulate_rollouts=2, micro_batch_size=5)
    found = []
    stack._step = lambda norm: found.append(torch.cat([p.grad.flatten() for p in stack.parameters]))  # type: ignore
    first, second = (stack.train_track(make_batch(seed=seed)) for seed in range(2))
    assert (first.updates, second.updates, first.reason) == (0, 1, "") and "grad_norm" not in first.metrics
    assert len(found) == 1 and distance(found[0], (alone[0] + alone[1]) / 2) < 1e-10
    for order in ((0, None), (None, 0)):
        for seed in order:
            batch = make_batch(seed=0) if seed is not None else make_batch(rewards=(math.nan,) * 4, advantages=(math.nan,) * 4)
            stack.train_track(batch)
        assert distance(found[-1], alone[0]) < 1e-10
    assert len(found) == 3
    with pytest.raises(ValueError, match="accumulate_rollouts and num_updates_per_batch: give one"):
        make_stack(model_folder, accumulate_rollouts=2, num_updates_per_batch=2)


@pytest.mark.parametrize(("window", "before"), [(1, 3), (2, 3), (2, 1)])
def test_a_checkpoint_goes_on_to_the_bit(model_folder: Path, tmp_path: Path, window: int, before: int) -> None:
    """Also in the middle of a window, whose gradients are in it, and of the first one: the optimizer has made no step."""
    stack = make_stack(model_folder, accumulate_rollouts=window)
    for seed in range(before):
        stack.train_track(make_batch(seed=seed))
    position = Position(1, 6, "n.6", {"policy": stack.progress.version}, 3, (b"\x00word",))
    saver = Saver(tmp_path, stack.world)
    saver.save(position, stack.state(), {"more": b"1"})
    stack.train_track(make_batch(seed=3))  # what is written is what was there before
    saver.wait()
    found = checkpoints.newest(tmp_path)
    assert found is not None and checkpoints.position(found) == position and (found / "more").read_bytes() == b"1"
    other = make_stack(model_folder, accumulate_rollouts=window)
    other.load(found)
    other.progress.version = position.versions["policy"]
    other.train_track(make_batch(seed=3))
    for seed in range(4, 6):
        stack.train_track(make_batch(seed=seed))
        other.train_track(make_batch(seed=seed))
    mine, theirs = stack.backend.weights(), other.backend.weights()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_the_history_that_goes_on(tmp_path: Path) -> None:
    """Back to 1-2 and on, back to 2-5 and on: what was written behind those is of other histories."""
    given = (("1-1", ""), ("1-2", ""), ("1-3", ""), ("2-4", "1-2"), ("2-5", "1-2"), ("2-6", "1-2"), ("3-9", "2-5"))
    for name, base in given:
        incarnation, seq = map(int, name.split("-"))
        with saving(tmp_path, Position(incarnation, seq, "x", {}, base=base)):
            pass

    def names(*how: Any) -> list[str]:
        return [path.name for path in checkpoints.history(tmp_path, *how)]

    assert names() == names(3) == ["1-1", "1-2", "2-4", "2-5", "3-9"]
    assert names(4, "2-6") == ["1-1", "1-2", "2-4", "2-5", "2-6"] and names(4, "3-9") == names()
    assert (
        names(1) == ["1-1", "1-2", "1-3"] and names(4, "") == [] and checkpoints.newest(tmp_path, 4, "1-1") == tmp_path / "1-1"
    )
    (tmp_path / ".3-12").mkdir()
    (tmp_path / "3-11").mkdir()
    checkpoints.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name for name, _ in given)


def test_a_checkpoint_without_its_marker_does_not_exist(tmp_path: Path) -> None:
    for seq in (1, 2, 10):
        with saving(tmp_path, Position(1, seq, "x", {})):
            pass
    assert checkpoints.newest(tmp_path) == tmp_path / "1-10"
    (tmp_path / "1-10" / checkpoints.COMPLETE).unlink()
    assert checkpoints.newest(tmp_path) == tmp_path / "1-2"
    checkpoints.prune(tmp_path, 1)
    assert not (tmp_path / "1-1").exists() and (tmp_path / "1-2").exists()


def test_a_version_that_does_not_fit_is_refused_by_name(model_folder: Path) -> None:
    bundle = load(model_folder, None)
    state = own_tensors(bundle)
    assert "lm_head.weight" not in state or "model.embed_tokens.weight" not in state
    name = "model.norm.weight"
    with pytest.raises(ValueError, match=f"lacks 1 tensors, the first is {name}"):
        assign(load(model_folder, None).model, {n: v for n, v in state.items() if n != name})
    with pytest.raises(ValueError, match=f"tensor {name}"):
        assign(load(model_folder, None).model, {name: torch.zeros(3)})


def test_planner() -> None:
    assert [list(c) for c in planner.chunks(range(5), 2)] == [[0, 1], [2, 3], [4]] and planner.chunks([], 2) == []
    assert planner.updates(6, 2) == [range(3), range(3, 6)]
    shares = [list(planner.of_rank(range(7), [1] * 7, r, 3)) for r in range(3)]
    assert shares == [[0, 1, 2], [3, 4], [5, 6]] and [list(planner.of_rank(range(1), [1], r, 2)) for r in range(2)] == [
        [0],
        [],
    ]


def test_shards_hold_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}
    [(name, _)] = list(publisher.shards(state))
    assert name == "model.safetensors"
    monkeypatch.setattr(publisher, "SHARD_BYTES", 1000)
    found = dict(publisher.shards(state))
    assert list(found) == [f"model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]
    loaded = {n: v for data in found.values() for n, v in safetensors.torch.load(b"".join(data)).items()}
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[n], state[n]) for n in state)
