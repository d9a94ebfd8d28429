"""Pictures for others to look at."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from services.reward.scorers.pictures import frames_of
from shared.types.rewards import RewardRequest


def frames(row: RewardRequest, count: int) -> list[Image.Image]:
    """The picture, or so many frames spread over the video, the first and the last among them."""
    held = frames_of(row)
    places = np.unique(np.linspace(0, len(held) - 1, count).round().astype(int)) if count > 1 else [len(held) // 2]
    return [Image.fromarray(held[k]) for k in places]


def mean_over_frames(
    rows: Sequence[RewardRequest],
    count: int,
    batch: int,
    score: Callable[[Sequence[Image.Image], Sequence[str]], Sequence[float]],
) -> list[float | None]:
    """Of each row the mean score of its frames. `score`: of so many pictures and their prompts at once."""
    shown = [frames(row, count) for row in rows]
    flat = [(picture, row.prompt) for row, own in zip(rows, shown, strict=True) for picture in own]
    found: list[float] = []
    for low in range(0, len(flat), batch):
        pictures, prompts = zip(*flat[low : low + batch], strict=True)
        found += score(pictures, prompts)
    ends = np.cumsum([0, *map(len, shown)]).tolist()
    return [float(np.mean(found[low:high])) for low, high in itertools.pairwise(ends)]


def given(row: RewardRequest) -> list[Image.Image]:
    """The picture that the prompt is about, if there is one. ValueError if it cannot be read."""
    if not row.reference:
        return []
    try:
        with Image.open(row.reference) as file:
            return [file.convert("RGB")]
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{row.sample_id}: its reference {row.reference} cannot be read: {error}") from error


def as_png(picture: Image.Image) -> tuple[str, bytes]:
    """(media type, file)."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "image/png", buffer.getvalue()


def message_part(picture: Image.Image) -> dict[str, Any]:
    """As messages of an OpenAI-compatible API hold it: PNG."""
    mime, data = as_png(picture)
    url = f"data:{mime};base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}
