"""1 at a target length in tokens, falling linearly to 0 on both sides."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.builtin import Length
from shared.types.rewards import RewardRequest


class LengthScorer:
    def __init__(self, params: Length) -> None:
        self.params = params

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return [max(0.0, 1 - abs(row.tokens - self.params.target) / self.params.width) for row in rows]
