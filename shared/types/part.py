"""A Part: one turn of every row of a Sample, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from shared.types import advantages as adv
from shared.types.arrays import Array
from shared.types.columns import concat_arrays, concat_tuples, take
from shared.types.params import SamplingParams
from shared.types.segments import Segment, TextSegment

Role = Literal["system", "user", "assistant", "tool"]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Text of one row, for display and scoring."""

    value: str


class Media(msgspec.Struct, frozen=True, tag="media", kw_only=True, eq=False):
    """Image, video or audio of one row: pixels here, or a file named by `uri`."""

    mime: str
    data: Array | None = None
    uri: str | None = None


PARTIAL = "partial"
"""Status of a row whose generation was suspended."""
_COLUMNS = ("segment", "rewards", "advantages", "status", "output_version", "previews", "metadata")


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, eq=False):
    """Every column has one entry a row. A Part with `sampling_params` is generated; with `segment` too it is filled."""

    sample_ids: tuple[str, ...]
    role: Role = "user"
    track: str | None = None
    """What is trained by it; None for input Parts."""
    primitives: dict[str, tuple[Text | Media, ...]] = {}
    """Raw content by modality: text, image, video, audio."""
    segment: Segment | None = None
    """None: a generated Part not yet filled, or an input without encoded form."""
    conditions: dict[str, Array] = {}
    """Encoded inputs that replay needs, rows first."""
    sampling_params: SamplingParams | None = None
    rewards: Array | None = None
    """float32 [rows]; NaN = scoring failed. None: not scored."""
    component_rewards: dict[str, Array] = {}
    advantages: Array | None = None
    """float32 [rows]; None: not computed."""
    status: tuple[str, ...] | None = None
    """Per row ok, truncated or failed, or partial while it is to be continued; None before generation."""
    output_version: Array | None = None
    """int64 [rows]: the oldest weights version that produced a token of the row; None for inputs."""
    previews: tuple[str, ...] | None = None
    """URIs of small renderings; None: none were made."""
    metadata: tuple[dict[str, Any], ...] | None = None
    """Per row plain data (answers, environment state); None: none."""

    def __post_init__(self) -> None:
        rows = len(self.sample_ids)
        if len(set(self.sample_ids)) != rows:
            raise ValueError("sample_ids: an id stands twice")
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != rows:
                raise ValueError(f"{name} has {len(column)} rows for {rows} sample ids")
        for columns in (self.primitives, self.component_rewards):
            for name, column in columns.items():
                if len(column) != rows:
                    raise ValueError(f"{name} has {len(column)} rows for {rows} sample ids")

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def generated(self) -> bool:
        return self.sampling_params is not None

    @property
    def filled(self) -> bool:
        return self.generated and self.segment is not None and PARTIAL not in (self.status or ())

    @property
    def text(self) -> tuple[str, ...]:
        """The text of each row; ValueError if the Part has none."""
        found = self.primitives.get("text")
        if found is None:
            raise ValueError(f"Part {self.sample_ids[:1]}… has no text")
        return tuple(entry.value if isinstance(entry, Text) else "" for entry in found)

    @property
    def media(self) -> tuple[Media | None, ...]:
        """The picture or video of each row."""
        held = self.primitives.get("image") or self.primitives.get("video") or ()
        return tuple(one if isinstance(one, Media) else None for one in held) or (None,) * len(self)

    @property
    def references(self) -> tuple[str, ...]:
        """Paths of the pictures that the rows are about; empty texts where there are none."""
        held = self.primitives.get("image", ())
        return tuple(one.uri or "" if isinstance(one, Media) else "" for one in held) or ("",) * len(self)

    @property
    def text_segment(self) -> TextSegment:
        if not isinstance(self.segment, TextSegment):
            raise ValueError(f"Part {self.sample_ids[:1]}… holds no tokens")
        return self.segment

    def compute_advantages(
        self,
        *,
        normalize: bool = True,
        eps: float = 1e-8,
        scope: adv.Scope = "group",
        use_global_std: bool = False,
        group_layer: int | None = None,
        estimator: adv.Estimator = "group",
    ) -> Part:
        """The Part with group advantages of its rewards (see `advantages.group_advantages`); an empty one is unchanged."""
        if not self.sample_ids:
            return self
        found = adv.group_advantages(
            self.sample_ids,
            self.rewards,
            normalize=normalize,
            eps=eps,
            scope=scope,
            use_global_std=use_global_std,
            group_layer=group_layer,
            estimator=estimator,
        )
        return msgspec.structs.replace(self, advantages=found)

    def select(self, rows: Sequence[int]) -> Part:
        index = list(rows)
        return msgspec.structs.replace(
            self,
            sample_ids=tuple(self.sample_ids[r] for r in index),
            primitives={name: tuple(column[r] for r in index) for name, column in self.primitives.items()},
            segment=None if self.segment is None else self.segment.select(index),
            conditions={name: _rows(column, index) for name, column in self.conditions.items()},
            rewards=take(self.rewards, index),
            component_rewards={name: _rows(column, index) for name, column in self.component_rewards.items()},
            advantages=take(self.advantages, index),
            status=None if self.status is None else tuple(self.status[r] for r in index),
            output_version=take(self.output_version, index),
            previews=None if self.previews is None else tuple(self.previews[r] for r in index),
            metadata=None if self.metadata is None else tuple(self.metadata[r] for r in index),
        )

    @classmethod
    def concat(cls, parts: Sequence[Part]) -> Part:
        """Rows of all. ValueError unless role, track, parameters and present columns are those of the first."""
        first = parts[0]
        for other in parts[1:]:
            if (other.role, other.track, other.sampling_params) != (first.role, first.track, first.sampling_params):
                raise ValueError("Parts of different role, track or sampling parameters cannot be one Part")
        return msgspec.structs.replace(
            first,
            sample_ids=tuple(i for part in parts for i in part.sample_ids),
            primitives=_merge([p.primitives for p in parts], concat_tuples),
            segment=_concat_segments([p.segment for p in parts]),
            conditions=_merge([p.conditions for p in parts], concat_arrays),
            rewards=concat_arrays("rewards", [p.rewards for p in parts]),
            component_rewards=_merge([p.component_rewards for p in parts], concat_arrays),
            advantages=concat_arrays("advantages", [p.advantages for p in parts]),
            status=concat_tuples("status", [p.status for p in parts]),
            output_version=concat_arrays("output_version", [p.output_version for p in parts]),
            previews=concat_tuples("previews", [p.previews for p in parts]),
            metadata=concat_tuples("metadata", [p.metadata for p in parts]),
        )


def _rows(column: Array, index: Sequence[int]) -> Array:
    found = take(column, index)
    assert found is not None
    return found


def _merge(columns: Sequence[dict[str, Any]], concat: Any) -> dict[str, Any]:
    names = list(columns[0])
    if any(list(c) != names for c in columns):
        raise ValueError(f"some rows have {names}, others not")
    return {name: concat(name, [c[name] for c in columns]) for name in names}


def _concat_segments(segments: Sequence[Segment | None]) -> Segment | None:
    present = [s for s in segments if s is not None]
    if not present:
        return None
    if len(present) != len(segments):
        raise ValueError("segment: some rows have it and some have not")
    kind = type(present[0])
    if any(type(s) is not kind for s in present):
        raise ValueError("segments of different kinds cannot be one segment")
    return kind.concat(present)  # type: ignore[arg-type]
