"""The Sample and what it is made of. Numpy arrays only; importable without torch."""

from shared.types.arrays import Array, RawTensor, TensorRef
from shared.types.params import ARSamplingParams, DiffusionSamplingParams, SamplingParams
from shared.types.part import Media, Part, Role, Text
from shared.types.rewards import Blend, RewardRequest, RewardResponse
from shared.types.sample import Sample
from shared.types.segments import LatentSegment, Segment, TextSegment

__all__ = [
    "ARSamplingParams",
    "Array",
    "Blend",
    "DiffusionSamplingParams",
    "LatentSegment",
    "Media",
    "Part",
    "RawTensor",
    "RewardRequest",
    "RewardResponse",
    "Role",
    "Sample",
    "SamplingParams",
    "Segment",
    "TensorRef",
    "Text",
    "TextSegment",
]
