"""1 if the completion is the answer."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.builtin import ExactMatch
from shared.types.rewards import RewardRequest


class ExactMatchScorer:
    def __init__(self, params: ExactMatch) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None for a row whose metadata lacks the answer."""
        return [self._one(row) for row in rows]

    def _one(self, row: RewardRequest) -> float | None:
        answer = row.metadata.get(self.params.field)
        if answer is None:
            return None
        return float(self._plain(row.completion) == self._plain(str(answer)))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.params.strip else text
        return text.casefold() if self.params.ignore_case else text
