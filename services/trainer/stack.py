"""The training stack: a frozen anchor, then optimizer steps over disjoint mini-batches, in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed.tensor
from torch import Tensor

from services.trainer import planner
from services.trainer.aggregation import NoActiveTokens, loss_scale
from services.trainer.algorithms.base import Algorithm, Micro, Tally
from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.algorithms.policy import drift
from services.trainer.backend import Backend
from services.trainer.base_stack import Stack, StepResult
from services.trainer.batch import Batch, Row
from services.trainer.frozen import Frozen, critic_targets
from services.trainer.world import World
from shared.config.sections import Train
from shared.models import lora
from shared.models.ar.bundle import Bundle
from shared.models.ar.replay import Replayed, replay


class Measures(NamedTuple):
    """The loss of a batch of targets, on all ranks."""

    rows: int
    total: float
    weight: float
    """`total / weight` is the mean loss, also over several batches."""
    tokens: float
    """Those that count."""


@dataclass
class Work:
    """One update's share of this rank."""

    rows: list[Row]
    micros: list[list[int]]
    """Places in `rows` of those that are computed."""
    most: int
    """Micro-batches of the rank that has the most: the others run along."""
    sequences: int
    """Rows of the whole update, on all ranks."""


Part = tuple[Work, Frozen | None]


class TrainStack(Stack):
    """Of tokens: completions of a prompt under an autoregressive model."""

    def __init__(
        self,
        backend: Backend,
        algorithm: Algorithm,
        section: Train,
        world: World,
        total_steps: int,
        temperature: float,
        reference: Bundle | None = None,
        seed: int = 0,
    ) -> None:
        """`reference`: the frozen model of a KL or a distillation; None with adapters means the model without them."""
        super().__init__(backend, section, world, total_steps, seed)
        self.algorithm, self.temperature, self.reference = algorithm, temperature, reference
        self.packed = section.replay == "packed"
        if algorithm.needs_reference and reference is None and not lora.has_adapter(backend.model):
            raise ValueError("the algorithm compares with a reference: give the stack one")

    def train_track(self, batch: Batch) -> StepResult:
        """All updates of a batch. 0 updates, with a reason, if nothing counts or a gradient is not finite."""
        work = self._plan(batch)
        return self._train(list(zip(work, self._freeze(work), strict=True)))

    @torch.no_grad()
    def measure(self, batch: Batch) -> Measures:
        """Without training: over all rows, whatever their number. ValueError for an algorithm that has no loss of targets."""
        if not isinstance(self.algorithm, CrossEntropy):
            raise ValueError(f"{type(self.algorithm).__name__} has no loss of targets to measure")
        lengths = [head.length for head in batch.heads]
        own = planner.of_rank(range(len(lengths)), lengths, self.world.rank, self.world.size)
        [rows] = self.open(batch.row, [own])
        work = self._work(rows, len(lengths))
        sums = [0.0, 0.0, 0.0]
        for index in range(work.most):
            chosen = work.micros[index] if index < len(work.micros) else []
            self.tick()
            members = [work.rows[i] for i in chosen]
            found = self._replay(members or [_DUMMY])
            if members:
                micro = _packed(members, found)
                total, weight = self.algorithm.measure(micro)
                sums = [s + v for s, v in zip(sums, (total, weight, float((micro.mask > 0).sum())), strict=True)]
        return Measures(len(lengths), *self.world.total(sums))

    # planning -------------------------------------------------------------------------------------------------------------

    def _plan(self, batch: Batch) -> list[Work]:
        """Updates, this rank's rows of each, and their micro-batches. The same on every rank, but for whose rows are opened."""
        count, lengths = self.section.num_updates_per_batch, [head.length for head in batch.heads]
        order = list(range(len(lengths)))
        if self.section.shuffle_updates and count > 1:
            order = planner.shuffled(len(order), self.seed, self.progress.version)
        updates = [sorted(order[i] for i in places) for places in planner.updates(len(order), count)]
        own = [planner.of_rank(whole, lengths, self.world.rank, self.world.size) for whole in updates]
        opened = self.open(batch.row, own)
        return [self._work(rows, len(whole)) for rows, whole in zip(opened, updates, strict=True)]

    def _work(self, rows: list[Row], sequences: int) -> Work:
        live = [i for i, row in enumerate(rows) if self._computed(row)]
        sizes = [planner.Size(len(rows[i].prompt), len(rows[i].completion)) for i in live]
        budget, kind = self.section.micro_batch_tokens, self.section.micro_batch_cost
        if budget is None:
            micros = [list(chunk) for chunk in planner.chunks(live, self.section.micro_batch_size)]
        else:
            micros = [[live[i] for i in micro] for micro in planner.first_fit_decreasing(sizes, budget, kind)]
        [most] = self.world.largest([float(len(micros))])
        if budget is not None and len(micros) < most <= len(live):  # all ranks have as many, so nobody idles
            micros = [[live[i] for i in micro] for micro in planner.balance_into(sizes, int(most), kind)]
        return Work(rows, micros, int(most), sequences)

    def _computed(self, row: Row) -> bool:
        """Whether the row can add to the gradient."""
        if not len(row.completion) or not row.mask.any():
            return False
        return row.advantage != 0 or not self.algorithm.idle_without_advantage

    # before the first update ----------------------------------------------------------------------------------------------

    def _freeze(self, work: Sequence[Work]) -> list[Frozen | None]:
        """What the updates are held against: log-probs and values of the policy before the first, over the micro-batches that
        training uses. With one update and no critic the update's own forward pass has them."""
        critic = "values" in self.algorithm.anchor_fields
        if not critic and (len(work) == 1 or not self.algorithm.anchor_fields):
            return [None] * len(work)
        frozen: list[Frozen | None] = [self._frozen(own) for own in work]
        if critic:
            critic_targets(frozen, work, self.algorithm, self.world)
        return frozen

    @torch.no_grad()
    def _frozen(self, work: Work) -> Frozen:
        out = Frozen.empty(work.rows)
        for index in range(work.most):
            chosen = work.micros[index] if index < len(work.micros) else []
            self.tick()
            found = self._replay([work.rows[i] for i in chosen] or [_DUMMY])
            if chosen:
                out.put(chosen, found.log_probs, found.values)
        return out

    # one update -----------------------------------------------------------------------------------------------------------

    def _gradients(self, part: Part, tally: Tally) -> float:
        work, frozen = part
        [total] = self.world.total([sum(float(row.mask.sum()) for row in work.rows)])
        if total <= 0:
            raise NoActiveTokens("no token of the step counts: every sequence is empty, masked or failed")
        loss_sum = 0.0
        for index in range(work.most):
            chosen = work.micros[index] if index < len(work.micros) else []
            self.backend.sync(index == work.most - 1)
            loss_sum += self._micro(work, chosen, frozen, total, tally)
        return loss_sum

    def _micro(self, work: Work, chosen: Sequence[int], frozen: Frozen | None, total: float, tally: Tally) -> float:
        """Forward and backward of one micro-batch; returns its share of the step's loss.

        A rank with fewer than the others runs along with weight 0.
        """
        self.tick()
        members = [work.rows[i] for i in chosen] or [_DUMMY]
        reference = self._reference(members) if self.algorithm.needs_reference else None
        found = self._replay(members)
        if not chosen:
            unused = found.log_probs.sum() if found.values is None else found.log_probs.sum() + found.values.sum()
            (unused * 0).backward()  # type: ignore[no-untyped-call]
            return 0.0
        micro = _packed(members, found)
        micro.reference = reference
        micro.progress = self.progress.version / max(1, self.total)
        if frozen is not None:
            frozen.fill(micro, chosen)
        scale = loss_scale(self.algorithm.aggregation, float(micro.mask.sum()), total, len(members), work.sequences)
        loss = self.algorithm.loss(micro, tally) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        if micro.rollout is not None:
            _drift(micro, tally)
        return float(loss.detach())

    def _replay(self, members: Sequence[Row], bundle: Bundle | None = None) -> Replayed:
        own = self.backend.bundle if bundle is None else bundle
        prompts, completions = [m.prompt for m in members], [m.completion for m in members]
        entropy = bundle is None and self.algorithm.needs_entropy and torch.is_grad_enabled()
        with self.backend.computing():
            return replay(own, prompts, completions, self.temperature, self.packed, entropy)

    @torch.no_grad()
    def _reference(self, members: Sequence[Row]) -> Tensor:
        if self.reference is not None:
            return self._replay(members, self.reference).log_probs
        with lora.using(self.backend.model, None):
            return self._replay(members).log_probs


