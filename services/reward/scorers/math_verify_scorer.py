"""1 if the completion's mathematics equals the answer's (the math-verify package). It may hang: it runs in its own process."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.builtin import MathVerify
from shared.types.rewards import RewardRequest


class MathVerifyScorer:
    def __init__(self, params: MathVerify) -> None:
        import math_verify

        self.params, self.library = params, math_verify

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None for a row whose metadata lacks the answer."""
        return [self._one(row) for row in rows]

    def _one(self, row: RewardRequest) -> float | None:
        gold = row.metadata.get(self.params.field)
        if gold is None:
            return None
        return self.compare(str(gold), row.completion)

    def compare(self, gold: str, prediction: str) -> float:
        """The process's own time-out is the limit: the library's uses signals, which only a main thread may."""
        wanted = self.library.parse(f"\\boxed{{{gold.strip()}}}", parsing_timeout=None)
        found = self.library.parse(prediction, parsing_timeout=None)
        return float(self.library.verify(wanted, found, timeout_seconds=None))
