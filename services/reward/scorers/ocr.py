"""Whether a picture shows the text that its prompt puts in quotes, as a recognizer reads it (golden topic 9, `ocr_*`)."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.reward.scorers.images import frames
from shared.config.builtin import Ocr
from shared.types.rewards import RewardRequest

QUOTED = re.compile(r"[\"“”]([^\"“”]+)[\"“”]")


def normalized(text: str) -> str:
    """Case-folded, in NFC, without white space."""
    return "".join(unicodedata.normalize("NFC", text.casefold()).split())


def target_of(prompt: str) -> str:
    """The first text between double quotes, straight or curly. ValueError without any."""
    found = QUOTED.search(prompt)
    if found is None:
        raise ValueError(f"prompt {prompt!r}: names no text between double quotes")
    return normalized(found[1])


def joined(result: Any) -> str:
    """The pieces that a recognizer has read, without separator. Pages are objects with a list `rec_texts`, or lists of lines
    whose second item begins with the text; what is neither is skipped."""
    pieces: list[str] = []
    for page in result or ():
        if isinstance(page, dict):
            texts = page.get("rec_texts")
            pieces += [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
        elif isinstance(page, list):
            pieces += [
                line[1][0]
                for line in page
                if isinstance(line, list | tuple) and len(line) > 1 and isinstance(line[1], list | tuple) and line[1]
            ]
    return "".join(pieces)


def distance(a: str, b: str) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def compared(recognized: str, target: str) -> dict[str, float]:
    """Of normalized texts: `edit_similarity` is 1 if the target is in the text, else `1 - min(d, n) / n` with Levenshtein's d
    and the target's length n; also substring_match, exact_match, counter_iou of characters. ValueError for an empty target."""
    if not target:
        raise ValueError("the text that the prompt asks for is empty")
    inside, apart = target in recognized, distance(recognized, target)
    have, want = Counter(recognized), Counter(target)
    return {
        "edit_distance": apart,
        "edit_similarity": 1.0 if inside else 1 - min(apart, len(target)) / len(target),
        "substring_match": float(inside),
        "exact_match": float(recognized == target),
        "counter_iou": (have & want).total() / (have | want).total(),
    }


class OcrScorer:
    """rapidocr with the models of its wheel, on the CPU. Of a video its best frame counts, of `frames` spread over it."""

    def __init__(self, params: Ocr) -> None:
        from rapidocr import RapidOCR

        self.params = params
        self.engine = RapidOCR(params={"Global.log_level": "error"})
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return [self._one(row) for row in rows]

    def _one(self, row: RewardRequest) -> float:
        target = target_of(row.prompt)
        shown = (np.asarray(frame) for frame in frames(row, self.params.frames))
        return max(compared(self.read(frame), target)[self.params.reward] for frame in shown)

    def read(self, frame: np.ndarray[Any, Any]) -> str:
        """Normalized."""
        found: Any = self.engine(np.ascontiguousarray(frame[:, :, ::-1]))  # it takes blue first
        return normalized(joined([{"rec_texts": list(found.txts or ())}]))
