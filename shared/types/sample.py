"""The Sample: an ordered list of Parts, each the children of the one before. A rollout is a map from Sample to Sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from shared.types.arrays import Array
from shared.types.ids import fork_ids, parent_id, root_of
from shared.types.params import SamplingParams
from shared.types.part import Media, Part, Role, Text
from shared.types.segments import Segment, TextSegment

RewardOp = Literal["mean", "max", "sum"]
_REDUCE: dict[str, Any] = {"mean": np.mean, "max": np.max, "sum": np.sum}


class Turn(msgspec.Struct, frozen=True):
    """One step of a row's lineage."""

    part: int
    row: int
    role: Role


class Sample(msgspec.Struct, frozen=True, eq=False):
    """Immutable: every operation returns a new Sample."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a Sample has at least one Part")
        if bad := [i for i in self.parts[0].sample_ids if "/" in i]:
            raise ValueError(f"sample id {bad[0]!r} in the first Part: a root id holds no '/'")
        for k, (above, below) in enumerate(zip(self.parts, self.parts[1:], strict=False)):
            parents = {sample_id.rpartition("/")[0] for sample_id in below.sample_ids}
            if strangers := parents.difference(above.sample_ids):
                raise ValueError(f"Part {k + 1} has children of {sorted(strangers)}, which are not in the Part before")

    @classmethod
    def request(
        cls,
        roots: Sequence[str],
        params: SamplingParams,
        *,
        n: int = 1,
        track: str = "policy",
        texts: Sequence[str] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        references: Sequence[str] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> Sample:
        """Prompts and an empty generated Part with n children each. `tokens` are the rendered prompts' ids; `references` the
        paths of the pictures that they are about.
        """
        given: dict[str, tuple[Text | Media, ...]] = {} if texts is None else {"text": tuple(map(Text, texts))}
        if references is not None:
            given["image"] = tuple(Media(mime="image/file", uri=path) for path in references)
        prompt = Part(
            sample_ids=tuple(roots),
            primitives=given,
            segment=None if tokens is None else TextSegment.of(tokens),
            metadata=None if metadata is None else tuple(metadata),
        )
        return cls((prompt,)).fork(n, params, track=track)

    def fork(self, n: int, params: SamplingParams, *, track: str = "policy", role: Role = "assistant") -> Sample:
        """Adds an empty generated Part: n children of every row of the last Part."""
        child = Part(sample_ids=fork_ids(self.parts[-1].sample_ids, n), role=role, track=track, sampling_params=params)
        return Sample((*self.parts, child))

    def fill(self, segment: Segment, **columns: Any) -> Sample:
        """The same lineage with the frontier filled. ValueError if it is filled already or rows differ."""
        if self.frontier.filled:
            raise ValueError("the frontier is filled already")
        filled = msgspec.structs.replace(self.frontier, segment=segment, **columns)
        index = self._frontier_index()
        return Sample((*self.parts[:index], filled, *self.parts[index + 1 :]))

    def observe(
        self,
        role: Role,
        *,
        tokens: Sequence[Sequence[int]] | None = None,
        primitives: dict[str, tuple[Text | Media, ...]] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> Sample:
        """Appends a turn that no policy produced (a tool's or a user's answer), one child of every row."""
        turn = Part(
            sample_ids=fork_ids(self.parts[-1].sample_ids, 1),
            role=role,
            primitives=primitives or {},
            segment=None if tokens is None else TextSegment.of(tokens),
            metadata=None if metadata is None else tuple(metadata),
        )
        return Sample((*self.parts, turn))

    @property
    def gen_parts(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.generated)

    @property
    def frontier(self) -> Part:
        """The last generated Part. ValueError without any."""
        return self.parts[self._frontier_index()]

    def _frontier_index(self) -> int:
        for index in range(len(self.parts) - 1, -1, -1):
            if self.parts[index].generated:
                return index
        raise ValueError("the Sample has no generated Part")

    def __len__(self) -> int:
        """Rows of the last Part."""
        return len(self.parts[-1])

    @property
    def roots(self) -> tuple[str, ...]:
        return self.parts[0].sample_ids

    def turns(self, row: int) -> tuple[Turn, ...]:
        """The lineage of a row of the last Part, root first."""
        found: list[Turn] = []
        wanted: str | None = self.parts[-1].sample_ids[row]
        for index in range(len(self.parts) - 1, -1, -1):
            part = self.parts[index]
            assert wanted is not None
            found.append(Turn(index, part.sample_ids.index(wanted), part.role))
            wanted = parent_id(wanted)
        return tuple(reversed(found))

    def conditioning(self, row: int) -> Array:
        """int32: the token ids before the frontier in the lineage of one of its rows (prompt and earlier turns)."""
        index = self._frontier_index()
        if index == 1 and len(self.roots) == 1 and self.parts[0].segment is not None:
            return self.parts[0].text_segment.tokens  # one prompt and its completions: the usual case
        lineage = Sample(self.parts[: index + 1]).turns(row)[:-1]
        pieces = [self.parts[t.part].text_segment.row(t.row) for t in lineage if self.parts[t.part].segment is not None]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

    def select(self, rows: Sequence[int]) -> Sample:
        """These rows of the last Part, in this order, with the ancestors that they still have."""
        chosen = [self.parts[-1].select(rows)]
        for part in reversed(self.parts[:-1]):
            wanted = dict.fromkeys(parent_id(i) for i in chosen[0].sample_ids)
            place = {sample_id: r for r, sample_id in enumerate(part.sample_ids)}
            chosen.insert(0, part.select([place[i] for i in wanted if i is not None]))
        return Sample(tuple(chosen))

    def split(self) -> tuple[Sample, ...]:
        """One Sample per root prompt, in the order of the roots."""
        by_root: dict[str, list[int]] = {root: [] for root in self.roots}
        for row, sample_id in enumerate(self.parts[-1].sample_ids):
            by_root[root_of(sample_id)].append(row)
        return tuple(self.select(rows) for rows in by_root.values() if rows)

    @classmethod
    def concat(cls, samples: Sequence[Sample]) -> Sample:
        """Rows of all. ValueError unless they have the same Parts."""
        if len({len(s.parts) for s in samples}) != 1:
            raise ValueError("Samples with different numbers of Parts cannot be one Sample")
        if len(samples) == 1:
            return samples[0]
        return cls(tuple(Part.concat(column) for column in zip(*(s.parts for s in samples), strict=True)))

    def propagate_rewards(self, op: RewardOp = "mean") -> Sample:
        """Rewards from children to parents, last Part first; a Part that has rewards keeps them. NaN propagates."""
        parts = list(self.parts)
        for index in range(len(parts) - 2, -1, -1):
            if parts[index].rewards is None:
                parts[index] = _inherit(parts[index], parts[index + 1], op)
        return Sample(tuple(parts))


def _inherit(parent: Part, child: Part, op: RewardOp) -> Part:
    if op not in _REDUCE:
        raise ValueError(f"op {op!r}: legal are {sorted(_REDUCE)}")
    if child.rewards is None:
        raise ValueError("the Part below has no rewards to propagate")
    of: dict[str | None, list[float]] = {i: [] for i in parent.sample_ids}
    for sample_id, reward in zip(child.sample_ids, child.rewards, strict=True):
        of[parent_id(sample_id)].append(reward)
    values = np.asarray([_REDUCE[op](np.asarray(rs, np.float32)) for rs in of.values()], np.float32)
    return msgspec.structs.replace(parent, rewards=values)
