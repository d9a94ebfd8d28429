"""Pictures for others to look at."""

from __future__ import annotations

import base64
import io
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


def given(row: RewardRequest) -> list[Image.Image]:
    """The picture that the prompt is about, if there is one. ValueError if it cannot be read."""
    if not row.reference:
        return []
    try:
        with Image.open(row.reference) as file:
            return [file.convert("RGB")]
    except OSError as error:
        raise ValueError(f"{row.sample_id}: its reference {row.reference} cannot be read: {error}") from error


def message_part(picture: Image.Image) -> dict[str, Any]:
    """As messages of an OpenAI-compatible API hold it: PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}
