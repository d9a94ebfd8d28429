"""1 if the completion's mathematics equals the answer's (the math-verify package). It may hang: it runs in its own process."""

from __future__ import annotations

from services.reward.scorers.base import AnswerScorer
from shared.config.builtin import MathVerify


class MathVerifyScorer(AnswerScorer):
    def __init__(self, params: MathVerify) -> None:
        import math_verify

        self.field, self.library = params.field, math_verify

    def compare(self, answer: str, completion: str) -> float:
        """The process's own time-out is the limit: the library's uses signals, which only a main thread may."""
        wanted = self.library.parse(f"\\boxed{{{answer.strip()}}}", parsing_timeout=None)
        found = self.library.parse(completion, parsing_timeout=None)
        return float(self.library.verify(wanted, found, timeout_seconds=None))
