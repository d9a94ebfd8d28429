"""What training stacks share: the optimizer, averages, what a checkpoint holds, figures. Each owns the loss of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.tensor

from services.trainer import checkpoint
from services.trainer.aggregation import NoActiveTokens
from services.trainer.algorithms.base import Tally
from services.trainer.backend import Backend
from services.trainer.batch import Batch
from services.trainer.checkpoint import State
from services.trainer.ema import Ema
from services.trainer.optim import clip_, global_norm, lr_factor, make_optimizer
from services.trainer.world import World
from shared.config.sections import Train
from shared.wire.errors import BodyLost

T = TypeVar("T")


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


class Stack:
    """One track: its backend and optimizer."""

    batch: type[Batch] = Batch
    """What it trains on."""

    def train_track(self, batch: Any) -> StepResult:
        """All updates of a batch. 0 updates, with a reason, if nothing counts or a gradient is not finite."""
        raise NotImplementedError

    def measure(self, batch: Any) -> Any:
        """Of targets; ValueError where there is nothing of that kind."""
        raise ValueError(f"{type(self).__name__} has no loss of targets to measure")

    def __init__(self, backend: Backend, section: Train, world: World, total_steps: int, seed: int) -> None:
        self.backend, self.section, self.world = backend, section, world
        self.total, self.seed = total_steps, seed
        named = backend.named_parameters()
        self.parameters = list(named.values())
        self.optimizer = make_optimizer(named, section.optimizer)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.ema = None if section.ema is None else Ema(section.ema, named)
        self.progress = Progress()
        self.window, self.seen, self.gathered = section.accumulate_rollouts, 0, 0
        """Batches whose gradients make one update, how many of them have come, and how many of those count."""
        self.tick: Callable[[], None] = lambda: None
        """Called before every micro-batch."""

    def open(self, take: Callable[[int], T], places: Sequence[Sequence[int]]) -> list[list[T]]:
        """This rank's rows of each update, their bodies opened. BodyLost on every rank if any of them misses one."""
        rows, lost = list[list[T]](), ""
        try:
            rows = [[take(i) for i in own] for own in places]
        except BodyLost as error:
            lost = str(error)
        if self.world.largest([float(bool(lost))])[0]:
            raise BodyLost(lost or "another rank misses a body of its rows")
        return rows

    def _gradients(self, part: Any, tally: Tally) -> float:
        """Adds up the gradients of one update and returns this rank's share of its loss. NoActiveTokens if nothing counts."""
        raise NotImplementedError

    def _train(self, steps: Sequence[Any]) -> StepResult:
        """A batch's updates, or its share of the one that several batches make: each of those is a mean of its own, and they
        have one weight."""
        result, tally = StepResult(), Tally()
        losses, norms = [], []
        for part in steps:
            if not self.gathered:
                self.optimizer.zero_grad(set_to_none=False)
            try:
                loss_sum = self._gradients(part, tally)
            except NoActiveTokens as error:
                result.reason = str(error)
                continue
            self.gathered += 1
            losses += self.world.total([loss_sum])
            if self.window == 1:
                norms.append(self._update(result))
        if self.window > 1:
            self.seen += 1
            if self.seen == self.window and self.gathered:
                norms.append(self._update(result))
            self.seen %= self.window
        if self.ema is not None and result.updates:
            self.ema.batch_done(self.progress.version)
        result.metrics = self._figures(tally, losses, norms)
        if not self.gathered:
            self.optimizer.zero_grad(set_to_none=True)
        return result

    def _update(self, result: StepResult) -> float:
        """One optimizer step by the mean of what was gathered; returns the gradient norm. Left out if that is not finite."""
        self._fill_missing_gradients()
        if self.gathered > 1:
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad /= self.gathered
        self.gathered = 0
        norm = global_norm(self.parameters)
        if math.isfinite(norm):
            self._step(norm)
            result.updates += 1
        else:
            result.reason = f"the gradient norm is {norm}: {self._culprits()}"
        return norm

    def _fill_missing_gradients(self) -> None:
        """Where no row had an advantage the gradient is exactly 0, and the optimizer's momentum still moves."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _step(self, norm: float) -> None:
        clip_(self.parameters, norm, self.section.optimizer.grad_clip)
        factor = lr_factor(self.section.optimizer, self.progress.version, self.total)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        self.optimizer.step()
        if self.ema is not None:
            self.ema.stepped(self.progress.version)
        self.progress.version += 1

    def state(self) -> State:
        """What a checkpoint holds: live tensors, so that loading into them restores the stack."""
        tensors = self.backend.tensors(self.optimizer)
        if self.ema is not None:
            tensors |= {f"ema.{name}": value for name, value in self.ema.shadow.items()}
        if self.window > 1:
            self._fill_missing_gradients()
            named = self.backend.named_parameters()
            tensors |= {f"gradient.{name}": p.grad.detach() for name, p in named.items() if p.grad is not None}
        tensors["rng"] = torch.get_rng_state()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return State(tensors, {"groups": groups, "window": [self.seen, self.gathered]})

    def load(self, folder: Path) -> None:
        """From a checkpoint that any number of ranks has written. ValueError if it does not fit."""
        tensors, _ = self.state()
        with torch.no_grad():
            settings = checkpoint.load(folder, tensors, self.world)
        torch.set_rng_state(tensors["rng"])
        self.seen, self.gathered = settings.get("window", (0, 0))
        for group, saved in zip(self.optimizer.param_groups, settings["groups"], strict=True):
            group |= {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the weights are the moving average, if there is one."""
        return self._swapped() if self.ema is not None else nullcontext()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        assert self.ema is not None
        self.backend.reshard()  # what a forward pass has gathered is not what will stand in the shards
        self.ema.swap()
        try:
            yield
        finally:
            self.backend.reshard()
            self.ema.swap()

    # figures --------------------------------------------------------------------------------------------------------------

    def _culprits(self) -> str:
        """Parameters whose gradient is not finite on some rank."""
        named = self.backend.named_parameters()
        marks = self.world.largest([float(p.grad is not None and not _finite(p.grad)) for p in named.values()])
        names = [name for name, mark in zip(named, marks, strict=True) if mark]
        return f"{len(names)} parameters, first {', '.join(names[:3])}"

    def _figures(self, tally: Tally, losses: list[float], norms: list[float]) -> dict[str, float]:
        names = sorted(tally.sums)
        flat = self.world.total([v for n in names for v in tally.sums[n]]) if self._agree(names) else []
        sums = {n: (flat[2 * i], flat[2 * i + 1]) for i, n in enumerate(names)} if flat else tally.sums
        peaks = sorted(tally.maxima)
        found = self.world.largest([tally.maxima[n] for n in peaks]) if self._agree(peaks) else list(tally.maxima.values())
        out = Tally(sums, dict(zip(peaks, found, strict=False))).figures()
        if losses:
            out["loss"] = sum(losses) / len(losses)
        if norms:
            out["grad_norm"] = sum(norms) / len(norms)
        out["lr"] = float(self.optimizer.param_groups[0]["lr"])
        return out

    def _agree(self, names: list[str]) -> bool:
        """Whether all ranks tallied the same figures (one without rows has none)."""
        count = float(len(names))
        return self.world.largest([count, -count]) == [count, -count]


def _finite(grad: Any) -> bool:
    local = grad.to_local() if isinstance(grad, torch.distributed.tensor.DTensor) else grad
    return bool(torch.isfinite(local).all())
