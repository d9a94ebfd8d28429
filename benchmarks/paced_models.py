"""The implementations of `benchmarks.paced`."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from services.trainer.algorithms.flow_grpo import FlowGrpo
from services.trainer.algorithms.grpo import Grpo
from shared.engines import diffusers, transformers
from shared.engines.batching import Held, Item


def _slowed(engine: Any, pace_s: float) -> Any:
    """Its batches end no sooner than `pace_s` after they began, all slices together."""
    generate = engine.generate

    def slow(batch: list[Item], held: Held) -> None:
        until = time.monotonic() + pace_s
        held.maybe = lambda now: None  # type: ignore[method-assign]
        generate(batch, held)
        time.sleep(max(0.0, until - time.monotonic()))

    engine.generate = slow
    return engine


def paced_transformers(recipe: dict[str, Any], files: Any, weights: Any, params: Any) -> Any:
    return _slowed(transformers(recipe, files, weights, params), params.pace_s)


def paced_diffusers(recipe: dict[str, Any], files: Any, weights: Any, params: Any) -> Any:
    return _slowed(diffusers(recipe, files, weights, params), params.pace_s)


class Pace:
    """The calls of one step end at even times."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s, self.until = pace_s, 0.0

    def wait(self) -> None:
        now = time.monotonic()
        if now > self.until + self.pace_s:  # the first one of a step
            self.until = now
        self.until += self.pace_s
        time.sleep(max(0.0, self.until - now))


class Paced:
    """Before an algorithm: each of its losses takes its share of the time."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)  # type: ignore[call-arg]
        self.pace = Pace(params.pace_s)

    def loss(self, *given: Any) -> Tensor:
        self.pace.wait()
        found: Tensor = super().loss(*given)  # type: ignore[misc]
        return found


class PacedGrpo(Paced, Grpo): ...


class PacedFlowGrpo(Paced, FlowGrpo): ...
