"""Training of denoising policies: stored transitions are scored again on the live model, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.trainer import planner
from services.trainer.aggregation import NoActiveTokens
from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.flow import FlowMicro, step_stds
from services.trainer.backend import Backend
from services.trainer.base_stack import Stack, StepResult
from services.trainer.flow_batch import FlowBatch, FlowRow
from services.trainer.world import World
from shared.config.sections import Train
from shared.models import lora
from shared.models.ar.bundle import where
from shared.models.diffusion.family import Conditions, Family
from shared.sde import loop
from shared.sde.loop import Replayed


@dataclass
class Anchor:
    """Of one micro-batch, before the first update."""

    log_probs: Tensor
    means: Tensor


@dataclass
class Work:
    """One update's share of this rank."""

    micros: list[list[FlowRow]]
    most: int
    """Micro-batches of the rank that has the most: the others run along, so that their collectives meet."""
    total: float
    """Rows of the update that count, on all ranks."""
    spare: FlowRow
    """What a rank runs along with."""
    anchors: list[Any] | None = None
    """By micro-batch, what the update is held against."""


class FlowStack(Stack):
    """One denoising track."""

    batch = FlowBatch

    def __init__(
        self,
        backend: Backend,
        family: Family,
        algorithm: Any,
        section: Train,
        world: World,
        total_steps: int,
        reference: Any = None,
        seed: int = 0,
        teachers: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            reference: the frozen model of a KL; None with adapters means the model without them.
            teachers: those of a distillation, by the domain of the prompts that they teach.
        """
        super().__init__(backend, section, world, total_steps, seed)
        self.family, self.algorithm, self.reference = family, algorithm, reference
        self.teachers = dict(teachers or {})
        if algorithm.needs_reference and reference is None and not self.teachers and not lora.has_adapter(backend.model):
            raise ValueError("the algorithm compares with a reference: give the stack one")
        if section.micro_batch_tokens is not None:
            raise ValueError("micro_batch_tokens: pictures have no tokens; give micro_batch_size")

    def train_track(self, batch: FlowBatch) -> StepResult:
        """All updates of a batch. 0 updates, with a reason, if nothing counts or a gradient is not finite.

        ValueError for rows of different schedules: one forward pass is at one sigma.
        """
        if not batch.heads:
            return replace(self._train([]), reason="the batch has no row")
        work = self._plan(batch, self.section.num_updates_per_batch)
        self._freeze(work)
        found, drawn = self._train(work), work[0].spare.indices
        if drawn:
            found.metrics |= {"sde_step_first": float(drawn[0]), "sde_step_last": float(drawn[-1])}
        return found

    def _freeze(self, work: Sequence[Work]) -> None:
        """What the updates are held against. With one update its own forward pass has it."""
        if len(work) > 1:
            for own in work:
                own.anchors = [self._anchor(members or [own.spare]) for members in self._all(own)]

    def _plan(self, batch: FlowBatch, count: int) -> list[Work]:
        """Updates, this rank's rows of each, and their micro-batches. The same on every rank, but for whose rows are opened."""
        order = list(range(len(batch.heads)))
        if self.section.shuffle_updates and count > 1:
            order = planner.shuffled(len(order), self.seed, self.progress.version)
        found, sizes = [], [1] * len(batch.heads)
        updates = [sorted(order[i] for i in places) for places in planner.updates(len(order), count)]
        own = [planner.of_rank(chosen, sizes, self.world.rank, self.world.size) for chosen in updates]
        runs_along = [] if any(own) else [0]  # without a row of its own
        *opened, spares = self.open(batch.flow_row, [*own, runs_along])
        spare = [*(row for rows in opened for row in rows), *spares][0]
        self._one_schedule([row for rows in opened for row in rows] or spares)
        for chosen, mine in zip(updates, opened, strict=True):
            counted = float(sum(batch.heads[i].counts for i in chosen))
            rows = [row for row in mine if row.counts]
            micros = [list(c) for some in self._taught(rows) for c in planner.chunks(some, self.section.micro_batch_size)]
            [most] = self.world.largest([float(len(micros))])
            found.append(Work(micros, int(most), counted, spare))
        return found

    def _one_schedule(self, rows: Sequence[FlowRow]) -> None:
        """ValueError, on every rank, unless all rows share theirs: a forward pass is at one sigma."""
        marks = [float(zlib.crc32(repr(row.schedule).encode())) for row in rows]
        high, low = self.world.largest([max(marks), -min(marks)])
        if high != -low:
            raise ValueError("rows of a batch differ in their sigmas, steps that draw, guidance or size: they must share them")

    def _taught(self, rows: list[FlowRow]) -> list[list[FlowRow]]:
        """All of them, or those of each domain, which has a teacher of its own."""
        if not self.teachers:
            return [rows]
        return [[row for row in rows if row.domain == domain] for domain in dict.fromkeys(row.domain for row in rows)]

    def _all(self, work: Work) -> Iterator[list[FlowRow]]:
        """The micro-batches, and so many of nothing that all ranks have as many."""
        yield from work.micros
        yield from ([] for _ in range(work.most - len(work.micros)))

    @torch.no_grad()
    def _anchor(self, members: list[FlowRow]) -> Anchor:
        """Over the micro-batches that training uses: the first ratio is exactly 1."""
        self.tick()
        found = self._replay(members, self.backend.model)
        return Anchor(found.log_probs, found.means)

    # one update -----------------------------------------------------------------------------------------------------------

    def _gradients(self, part: Work, tally: Tally) -> float:
        if part.total <= 0:
            raise NoActiveTokens("no picture of the step counts: every reward failed")
        loss = 0.0
        for number, members in enumerate(self._all(part)):
            anchor = None if part.anchors is None else part.anchors[number]
            loss += self._micro(part, members, anchor, tally, number == part.most - 1)
        return loss

    def _micro(self, work: Work, members: list[FlowRow], anchor: Any, tally: Tally, last: bool) -> float:
        """Forward and backward of one micro-batch, a step that drew at a time (memory of one forward pass), unless the loss
        needs them together; returns its share of the update's loss."""
        rows = members or [work.spare]
        steps = range(len(rows[0].indices))
        groups = [list(steps)] if self.algorithm.joint or self.section.steps_at_once else [[k] for k in steps]
        total = 0.0
        for chosen in groups:
            self.tick()
            self.backend.sync(last and chosen is groups[-1])
            reference = self._referenced(rows, chosen) if self.algorithm.needs_reference else None
            found = self._replay(rows, self.backend.model, chosen)
            if not members:
                (found.log_probs.sum() * 0).backward()  # type: ignore[no-untyped-call]
                continue
            micro = self._packed(rows, chosen, found, anchor, reference)
            share = len(chosen) / len(steps) * len(rows) / work.total
            loss = self.algorithm.loss(micro, tally) * share
            loss.backward()
            total += float(loss.detach())
            if micro.rollout is not None:
                gap = (micro.new.detach() - micro.rollout).abs()
                tally.mean("rollout_gap", gap)
                tally.peak("rollout_gap_max", gap, torch.ones_like(gap))
        return total

    def _packed(
        self, rows: Sequence[FlowRow], chosen: Sequence[int], found: Replayed, anchor: Anchor | None, reference: Replayed | None
    ) -> FlowMicro:
        first, device = rows[0], found.log_probs.device
        sigmas = torch.tensor(first.sigmas, dtype=torch.float32, device=device)
        steps = [first.indices[k] for k in chosen]
        places = torch.tensor(steps, device=device)
        scores = [row.rollout for row in rows]
        rollout = None if any(s is None for s in scores) else torch.stack([s[list(chosen)] for s in scores if s is not None])
        return FlowMicro(
            new=found.log_probs,
            anchor=found.log_probs.detach() if anchor is None else anchor.log_probs[:, list(chosen)],
            means=found.means,
            stds=step_stds(first.params.kernel, sigmas, steps, first.params.eta),
            advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
            anchor_means=found.means.detach() if anchor is None else anchor.means[:, list(chosen)],
            reference_means=None if reference is None else reference.means,
            velocities=found.velocities,
            reference_velocities=None if reference is None else reference.velocities,
            gaps=sigmas[places] - sigmas[places + 1],
            rollout=None if rollout is None else rollout.to(device),
            progress=self.progress.version / max(1, self.total),
        )

    @torch.no_grad()
    def _referenced(self, rows: Sequence[FlowRow], chosen: Sequence[int]) -> Replayed:
        if self.teachers:
            name = self.algorithm.teacher([row.domain for row in rows])
            return self._replay(rows, self.teachers[name], chosen, self.algorithm.params.guidance_scales.get(name))
        if self.reference is not None:
            return self._replay(rows, self.reference, chosen)
        with lora.using(self.backend.model, None):
            return self._replay(rows, self.backend.model, chosen)

    def _velocity(self, rows: Sequence[FlowRow], model: Any, scale: float | None = None) -> loop.Velocity:
        """Of the model for these rows' conditions; `scale`: another guidance than that of the rollout."""
        first, device = rows[0], where()
        scales = first.params.guidance_scales if scale is None else (scale, None)
        cond = self.family.stacked([row.conditions for row in rows], device)
        negative = None if first.negative is None else self.family.stacked([row.negative or {} for row in rows], device)

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            """Of the rows, or of all of them again and again (steps that are scored at once)."""
            own, against = _again(cond, len(x) // len(rows)), negative and _again(negative, len(x) // len(rows))
            return self.family.predict(model, x.float(), sigma, own, against, *scales)

        return velocity

    def _replay(
        self, rows: Sequence[FlowRow], model: Any, chosen: Sequence[int] | None = None, scale: float | None = None
    ) -> Replayed:
        """Scores these of the steps that drew (None: all), in their order."""
        first, device = rows[0], where()
        steps = first.indices if chosen is None else [first.indices[k] for k in chosen]
        velocity = self._velocity(rows, model, scale)
        latents = torch.stack([row.latents for row in rows]).to(device)
        sigmas = torch.tensor(first.sigmas, dtype=torch.float32, device=device)
        with self.backend.computing():
            how: Any = (first.positions, sigmas, first.params.kernel, first.params.eta, steps, self.section.steps_at_once)
            return loop.replay(velocity, latents, *how)


def _again(cond: Conditions, times: int) -> Conditions:
    return cond if times == 1 else {n: v.repeat(times, *[1] * (v.dim() - 1)) for n, v in cond.items()}
