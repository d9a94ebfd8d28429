"""What an algorithm is: it owns the loss of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Micro:
    """One micro-batch, packed: token columns are [tokens], row columns are [rows]."""

    new: Tensor
    """Log-probs on the live weights."""
    anchor: Tensor
    """Log-probs of the frozen old policy."""
    rollout: Tensor | None
    """Log-probs as the engine reported them; None where nothing was sampled."""
    advantages: Tensor | None
    """[rows]."""
    mask: Tensor
    """1 = the token counts."""
    lengths: Tensor
    """int64 [rows]."""

    def per_token(self, rows: Tensor) -> Tensor:
        return torch.repeat_interleave(rows, self.lengths.to(rows.device))


@dataclass
class Tally:
    """Figures that add up over micro-batches and ranks: sums with counts, maxima."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Mean over tokens with mask > 0."""
        chosen = values.detach() if mask is None else values.detach()[mask > 0]
        total, count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (total + float(chosen.sum()), count + chosen.numel())

    def peak(self, name: str, values: Tensor, mask: Tensor) -> None:
        chosen = values.detach()[mask > 0]
        if chosen.numel():
            self.maxima[name] = max(self.maxima.get(name, -float("inf")), float(chosen.max()))

    def figures(self) -> dict[str, float]:
        return {n: s / c for n, (s, c) in self.sums.items() if c} | self.maxima


class Algorithm(Protocol):
    aggregation: str
    """How token losses become one (see aggregation.py); decides the scale of micro-batches."""
    idle_without_advantage: bool
    """A row whose advantage is 0 has neither loss nor gradient, so it need not be replayed."""

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        """The micro-batch's mean loss, before its scale."""
        ...
