"""What a policy produced, in the form that training replays."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from shared.types.arrays import Array
from shared.types.columns import concat_arrays, concat_tuples, take

Spans = tuple[tuple[int, int], ...]
"""(first token, version) of each run of tokens that one version produced, ascending."""


class TextSegment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="text", eq=False):
    """Rows of tokens, packed. Token ids are the truth: decoded text is for display and scoring only."""

    tokens: Array
    """int32, [sum of lengths]."""
    lengths: Array
    """int32, [rows]."""
    log_probs: Array | None = None
    """float32, [sum of lengths], of the distribution sampled from; None for tokens that no policy sampled."""
    loss_mask: Array | None = None
    """uint8, [sum of lengths]; 0 = the token was not sampled (forced, tool output). None is all 1."""
    finish_reasons: tuple[str, ...] | None = None
    """Per row `stop` or `length`; None for rows that were not generated."""
    version_spans: tuple[Spans, ...] | None = None
    """Per row; None is one span of the Part's output_version."""

    def __post_init__(self) -> None:
        total = int(self.lengths.sum()) if len(self.lengths) else 0
        if total != len(self.tokens):
            raise ValueError(f"lengths sum to {total}, but there are {len(self.tokens)} tokens")
        for name, packed in (("log_probs", self.log_probs), ("loss_mask", self.loss_mask)):
            if packed is not None and len(packed) != total:
                raise ValueError(f"{name} has {len(packed)} entries for {total} tokens")
        if self.log_probs is not None and self.log_probs.dtype != np.float32:
            raise ValueError(f"log_probs dtype {self.log_probs.dtype}: must be float32")

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TextSegment:
        """Rows of token ids without log-probs."""
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        flat = np.fromiter((token for row in rows for token in row), np.int32, int(lengths.sum()))
        return cls(tokens=flat, lengths=lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def offsets(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64, [rows + 1]: row i holds tokens[offsets[i]:offsets[i + 1]]."""
        out = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=out[1:])
        return out

    def row(self, index: int) -> Array:
        offsets = self.offsets()
        return self.tokens[offsets[index] : offsets[index + 1]]

    def select(self, rows: Sequence[int]) -> TextSegment:
        offsets = self.offsets()
        pieces = [np.arange(offsets[r], offsets[r + 1]) for r in rows]
        index = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        return TextSegment(
            tokens=self.tokens[index],
            lengths=self.lengths[list(rows)],
            log_probs=None if self.log_probs is None else self.log_probs[index],
            loss_mask=None if self.loss_mask is None else self.loss_mask[index],
            finish_reasons=None if self.finish_reasons is None else tuple(self.finish_reasons[r] for r in rows),
            version_spans=None if self.version_spans is None else tuple(self.version_spans[r] for r in rows),
        )

    @classmethod
    def concat(cls, segments: Sequence[TextSegment]) -> TextSegment:
        return cls(
            tokens=np.concatenate([s.tokens for s in segments]),
            lengths=np.concatenate([s.lengths for s in segments]),
            log_probs=concat_arrays("log_probs", [s.log_probs for s in segments]),
            loss_mask=concat_arrays("loss_mask", [s.loss_mask for s in segments]),
            finish_reasons=concat_tuples("finish_reasons", [s.finish_reasons for s in segments]),
            version_spans=concat_tuples("version_spans", [s.version_spans for s in segments]),
        )


class LatentSegment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="latent", eq=False):
    """The stored points of denoising trajectories. Rows share sigmas and steps."""

    latents: Array
    """[rows, points, *latent], in the storage dtype."""
    positions: tuple[int, ...]
    """The schedule position (0 … T) of each stored point."""
    sigmas: Array
    """float32, [T + 1]."""
    sde_indices: tuple[int, ...]
    """Steps scored, in the order of log_probs' columns."""
    log_probs: Array | None = None
    """float32, [rows, steps scored], each the mean over latent elements; None when nothing was stochastic."""
    final: Array | None = None
    """[rows, *latent]; None when the last stored point is the final one."""

    def __len__(self) -> int:
        return int(self.latents.shape[0])

    def select(self, rows: Sequence[int]) -> LatentSegment:
        index = list(rows)
        return msgspec.structs.replace(
            self,
            latents=take(self.latents, index),
            log_probs=take(self.log_probs, index),
            final=take(self.final, index),
        )

    @classmethod
    def concat(cls, segments: Sequence[LatentSegment]) -> LatentSegment:
        first = segments[0]
        for other in segments[1:]:
            if other.positions != first.positions or not np.array_equal(other.sigmas, first.sigmas):
                raise ValueError("latent segments of different schedules cannot be one batch")
        return msgspec.structs.replace(
            first,
            latents=concat_arrays("latents", [s.latents for s in segments]),
            log_probs=concat_arrays("log_probs", [s.log_probs for s in segments]),
            final=concat_arrays("final", [s.final for s in segments]),
        )


Segment = TextSegment | LatentSegment
