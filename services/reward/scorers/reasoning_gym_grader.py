"""reasoning-gym's own grader of the data set that the prompt came from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import reasoning_gym
import regex

from shared.config.builtin import ReasoningGym
from shared.types.rewards import RewardRequest


@cache
def grader(dataset: str) -> Any:
    return reasoning_gym.get_score_answer_fn(dataset)


class ReasoningGymScorer:
    def __init__(self, params: ReasoningGym) -> None:
        self.pattern = regex.compile(params.answer_pattern, regex.DOTALL) if params.answer_pattern else None

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None for a row that did not come from reasoning-gym; 0 for one without the answer pattern."""
        return [self._one(row) for row in rows]

    def _one(self, row: RewardRequest) -> float | None:
        dataset, entry = row.metadata.get("dataset"), row.metadata.get("entry")
        if dataset is None or entry is None:
            return None
        answer = row.completion
        if self.pattern is not None:
            found = self.pattern.findall(row.completion)
            if not found:
                return 0.0
            answer = found[-1]
        return float(grader(dataset)(answer.strip(), entry))
