"""Training on the forward process: clean samples are noised again, at times of the loss's own. No step needs to have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.trainer.algorithms.base import Tally
from services.trainer.algorithms.diffusion_nft import Noised
from services.trainer.flow_batch import FlowRow
from services.trainer.flow_stack import FlowStack, Work
from shared.models import lora
from shared.models.ar.bundle import where
from shared.sde.loop import step_noise


class ForwardStack(FlowStack):
    """One denoising track under DiffusionNFT. The old policy is the average that rollouts sampled from: its velocities are
    computed before the first update, over the micro-batches that training uses."""

    times: Tensor
    """Of this batch, the same on every rank."""
    begun: int
    """The version before the first update."""

    def _freeze(self, work: Sequence[Work]) -> None:
        self.begun = self.progress.version
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.begun)  # the loss may draw a time
            self.times = self.algorithm.times(torch.tensor(work[0].spare.sigmas, dtype=torch.float32))
        with torch.no_grad(), self.averaged():
            for own in work:
                own.anchors = [self._old(members or [own.spare]) for members in self._all(own)]

    def _old(self, rows: Sequence[FlowRow]) -> Tensor:
        """[times, B, *latent]."""
        self.tick()
        velocity = self._velocity(rows, self.backend.model)
        with self.backend.computing():
            return torch.stack([velocity(noised.noisy, noised.at.expand(len(rows))) for noised in self._noised(rows)]).float()

    def _micro(self, work: Work, members: list[FlowRow], anchor: Any, tally: Tally, last: bool) -> float:
        """Forward and backward of one micro-batch, a time at a time; returns its share of the update's loss."""
        rows = members or [work.spare]
        velocity, total = self._velocity(rows, self.backend.model), 0.0
        advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=where())
        for k, noised in enumerate(self._noised(rows)):
            self.tick()
            self.backend.sync(last and k == len(self.times) - 1)
            reference = self._far(rows, noised) if self.algorithm.needs_reference else None
            with self.backend.computing():
                new = velocity(noised.noisy, noised.at.expand(len(rows))).float()
            if not members:
                (new.sum() * 0).backward()  # type: ignore[no-untyped-call]
                continue
            loss = self.algorithm.loss(noised, new, anchor[k], reference, advantages, tally)
            loss = loss * (len(rows) / work.total / len(self.times))
            loss.backward()
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def _far(self, rows: Sequence[FlowRow], noised: Noised) -> Tensor:
        """The reference's velocities."""
        at = noised.at.expand(len(rows))
        with self.backend.computing():
            if self.reference is not None:
                return self._velocity(rows, self.reference)(noised.noisy, at).float()
            with lora.using(self.backend.model, None):
                return self._velocity(rows, self.backend.model)(noised.noisy, at).float()

    def _noised(self, rows: Sequence[FlowRow]) -> list[Noised]:
        """The rows' clean samples at each time, with noise by sample, time and version: the same whoever computes them."""
        clean = torch.stack([row.latents[-1] for row in rows]).float()
        names = [f"{row.name}@{self.begun}" for row in rows]
        drawn = [step_noise(self.seed, k, names, tuple(clean.shape[1:])) for k in range(len(self.times))]
        device = where()
        return [
            Noised.of(clean.to(device), at.to(device), noise.to(device)) for at, noise in zip(self.times, drawn, strict=True)
        ]
