"""GenEval 2's questions about a picture (soft-TIFA), asked of a vision-language model behind an OpenAI-compatible endpoint.

The score of a question is the probability that the model's first token begins the right answer (golden topic 9, `geneval2_*`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from services.reward.scorers.http import Caller, authorization
from services.reward.scorers.images import frames, message_part
from shared.config.builtin import Geneval2
from shared.types.rewards import RewardRequest

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FLOOR = 1e-300


def surface_forms(question: str, answer: str) -> list[str]:
    """How the right answer may begin. ValueError for a question of yes or no whose answer is not yes."""
    if not question.startswith("How many"):
        if answer.strip().lower() != "yes":
            raise ValueError(f"question {question!r}: its answer is {answer!r}, must be Yes")
        return ["Yes", "yes", " Yes", " yes"]
    word = answer.strip()
    found = [word, word.capitalize(), f" {word}", f" {word.capitalize()}"]
    if word.lower() in NUMBERS:
        digit = str(NUMBERS.index(word.lower()))
        found += [digit, f" {digit}"]
    return found


def means(scores: Sequence[float]) -> dict[str, float]:
    """`gm`: the geometric mean, with a floor; `am`: the arithmetic one."""
    logs = [math.log(max(score, FLOOR)) for score in scores]
    return {"gm": math.exp(sum(logs) / len(logs)), "am": sum(scores) / len(scores)}


class Geneval2Scorer:
    def __init__(self, params: Geneval2, transport: Any = None) -> None:
        self.params = params
        limits = (params.timeout_s, params.attempts, params.concurrency, params.requests_per_minute)
        self.caller = Caller(authorization(params), *limits, transport=transport)

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None where the model could not be asked. ValueError for a row without questions, or without a picture."""
        asked = [(message_part(frames(row, 1)[0]), self._questions(row)) for row in rows]
        return self.caller.each(lambda one: self._one(*one), asked)

    def _questions(self, row: RewardRequest) -> list[tuple[str, set[str]]]:
        """Each with the beginnings of its right answer."""
        listed = row.metadata.get(self.params.field)
        good = isinstance(listed, list) and listed and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in listed)
        if not good:
            raise ValueError(f"{row.sample_id}: its record has no list {self.params.field!r} of [question, answer]")
        assert isinstance(listed, list)
        return [(str(question), set(surface_forms(str(question), str(answer)))) for question, answer in listed]

    def _one(self, picture: dict[str, Any], asked: list[tuple[str, set[str]]]) -> float:
        return means([self._probability(picture, question, forms) for question, forms in asked])[self.params.reduce]

    def _probability(self, picture: dict[str, Any], question: str, forms: set[str]) -> float:
        p = self.params
        content = [picture, {"type": "text", "text": f"{question} {p.instruction}"}]
        body = {
            "model": p.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": p.top_logprobs,
        }
        said = self.caller.post(f"{p.base_url.rstrip('/')}/chat/completions", body)
        tops = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return float(min(1.0, sum(math.exp(top["logprob"]) for top in tops if top["token"] in forms)))
