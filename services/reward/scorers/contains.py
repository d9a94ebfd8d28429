"""1 if the completion contains the answer."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.builtin import Contains
from shared.types.rewards import RewardRequest


class ContainsScorer:
    def __init__(self, params: Contains) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None for a row without an answer."""
        return [self._one(row) for row in rows]

    def _one(self, row: RewardRequest) -> float | None:
        wanted = self.params.text if self.params.text is not None else row.metadata.get(self.params.field)
        if wanted is None:
            return None
        return float(self._plain(str(wanted)) in self._plain(row.completion))

    def _plain(self, text: str) -> str:
        return text.casefold() if self.params.ignore_case else text
