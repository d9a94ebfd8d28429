"""Rules for pictures, for tests and demos: brightness, colour, size as a JPEG. A video counts as the mean of its frames."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from shared import media
from shared.config.builtin import Brightness, Colour, JpegSize
from shared.config.builtin import ShapesScorer as Shapes
from shared.pictures import COLOURS, likeness, near
from shared.types.rewards import RewardRequest


def frames_of(row: RewardRequest) -> np.ndarray[Any, Any]:
    """uint8 [frames, height, width, 3]. ValueError for a row that holds no picture."""
    if row.media is None or row.media.data is None:
        raise ValueError(f"{row.sample_id} holds no picture: this scorer needs one")
    return media.frames_of(row.media)


class BrightnessScorer:
    def __init__(self, params: Brightness) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return [float(frames_of(row).mean()) / 255 for row in rows]


class ColourScorer:
    """The share of pixels near a colour: 1 within 0.1 of it, falling to 0 at 0.5 (RGB in 0 … 1)."""

    def __init__(self, params: Colour) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """ValueError for a prompt that names no known colour, where none is given."""
        return [self._one(row) for row in rows]

    def _one(self, row: RewardRequest) -> float:
        wanted = self.params.rgb or next((COLOURS[word] for word in row.prompt.lower().split() if word in COLOURS), None)
        if wanted is None:
            raise ValueError(f"prompt {row.prompt!r} names none of {', '.join(COLOURS)}: name one, or give the scorer an rgb")
        return float(near(frames_of(row).astype(np.float32) / 255, np.asarray(wanted, np.float32)).mean())


class ShapesScorer:
    """The demo's rule: the shape in the colour that the prompt names."""

    def __init__(self, params: Shapes) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        pictures = np.concatenate([frames_of(row)[:1] for row in rows]).astype(np.float32) / 255
        return [float(value) for value in likeness(pictures, [row.prompt for row in rows])]


class JpegSizeScorer:
    def __init__(self, params: JpegSize) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        sign = -1.0 if self.params.reward == "small" else 1.0
        return [sign * float(np.mean([self._kilobytes(f) for f in frames_of(row)])) / self.params.scale_kb for row in rows]

    def _kilobytes(self, frame: np.ndarray[Any, Any]) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=self.params.quality)
        return len(buffer.getvalue()) / 1000
