"""1 if the completion is the answer."""

from __future__ import annotations

from services.reward.scorers.base import AnswerScorer
from shared.config.builtin import ExactMatch


class ExactMatchScorer(AnswerScorer):
    def __init__(self, params: ExactMatch) -> None:
        self.params, self.field = params, params.field

    def compare(self, answer: str, completion: str) -> float:
        return float(self._plain(completion) == self._plain(answer))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.params.strip else text
        return text.casefold() if self.params.ignore_case else text
