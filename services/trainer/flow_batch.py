"""A batch of denoising trajectories as the trainer sees it: rows in the order of training, opened where they are needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch import Batch
from shared.models.diffusion.family import NEGATIVE, Conditions
from shared.types.params import DiffusionSamplingParams
from shared.types.part import Media, Part
from shared.types.sample import Sample
from shared.types.segments import LatentSegment
from shared.wire.envelope import TrainSlice
from shared.wire.errors import BodyLost

warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes it, and a copy would be large


@dataclass(frozen=True)
class FlowRow:
    """One trajectory with what its replay needs. Tensors are views of the body where its dtype allows."""

    latents: Tensor
    """[points, *latent] in the storage dtype."""
    positions: tuple[int, ...]
    sigmas: tuple[float, ...]
    indices: tuple[int, ...]
    """Steps that drew."""
    params: DiffusionSamplingParams
    conditions: Conditions
    """Of one row each."""
    negative: Conditions | None
    rollout: Tensor | None
    """float32 [steps that drew], as the engine reported them."""
    picture: str = ""
    """Where targets are imitated: the file, the words for it, and their reference; the trainer encodes all of them."""
    words: str = ""
    reference: str = ""
    name: str = ""
    """The sample's id."""
    domain: str | None = None
    """Of its prompt, as its record says."""
    advantage: float = 0.0
    reward: float = 0.0
    counts: bool = True
    """False: its reward failed; it has no weight."""

    @property
    def schedule(self) -> tuple[Any, ...]:
        """What rows of one forward pass must share."""
        p = self.params
        return self.positions, self.sigmas, self.indices, p.kernel, p.eta, p.guidance_scales, tuple(self.latents.shape)


class FlowBatch(Batch):
    """Rows of one media track."""

    def __init__(self, slices: Sequence[TrainSlice], track: str, open_slice: Callable[[int], list[Sample]]) -> None:
        super().__init__(slices, track, open_slice)
        self._flows: dict[int, list[FlowRow]] = {}

    def flow_row(self, index: int) -> FlowRow:
        """BodyLost if the body does not hold what its head says."""
        head = self.heads[index]
        rows = self._flow_rows(head.slice)
        if head.row >= len(rows):
            raise BodyLost(f"slice {head.slice} has {len(rows)} pictures, its head names number {head.row}")
        return replace(rows[head.row], advantage=head.advantage, reward=head.reward, counts=head.counts)

    def _flow_rows(self, index: int) -> list[FlowRow]:
        if index not in self._flows:
            self._flows[index] = [
                row
                for sample in self.open_slice(index)
                for part in sample.gen_parts
                if part.track == self.track
                for row in _rows(sample, part)
            ]
        return self._flows[index]


def _rows(sample: Sample, part: Part) -> list[FlowRow]:
    segment, params = part.segment, part.sampling_params
    if segment is None and "image" in part.primitives:
        return _targets(sample, part)
    if not isinstance(segment, LatentSegment) or not isinstance(params, DiffusionSamplingParams):
        raise BodyLost(f"Part {part.sample_ids[:1]}… holds no trajectories")
    prompt = sample.parts[0]
    parents = {name: row for row, name in enumerate(prompt.sample_ids)}
    held = {name: _tensor(value) for name, value in prompt.conditions.items()}
    latents = _tensor(segment.latents)
    scores = None if segment.log_probs is None else _tensor(segment.log_probs)
    found = []
    for row, name in enumerate(part.sample_ids):
        own = parents[name.rpartition("/")[0]]
        mine = {n: value[own : own + 1] for n, value in held.items()}
        negative = {n.removeprefix(NEGATIVE): value for n, value in mine.items() if n.startswith(NEGATIVE)}
        found.append(
            FlowRow(
                latents=latents[row],
                positions=segment.positions,
                sigmas=tuple(np.asarray(segment.sigmas).tolist()),
                indices=segment.sde_indices,
                params=params,
                conditions={n: value for n, value in mine.items() if not n.startswith(NEGATIVE)},
                negative=negative or None,
                rollout=None if scores is None else scores[row],
                name=name,
                domain=None if prompt.metadata is None else prompt.metadata[own].get("domain"),
            )
        )
    return found


def _targets(sample: Sample, part: Part) -> list[FlowRow]:
    prompt, params, none = sample.parts[0], part.sampling_params, torch.zeros(0)
    assert isinstance(params, DiffusionSamplingParams)
    files = [media.uri or "" for media in part.primitives["image"] if isinstance(media, Media)]
    about: dict[str, Any] = {"positions": (), "sigmas": (), "indices": (), "conditions": {}, "negative": None, "rollout": None}
    return [
        FlowRow(latents=none, params=params, picture=file, words=text, reference=reference, name=name, **about)
        for file, text, reference, name in zip(files, prompt.text, prompt.references, part.sample_ids, strict=True)
    ]


def _tensor(value: Any) -> Tensor:
    """A view of the body's memory, which nobody writes."""
    return torch.from_numpy(np.asarray(value))
