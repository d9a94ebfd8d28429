"""Imitation of pictures: the squared error of the velocity at random times, on latents that the pipeline's own VAE makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.flow_matching import squared_errors
from services.trainer.flow_batch import FlowBatch, FlowRow
from services.trainer.flow_stack import FlowStack, Work
from services.trainer.stack import Measures
from shared.models.ar.bundle import where
from shared.models.diffusion.family import Conditions, opened, pixels_of

MOST_KEPT = 1 << 30
"""Bytes of encoded pictures and prompts that a rank keeps: in later epochs they need not be encoded again."""


class PictureStack(FlowStack):
    """One denoising track that imitates. `pipe`: the whole pipeline, whose encoders are not trained."""

    def __init__(self, pipe: Any, *given: Any) -> None:
        super().__init__(*given)
        self.pipe = pipe
        self.latents: dict[tuple[str, int, int], Tensor] = {}
        self.prompts: dict[tuple[str, str, int, int], Conditions] = {}
        self.kept = 0

    def _freeze(self, work: Sequence[Work]) -> None:
        """Nothing: targets are held against nothing."""

    def _micro(self, work: Work, members: list[FlowRow], anchor: Any, tally: Tally, last: bool) -> float:
        self.tick()
        self.backend.sync(last)
        rows = members or [work.spare]
        velocity, clean, noise = self._velocities(rows, [f"{row.name}@{self.progress.version}" for row in rows])
        if not members:
            (velocity.sum() * 0).backward()  # type: ignore[no-untyped-call]
            return 0.0
        loss = self.algorithm.loss(velocity, clean, noise, tally) * (len(rows) / work.total)
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def measure(self, batch: FlowBatch) -> Measures:
        """Of held-out pictures: times and noise by their names alone, so that losses compare across steps."""
        if not batch.heads:
            return Measures(0, 0.0, 0.0, 0.0)
        [work] = self._plan(batch, 1)
        total, count = 0.0, 0
        for members in self._all(work):
            self.tick()
            rows = members or [work.spare]
            errors = squared_errors(*self._velocities(rows, [row.name for row in rows]))
            total += float(errors.sum()) if members else 0.0
            count += len(members)
        sums = self.world.total([total, float(count)])
        return Measures(len(batch.heads), sums[0], sums[1], 0.0)

    def _velocities(self, rows: Sequence[FlowRow], keys: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """(velocities, clean latents, noise), float32."""
        device = where()
        clean = torch.stack([self._clean(row) for row in rows])
        times, noise = self.algorithm.evaluation(self.seed, keys, tuple(clean.shape[1:]))
        clean, times, noise = clean.to(device), times.to(device), noise.to(device)
        wide = times.reshape(-1, *[1] * (clean.dim() - 1))
        cond = self.family.stacked([self._encoded(row) for row in rows], device)
        with self.backend.computing():
            noisy = (1 - wide) * clean + wide * noise
            velocity = self.family.predict(self.backend.model, noisy, times, cond, None, self.family.unguided)
        return velocity.float(), clean, noise

    @torch.no_grad()
    def _clean(self, row: FlowRow) -> Tensor:
        """[*latent], on the CPU. ValueError for a file that is no picture."""
        key = (row.picture, row.params.height, row.params.width)
        if (found := self.latents.get(key)) is not None:
            return found
        pixels = pixels_of(self.pipe, [opened(*key)])
        found = self.family.clean(self.pipe, pixels)[0].float().cpu()
        if self._room(found.nbytes):
            self.latents[key] = found
        return found

    @torch.no_grad()
    def _encoded(self, row: FlowRow) -> Conditions:
        key = (row.words, row.reference, row.params.height, row.params.width)
        if (found := self.prompts.get(key)) is not None:
            return found
        pictures = [opened(*key[1:])] if row.reference else []
        found = {name: value.cpu() for name, value in self.family.encode(self.pipe, [row.words], pictures).items()}
        if self._room(sum(value.nbytes for value in found.values())):
            self.prompts[key] = found
        return found

    def _room(self, size: int) -> bool:
        """Whether so many bytes more are kept."""
        fits = self.kept + size <= MOST_KEPT
        self.kept += size if fits else 0
        return fits
