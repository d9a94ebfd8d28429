"""One batch as the trainer sees it: rows in the order of training, their bodies opened only where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.types.sample import Sample
from shared.wire import codec
from shared.wire.envelope import TrainSlice
from shared.wire.errors import BodyLost

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """One completion with what its replay needs."""

    prompt: Array
    """int32: everything before the completion."""
    completion: Array
    """int32."""
    mask: Array
    """float32: 1 = the token was sampled and counts."""
    rollout: Array | None
    """float32 log-probs of the engine; None for targets."""
    advantage: float


@dataclass(frozen=True)
class RowHead:
    """What is known of a row without its body."""

    slice: int
    row: int
    """Of the generated Part in its slice."""
    length: int
    advantage: float
    counts: bool
    """False: its reward failed; it has no weight."""


class Batch:
    """Rows of one track. `open_body` returns the bytes of slice i's body."""

    def __init__(self, slices: Sequence[TrainSlice], track: str, open_body: Callable[[int], codec.Buffer]) -> None:
        self.slices, self.track, self.open_body = slices, track, open_body
        self.heads = [head for index, piece in enumerate(slices) for head in self._heads(index, piece)]
        self._opened: dict[int, list[tuple[Sample, int]]] = {}

    def _heads(self, index: int, piece: TrainSlice) -> list[RowHead]:
        found: list[RowHead] = []
        for part, rewards, advantages in zip(piece.head.parts, piece.rewards, piece.advantages, strict=True):
            if part.track != self.track:
                continue
            for row in range(len(part.ids)):
                good = rewards is None or bool(np.isfinite(rewards[row]))
                advantage = 0.0 if advantages is None else advantages[row]
                length = part.lengths[row] if part.lengths else 0
                found.append(RowHead(index, len(found), length, advantage, good))
        return found

    def preload(self, slices: Sequence[list[Sample]]) -> None:
        """Bodies that are in memory already."""
        self._opened = {index: self._views(samples) for index, samples in enumerate(slices)}

    def row(self, index: int) -> Row:
        """BodyLost if the body does not hold what its head says."""
        head = self.heads[index]
        sample, row = self._rows(head.slice)[head.row]
        segment = sample.frontier.text_segment
        low = int(segment.offsets()[row])
        high = low + int(segment.lengths[row])
        if high - low != head.length:
            raise BodyLost(f"row {head.row} of slice {head.slice} has {high - low} tokens, its head says {head.length}")
        mask = np.ones(high - low, np.float32) if segment.loss_mask is None else segment.loss_mask[low:high]
        return Row(
            prompt=sample.conditioning(row),
            completion=segment.tokens[low:high],
            mask=np.asarray(mask, np.float32) * np.float32(head.counts),
            rollout=None if segment.log_probs is None else segment.log_probs[low:high],
            advantage=head.advantage,
        )

    def _rows(self, index: int) -> list[tuple[Sample, int]]:
        """(sample, row) of every generated row of the track in a slice, in the order of its heads: turn by turn."""
        if index not in self._opened:
            self._opened[index] = self._views(codec.decode(self.open_body(index), list[Sample]))
        return self._opened[index]

    def _views(self, samples: list[Sample]) -> list[tuple[Sample, int]]:
        ends = [[k for k, p in enumerate(s.parts) if p.generated] for s in samples]
        views = [
            Sample(sample.parts[: end[turn] + 1])
            for turn in range(max(map(len, ends)))
            for sample, end in zip(samples, ends, strict=True)
            if turn < len(end) and sample.parts[end[turn]].track == self.track
        ]
        return [(view, row) for view in views for row in range(len(view.frontier))]
