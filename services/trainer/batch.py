"""One batch as the trainer sees it: rows in the order of training, their bodies opened only where they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shared.types.sample import Sample
from shared.types.segments import TextSegment
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
    reward: float = 0.0


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
    reward: float = 0.0


class Batch:
    """Rows of one track. `open_slice` returns the Samples of slice i."""

    def __init__(self, slices: Sequence[TrainSlice], track: str, open_slice: Callable[[int], list[Sample]]) -> None:
        self.slices, self.track, self.open_slice = slices, track, open_slice
        self.heads = [head for index, piece in enumerate(slices) for head in self._heads(index, piece)]
        self._opened: dict[int, list[Row]] = {}

    def _heads(self, index: int, piece: TrainSlice) -> list[RowHead]:
        found: list[RowHead] = []
        for part, rewards, advantages in zip(piece.head.parts, piece.rewards, piece.advantages, strict=True):
            if part.track != self.track:
                continue
            for row in range(len(part.ids)):
                good = rewards is None or bool(np.isfinite(rewards[row]))
                advantage = 0.0 if advantages is None else advantages[row]
                length = part.lengths[row] if part.lengths else 0
                reward = float(rewards[row]) if rewards is not None and good else 0.0
                found.append(RowHead(index, len(found), length, advantage, good, reward))
        return found

    def row(self, index: int) -> Row:
        """BodyLost if the body does not hold what its head says."""
        head = self.heads[index]
        found = self._rows(head.slice)[head.row]
        if len(found.completion) != head.length:
            said = f"row {head.row} of slice {head.slice} has {len(found.completion)} tokens, its head says {head.length}"
            raise BodyLost(said)
        mask = found.mask if head.counts else np.zeros_like(found.mask)
        return replace(found, mask=mask, advantage=head.advantage, reward=head.reward)

    def _rows(self, index: int) -> list[Row]:
        """Every generated row of the track in a slice, in the order of its heads: turn by turn."""
        if index not in self._opened:
            self._opened[index] = self._open(self.open_slice(index))
        return self._opened[index]

    def _open(self, samples: list[Sample]) -> list[Row]:
        ends = [[k for k, p in enumerate(s.parts) if p.generated] for s in samples]
        return [
            row
            for turn in range(max(map(len, ends)))
            for sample, end in zip(samples, ends, strict=True)
            if turn < len(end) and sample.parts[end[turn]].track == self.track
            for row in _part_rows(Sample(sample.parts[: end[turn] + 1]))
        ]


def _part_rows(sample: Sample) -> list[Row]:
    """The rows of the frontier, which is the last Part; media hold no tokens."""
    segment = sample.frontier.segment
    if not isinstance(segment, TextSegment):
        none = np.zeros(0, np.float32)
        return [Row(none.astype(np.int32), none.astype(np.int32), none, None, 0.0)] * len(sample.frontier)
    bounds = segment.offsets().tolist()
    mask = np.ones(bounds[-1], np.float32) if segment.loss_mask is None else segment.loss_mask.astype(np.float32)
    return [
        Row(
            prompt=sample.conditioning(row),
            completion=segment.tokens[low:high],
            mask=mask[low:high],
            rollout=None if segment.log_probs is None else segment.log_probs[low:high],
            advantage=0.0,
        )
        for row, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
