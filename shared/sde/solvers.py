"""Deterministic multistep solvers, for evaluation: no log-prob, fewer steps. Golden topic 5."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal, Protocol

import torch
from torch import Tensor


class Solver(Protocol):
    def step(self, index: int, sample: Tensor, velocity: Tensor) -> Tensor:
        """From sigma number `index` to the next one; float32 [B, *latent]."""
        ...


def _checked(sigmas: Tensor) -> Tensor:
    """ValueError for a schedule that is no list of at least two sigmas."""
    if sigmas.dim() != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas of shape {list(sigmas.shape)}: must be a list of at least 2")
    return sigmas.float().cpu()


class Dpm2:
    """Second-order multistep DPM-Solver++ (arXiv 2211.01095) on `lambda = ln(1 - s) - ln s`; the first and the last step are of
    first order."""

    def __init__(self, sigmas: Tensor) -> None:
        self.sigmas = _checked(sigmas)
        self.before: tuple[int, Tensor] | None = None
        """(index, x0 found there) of the step before."""

    def _lambda(self, index: int) -> float:
        s = float(self.sigmas[index].double())
        if s <= 0:
            return math.inf
        return -math.inf if s >= 1 else math.log1p(-s) - math.log(s)

    def step(self, index: int, sample: Tensor, velocity: Tensor) -> Tensor:
        x, v = sample.float(), velocity.float()
        s, after = float(self.sigmas[index].double()), float(self.sigmas[index + 1].double())
        clean = x - s * v
        before, self.before = self.before, (index, clean)
        first = before is None or before[0] != index - 1
        if first or index == len(self.sigmas) - 2:
            return (1 - after) * clean + after * (x - (1 - s) * clean) / s
        assert before is not None
        h = self._lambda(index + 1) - self._lambda(index)
        h_before = self._lambda(index) - self._lambda(index - 1)
        correction = (h / (2 * h_before)) * (clean - before[1])
        return (after / s) * x - (1 - after) * math.expm1(-h) * (clean + correction)


class UniPC:
    """Predictor and corrector of any order (arXiv 2302.04867) on predicted x0. A gap in the steps begins a new history."""

    def __init__(
        self,
        sigmas: Tensor,
        order: int = 2,
        kind: Literal["bh1", "bh2"] = "bh2",
        lower_order_final: bool = True,
        disable_corrector: Collection[int] = (),
    ) -> None:
        """ValueError for an order below 1 or an unknown kind."""
        if order < 1:
            raise ValueError(f"order {order}: must be at least 1")
        if kind not in ("bh1", "bh2"):
            raise ValueError(f"kind {kind!r}: legal are bh1, bh2")
        self.sigmas, self.order, self.kind = _checked(sigmas), order, kind
        self.lower_order_final, self.disabled = lower_order_final, frozenset(disable_corrector)
        self._reset()

    def _reset(self) -> None:
        self.cleans: dict[int, Tensor] = {}
        self.expected, self.done, self.used = -1, 0, 1
        self.sample: Tensor | None = None
        """The corrected input of the step before."""

    def step(self, index: int, sample: Tensor, velocity: Tensor) -> Tensor:
        if index != self.expected:
            self._reset()
        x = sample.float()
        clean = x - self.sigmas[index].to(x.device) * velocity.float()
        if self.sample is not None and index - 1 not in self.disabled:
            x = self._advance(index - 1, self.sample, self.used, clean)
        self.cleans[index] = clean
        left = len(self.sigmas) - 1 - index
        self.used = min(self.order, left if self.lower_order_final else self.order, self.done + 1)
        after = self._advance(index, x, self.used, None)
        self.sample, self.done, self.expected = x, self.done + 1, index + 1
        if left == 1:
            self._reset()
        return after

    def _lambda(self, index: int) -> float:
        s = self.sigmas[index]
        return math.log(max(float(1 - s), 1e-12)) - math.log(max(float(s), 1e-12))

    def _advance(self, a: int, x: Tensor, order: int, corrected: Tensor | None) -> Tensor:
        """From anchor `a` to a + 1. `corrected`: the x0 found at a + 1, which makes it the corrector."""
        own, s, after = self.cleans[a], float(self.sigmas[a]), float(self.sigmas[a + 1])
        h = self._lambda(a + 1) - self._lambda(a)
        ratios = [(self._lambda(a - k) - self._lambda(a)) / h for k in range(1, order)]
        slopes = [(self.cleans[a - k] - own) / r for k, r in enumerate(ratios, 1)]
        z = -h
        phi = math.expm1(z)
        scale = z if self.kind == "bh1" else phi
        weights = self._weights([*ratios, 1.0], z, phi, scale, predictor=corrected is None)
        total = sum((w * slope for w, slope in zip(weights, slopes, strict=False)), torch.zeros_like(own))
        if corrected is not None:
            total = total + weights[order - 1] * (corrected - own)
        return (after / s) * x - (1 - after) * (phi * own + scale * total)

    @staticmethod
    def _weights(ratios: list[float], z: float, phi: float, scale: float, predictor: bool) -> list[float]:
        order = len(ratios)
        if predictor and order <= 2:
            return [0.5] * (order - 1)
        if order == 1:
            return [0.5]
        psi, wanted = phi / z - 1, []
        for j in range(1, order + 1):
            wanted.append(psi * math.factorial(j) / scale)
            psi = psi / z - 1 / math.factorial(j + 1)
        size = order - 1 if predictor else order
        matrix = torch.tensor([[r**j for r in ratios[:size]] for j in range(size)], dtype=torch.float64)
        found: list[float] = torch.linalg.solve(matrix, torch.tensor(wanted[:size], dtype=torch.float64)).tolist()
        return found
