"""What an algorithm is: it owns the loss of one micro-batch, and declares what the stack has to bring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

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
    reference: Tensor | None = None
    """Log-probs of the frozen reference (a KL penalty's) or teacher (distillation's)."""
    entropy: Tensor | None = None
    """Of the live distribution at each token, in nats."""
    values: Tensor | None = None
    """The critic's values on the live weights."""
    old_values: Tensor | None = None
    """Those before the first update."""
    returns: Tensor | None = None
    token_advantages: Tensor | None = None
    progress: float = 0.0
    """Share of all optimizer steps that is done, 0 … 1."""

    def per_token(self, rows: Tensor) -> Tensor:
        return torch.repeat_interleave(rows, self.lengths.to(rows.device))


@dataclass
class Tally:
    """Figures that add up over micro-batches and ranks: sums with counts, maxima, minima."""

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

    def spread(self, name: str, values: Tensor, mask: Tensor) -> None:
        """`name_mean`, `_std` (sample), `_min` and `_max` over tokens with mask > 0."""
        self.mean(f"{name}_mean", values, mask)
        self.mean(f"{name}{_SQUARES}", values.detach().double() ** 2, mask)
        self.peak(f"{name}_max", values, mask)
        self.peak(f"{name}{_NEGATED}", -values, mask)

    def figures(self) -> dict[str, float]:
        plain = {n: v for n, v in self.sums.items() if MOMENTS not in n and not n.endswith(_SQUARES)}
        found = {n: s / c for n, (s, c) in plain.items() if c}
        if (whole := self.sums.get(f"critic{MOMENTS}returns")) is not None and whole[1]:
            found["explained_variance"] = self._explained()
        for name, (squares, count) in self.sums.items():
            if name.endswith(_SQUARES) and count:
                own = name.removesuffix(_SQUARES)
                mean = found[f"{own}_mean"]
                found[f"{own}_std"] = max(0.0, (squares - count * mean**2) / (count - 1)) ** 0.5 if count > 1 else 0.0
        for name, value in self.maxima.items():
            found[name.replace(_NEGATED, "_min")] = -value if name.endswith(_NEGATED) else value
        return found

    def _explained(self) -> float:
        """`1 - var(R - V) / var(R)` over all tokens (population; 0 if the returns are all equal)."""
        variances = []
        for name in ("errors", "returns"):
            (total, count), (squares, _) = (self.sums[f"critic{MOMENTS}{name}{power}"] for power in ("", "2"))
            variances.append(squares / count - (total / count) ** 2)
        return 1 - variances[0] / variances[1] if variances[1] > 1e-12 else 0.0


MOMENTS = "~moments~"
"""In names of sums that make one figure together."""
_SQUARES, _NEGATED = "~squares", "~negated"


class Algorithm(Protocol):
    """The class declares what the stack brings; the spec of the same name repeats it for the controller."""

    requires_advantages: ClassVar[bool]
    supports_multi_update: ClassVar[bool]
    """Whether a batch may make several updates against one anchor."""
    anchor_fields: ClassVar[tuple[str, ...]]
    """What is frozen before the first update, besides nothing: of `anchor`, `values`."""
    recomputes_anchor: ClassVar[bool]
    """The anchor is the trainer's own, over the micro-batches that training uses: the first ratio is exactly 1."""
    requires_ema_rollout: ClassVar[bool]
    aggregation: str
    """How token losses become one (see aggregation.py); decides the scale of micro-batches."""
    idle_without_advantage: bool
    """A row whose advantage is 0 has neither loss nor gradient, so it need not be replayed."""
    needs_reference: bool
    """Whether the stack replays a frozen model too."""
    needs_entropy: bool

    def loss(self, micro: Micro, tally: Tally) -> Tensor:
        """The micro-batch's mean loss, before its scale."""
        ...
