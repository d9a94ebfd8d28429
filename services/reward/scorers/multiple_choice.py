"""The letter that the completion chose, against the answer. Golden topic 9 holds vectors (`mc_*`)."""

from __future__ import annotations

import re
from typing import Literal

from services.reward.scorers.base import AnswerScorer
from shared.config.builtin import MultipleChoice

Way = Literal["tag", "phrase", "bare", "standalone"]
TAG = re.compile(r"<answer>\s*([A-D])\s*</answer>", re.IGNORECASE)
PHRASE = re.compile(r"(?:answer|option)\s*(?:is|:)\s*[(\[]?\s*([A-D])", re.IGNORECASE)
BARE = re.compile(r"[1-4A-D]", re.IGNORECASE)
STANDALONE = re.compile(r"\b([A-D])\b")
DIGITS = {"1": "A", "2": "B", "3": "C", "4": "D"}
WAYS: dict[str, tuple[Way, ...]] = {
    "plain": ("tag", "bare", "phrase", "standalone"),
    "phrase": ("tag", "phrase"),
    "tag": ("tag",),
    "graded": ("tag", "phrase", "bare", "standalone"),
}
"""How a letter may be given, in the order in which it is looked for."""


def extract(text: str, mode: str) -> tuple[str, float]:
    """(letter, weight); ("", 0) if there is none. Of several of a kind the last counts. Only `graded` weighs less than 1."""
    for way in WAYS[mode]:
        if letter := _found(text, way):
            return letter, 0.5 if mode == "graded" and way != "tag" else 1.0
    return "", 0.0


def _found(text: str, way: Way) -> str:
    if way == "bare":
        whole = text.strip()
        return normalized(whole) if BARE.fullmatch(whole) else ""
    pattern = {"tag": TAG, "phrase": PHRASE, "standalone": STANDALONE}[way]
    letters = pattern.findall(text)
    return letters[-1].upper() if letters else ""


def normalized(gold: str) -> str:
    """Stripped, upper case, 1-4 as A-D; anything else unchanged."""
    plain = gold.strip().upper()
    return DIGITS.get(plain, plain)


class MultipleChoiceScorer(AnswerScorer):
    def __init__(self, params: MultipleChoice) -> None:
        self.params, self.field = params, params.field

    def compare(self, answer: str, completion: str) -> float:
        letter, weight = extract(completion, self.params.mode)
        if letter != normalized(answer):
            return 0.0
        return weight or 1.0  # an empty answer equals an empty extraction