_DUMMY = Row(
    prompt=np.zeros(1, np.int32),
    completion=np.zeros(1, np.int32),
    mask=np.zeros(1, np.float32),
    rollout=None,
    advantage=0.0,
)


def _packed(members: Sequence[Row], found: Replayed) -> Micro:
    new = found.log_probs
    device = new.device
    rollout = None
    if all(m.rollout is not None for m in members):
        rollout = torch.from_numpy(np.concatenate([m.rollout for m in members])).to(device)
    return Micro(
        new=new,
        anchor=new.detach(),
        rollout=rollout,
        advantages=torch.tensor([m.advantage for m in members], dtype=new.dtype, device=device),
        mask=torch.from_numpy(np.concatenate([m.mask for m in members])).to(device),
        lengths=torch.tensor([len(m.completion) for m in members]),
        entropy=found.entropy,
        values=found.values,
    )


def _drift(micro: Micro, tally: Tally) -> None:
    """Rollout against replay: means over tokens, and what is furthest."""
    assert micro.rollout is not None
    active = micro.mask[micro.mask > 0]
    if not len(active):
        return
    figures = drift(micro.new, micro.rollout, micro.mask)
    for name in ("rollout_gap", "k3_mean", "k3_p99"):
        if name in figures:
            tally.mean(name, torch.full_like(active, figures[name], dtype=torch.float64))
    tally.peak("rollout_gap_max", torch.full_like(active, figures["rollout_gap_max"], dtype=torch.float64), active)
