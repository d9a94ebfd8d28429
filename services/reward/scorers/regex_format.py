"""1 if the completion matches a pattern."""

from __future__ import annotations

from collections.abc import Sequence

import regex

from shared.config.builtin import RegexFormat
from shared.config.problems import bad
from shared.types.rewards import RewardRequest


class RegexScorer:
    def __init__(self, params: RegexFormat) -> None:
        try:
            pattern = regex.compile(params.pattern, regex.DOTALL)
        except regex.error as error:
            raise bad("pattern", params.pattern, f"no regular expression: {error}") from error
        self.match = pattern.fullmatch if params.full else pattern.search

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return [float(self.match(row.completion) is not None) for row in rows]
