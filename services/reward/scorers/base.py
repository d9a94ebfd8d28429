"""What a scorer is: rows in, one number a row out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shared.types.rewards import RewardRequest


class Scorer(Protocol):
    def score(self, rows: Sequence[RewardRequest]) -> Sequence[float | None]:
        """One score a row, in order. None or a number that is not finite means that the row could not be scored."""
        ...


class AnswerScorer:
    """Compares each completion with the answer that its row's metadata holds under `field`."""

    field: str

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None for a row without an answer."""
        answers = [self.answer(row) for row in rows]
        return [None if a is None else self.compare(str(a), row.completion) for a, row in zip(answers, rows, strict=True)]

    def answer(self, row: RewardRequest) -> Any:
        return row.metadata.get(self.field)

    def compare(self, answer: str, completion: str) -> float:
        raise NotImplementedError
