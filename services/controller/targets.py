"""What sft trains on, as a Sample: prompts and their targets, which a trainer builds its loss from. Nothing was generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from services.controller.data.intake import Example
from shared.types.params import ARSamplingParams, DiffusionSamplingParams
from shared.types.part import Media, Part, Text
from shared.types.sample import Sample
from shared.types.segments import TextSegment
from shared.wire.envelope import PartHead

Found = Sequence[tuple[str, Example]]
"""Roots and their examples, at least one."""
ABOUT: dict[str, Any] = {"role": "assistant", "track": "policy"}


def texts(found: Found) -> tuple[Sample, PartHead]:
    """Tokens of prompts and targets."""
    roots, ids, examples = _split(found)
    inputs = Part(
        sample_ids=roots,
        primitives={"text": tuple(Text(e.prompt.text) for e in examples)},
        segment=TextSegment.of([e.prompt.tokens for e in examples]),
    )
    targets = TextSegment.of([e.target for e in examples])
    mask = np.concatenate([np.asarray(e.mask, np.uint8) for e in examples])
    lengths = tuple(targets.lengths.tolist())
    output = Part(
        sample_ids=ids,
        sampling_params=ARSamplingParams(max_new_tokens=max(lengths)),
        segment=targets if mask.all() else msgspec.structs.replace(targets, loss_mask=mask),
        output_version=np.zeros(len(ids), np.int64),
        **ABOUT,
    )
    return Sample((inputs, output)), PartHead(ids=ids, track="policy", lengths=lengths)


def pictures(found: Found, height: int, width: int) -> tuple[Sample, PartHead]:
    """Prompts, and where the pictures lie: the trainer opens and encodes them."""
    roots, ids, examples = _split(found)
    output = Part(
        sample_ids=ids,
        sampling_params=DiffusionSamplingParams(num_inference_steps=1, height=height, width=width),
        primitives={"image": tuple(Media(mime="image/file", uri=e.picture) for e in examples)},
        **ABOUT,
    )
    primitives: dict[str, tuple[Text | Media, ...]] = {"text": tuple(Text(e.prompt.text) for e in examples)}
    if examples[0].prompt.reference:
        primitives["image"] = tuple(Media(mime="image/file", uri=e.prompt.reference) for e in examples)
    inputs = Part(sample_ids=roots, primitives=primitives)
    return Sample((inputs, output)), PartHead(ids=ids, track="policy")


def _split(found: Found) -> tuple[tuple[str, ...], tuple[str, ...], list[Example]]:
    """(roots, ids of their targets, examples)."""
    roots = tuple(root for root, _ in found)
    return roots, tuple(f"{root}/0" for root in roots), [example for _, example in found]
