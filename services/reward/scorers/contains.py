"""1 if the completion contains the answer."""

from __future__ import annotations

from typing import Any

from services.reward.scorers.base import AnswerScorer
from shared.config.builtin import Contains
from shared.types.rewards import RewardRequest


class ContainsScorer(AnswerScorer):
    def __init__(self, params: Contains) -> None:
        self.params, self.field = params, params.field

    def answer(self, row: RewardRequest) -> Any:
        return self.params.text if self.params.text is not None else super().answer(row)

    def compare(self, answer: str, completion: str) -> float:
        return float(self._plain(answer) in self._plain(completion))

    def _plain(self, text: str) -> str:
        return text.casefold() if self.params.ignore_case else text
