"""What messages say of a filled slice."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engines.base import Slice
from shared.types.params import ARSamplingParams
from shared.types.part import Part
from shared.types.segments import TextSegment
from shared.wire import codec
from shared.wire.envelope import PartHead, SliceHead, Span
from shared.wire.hops import Filled


def filled(samples: Slice, spans: tuple[Span, ...]) -> Filled:
    """Head and body of a filled slice. Samples of one shape share their Parts; otherwise turns are merged by number."""
    depth = max(len(s.gen_parts) for s in samples)
    parts = tuple(_part_head([s.gen_parts[k] for s in samples if len(s.gen_parts) > k]) for k in range(depth))
    return Filled(SliceHead(parts=parts, spans=spans), codec.encode_parts(samples))


def _part_head(parts: Sequence[Part]) -> PartHead:
    first = parts[0]
    segments = [p.segment for p in parts if isinstance(p.segment, TextSegment)]
    params = first.sampling_params
    return PartHead(
        ids=tuple(i for p in parts for i in p.sample_ids),
        track=first.track or "",
        lengths=tuple(int(n) for segment in segments for n in segment.lengths),
        versions=tuple(int(v) for p in parts if p.output_version is not None for v in p.output_version),
        status=tuple(s for p in parts for s in p.status or ()),
        max_new_tokens=params.max_new_tokens if isinstance(params, ARSamplingParams) else 0,
    )
