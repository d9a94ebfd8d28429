"""The training stack: a frozen anchor, then optimizer steps over disjoint mini-batches, in micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor
from torch import Tensor

from services.trainer import planner
from services.trainer.aggregation import NoActiveTokens, loss_scale
from services.trainer.algorithms.base import Algorithm, Micro, Tally
from services.trainer.backend import Backend
from services.trainer.batch import Batch, Row
from services.trainer.optim import clip_, global_norm, lr_factor, make_optimizer
from services.trainer.world import World
from shared.config.sections import Train
from shared.models.ar.replay import replay


@dataclass
class StepResult:
    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why an update was left out."""


@dataclass
class Progress:
    """What a checkpoint keeps of the stack besides weights and optimizer state."""

    version: int = 0
    """Committed optimizer steps: the learning rate follows them."""


class TrainStack:
    """One track: its backend, algorithm and optimizer."""

    def __init__(
        self, backend: Backend, algorithm: Algorithm, section: Train, world: World, total_steps: int, temperature: float
    ) -> None:
        self.backend, self.algorithm, self.section, self.world = backend, algorithm, section, world
        self.total, self.temperature = total_steps, temperature
        self.parameters = backend.parameters()
        self.optimizer = make_optimizer(self.parameters, section.optimizer)
        self.progress = Progress()
        self.tick: Callable[[], None] = lambda: None
        """Called before every micro-batch."""

    def train_track(self, batch: Batch) -> StepResult:
        """All updates of a batch. 0 updates, with a reason, if nothing counts or a gradient is not finite."""
        result, tally = StepResult(), Tally()
        plan = planner.updates(len(batch.heads), self.section.num_updates_per_batch)
        local = [self._local(batch, rows) for rows in plan]
        anchors = [self._anchors(rows) for rows in local] if len(plan) > 1 else [None]
        losses, norms = [], []
        for rows, anchor, whole in zip(local, anchors, plan, strict=True):
            try:
                loss, norm = self._update(rows, anchor, len(whole), tally)
            except NoActiveTokens as error:
                result.reason = str(error)
                continue
            losses.append(loss)
            norms.append(norm)
            if math.isfinite(norm):
                result.updates += 1
            else:
                result.reason = f"the gradient norm is {norm}: {self._culprits()}"
        result.metrics = self._figures(tally, losses, norms)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _local(self, batch: Batch, rows: range) -> list[Row]:
        return [batch.row(i) for i in planner.of_rank(rows, self.world.rank, self.world.size)]

    def _update(self, rows: list[Row], anchor: Tensor | None, sequences: int, tally: Tally) -> tuple[float, float]:
        """One optimizer step; returns its loss and gradient norm. The step is left out if the norm is not finite."""
        active = sum(float(row.mask.sum()) for row in rows)
        live = [i for i, row in enumerate(rows) if self._computed(row)]
        micros = planner.chunks(live, self.section.micro_batch_size)
        [total] = self.world.total([active])
        [most] = self.world.largest([float(len(micros))])
        self.optimizer.zero_grad(set_to_none=False)
        loss_sum = 0.0
        if total <= 0:
            raise NoActiveTokens("no token of the step counts: every sequence is empty, masked or failed")
        for index in range(int(most)):
            chosen = micros[index] if index < len(micros) else []
            loss_sum += self._micro(rows, chosen, anchor, total, sequences, tally)
        self._fill_missing_gradients()
        norm = global_norm(self.parameters)
        if math.isfinite(norm):
            self._step(norm)
        [loss] = self.world.total([loss_sum])
        return loss, norm

    def _computed(self, row: Row) -> bool:
        """Whether the row can add to the gradient."""
        if not len(row.completion) or not row.mask.any():
            return False
        return row.advantage != 0 or not self.algorithm.idle_without_advantage

    def _micro(
        self, rows: list[Row], chosen: Sequence[int], anchor: Tensor | None, total: float, sequences: int, tally: Tally
    ) -> float:
        """Forward and backward of one micro-batch. A rank with fewer than the others runs along with weight 0."""
        self.tick()
        members = [rows[i] for i in chosen] or [_DUMMY]
        with self.backend.computing():
            new = self._replay(members)
        if not chosen:
            (new.sum() * 0).backward()  # type: ignore[no-untyped-call]
            return 0.0
        micro = _packed(members, new, None if anchor is None else _pick(rows, chosen, anchor))
        scale = loss_scale(self.algorithm.aggregation, float(micro.mask.sum()), total, len(members), sequences)
        loss = self.algorithm.loss(micro, tally) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        if micro.rollout is not None:
            gap = (new.detach() - micro.rollout).abs()
            tally.mean("rollout_gap", gap, micro.mask)
            tally.peak("rollout_gap_max", gap, micro.mask)
        return float(loss.detach())

    def _replay(self, members: Sequence[Row]) -> Tensor:
        prompts, completions = [m.prompt for m in members], [m.completion for m in members]
        return replay(self.backend.bundle, prompts, completions, self.temperature)

    @torch.no_grad()
    def _anchors(self, rows: list[Row]) -> Tensor:
        """Log-probs of the policy before the first update, over the micro-batches that training uses, packed by row."""
        live = [i for i, row in enumerate(rows) if self._computed(row)]
        micros = planner.chunks(live, self.section.micro_batch_size)
        [most] = self.world.largest([float(len(micros))])
        lengths = [len(row.completion) for row in rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        out = torch.zeros(int(starts[-1]))
        for index in range(int(most)):
            chosen = micros[index] if index < len(micros) else []
            with self.backend.computing():
                new = self._replay([rows[i] for i in chosen] or [_DUMMY])
            if chosen:
                place = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
                out = out.to(new.dtype)
                out[torch.from_numpy(place)] = new.cpu()
        return out

    def _fill_missing_gradients(self) -> None:
        """Where no row had an advantage the gradient is exactly 0, and the optimizer's momentum still moves."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _step(self, norm: float) -> None:
        clip_(self.parameters, norm, self.section.optimizer.grad_clip)
        lr = self.section.optimizer.lr * lr_factor(self.section.optimizer, self.progress.version, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.progress.version += 1

    def _culprits(self) -> str:
        names = [n for n, p in self.backend.model.named_parameters() if p.grad is not None and not _finite(p.grad)]
        return f"{len(names)} parameters, first {', '.join(names[:3])}"

    def _figures(self, tally: Tally, losses: list[float], norms: list[float]) -> dict[str, float]:
        names = sorted(tally.sums)
        flat = self.world.total([v for n in names for v in tally.sums[n]]) if self._agree(names) else []
        sums = {n: (flat[2 * i], flat[2 * i + 1]) for i, n in enumerate(names)} if flat else tally.sums
        peaks = sorted(tally.maxima)
        found = self.world.largest([tally.maxima[n] for n in peaks]) if self._agree(peaks) else list(tally.maxima.values())
        out = Tally(sums, dict(zip(peaks, found, strict=False))).figures()
        if losses:
            out |= {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}
        out["lr"] = float(self.optimizer.param_groups[0]["lr"])
        return out

    def _agree(self, names: list[str]) -> bool:
        """Whether all ranks tallied the same figures (one without rows has none)."""
        count = float(len(names))
        return self.world.largest([count, -count]) == [count, -count]


_DUMMY = Row(
    prompt=np.zeros(1, np.int32),
    completion=np.zeros(1, np.int32),
    mask=np.zeros(1, np.float32),
    rollout=None,
    advantage=0.0,
)


def _packed(members: Sequence[Row], new: Tensor, anchor: Tensor | None) -> Micro:
    device = new.device
    rollout = None
    if all(m.rollout is not None for m in members):
        rollout = torch.from_numpy(np.concatenate([m.rollout for m in members])).to(device)
    return Micro(
        new=new,
        anchor=new.detach() if anchor is None else anchor.to(device),
        rollout=rollout,
        advantages=torch.tensor([m.advantage for m in members], dtype=new.dtype, device=device),
        mask=torch.from_numpy(np.concatenate([m.mask for m in members])).to(device),
        lengths=torch.tensor([len(m.completion) for m in members]),
    )


def _pick(rows: list[Row], chosen: Sequence[int], anchor: Tensor) -> Tensor:
    starts = np.concatenate([[0], np.cumsum([len(row.completion) for row in rows])])
    index = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
    return anchor[torch.from_numpy(index)]


def _finite(grad: Any) -> bool:
    local = grad.to_local() if isinstance(grad, torch.distributed.tensor.DTensor) else grad
    return bool(torch.isfinite(local).all())
