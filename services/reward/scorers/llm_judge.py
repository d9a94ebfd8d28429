"""A language model behind an OpenAI-compatible endpoint reads prompt and completion and gives a score."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from services.reward.scorers.http import Caller, authorization
from services.reward.scorers.images import frames, given, message_part
from shared.config.builtin import LlmJudge
from shared.config.problems import bad
from shared.types.rewards import RewardRequest

PLACES = re.compile(r"\{(prompt|completion|metadata)\}")


class LlmJudgeScorer:
    def __init__(self, params: LlmJudge, transport: Any = None) -> None:
        self.params = params
        try:
            self.pattern = re.compile(params.score_pattern, re.DOTALL)
        except re.error as error:
            raise bad("score_pattern", params.score_pattern, f"no regular expression: {error}") from error
        self.caller = Caller(
            authorization(params),
            params.timeout_s,
            params.attempts,
            params.concurrency,
            params.requests_per_minute,
            params.tokens_per_minute,
            transport=transport,
        )

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None where the judge could not be asked, or gave no score in range."""
        return self.caller.each(self._one, rows)

    def _one(self, row: RewardRequest) -> float | None:
        p = self.params
        values = {"prompt": row.prompt, "completion": row.completion, "metadata": json.dumps(row.metadata)}
        said = PLACES.sub(lambda place: values[place[1]], p.template)
        messages = [{"role": "system", "content": p.system}] if p.system else []
        content: Any = said
        if row.media is not None:
            content = [*map(message_part, [*given(row), *frames(row, p.frames)]), {"type": "text", "text": said}]
        body = {
            "model": p.model,
            "messages": [*messages, {"role": "user", "content": content}],
            "temperature": p.temperature,
            "max_tokens": p.max_tokens,
        }
        tokens = len(said) / 4 + p.max_tokens  # before it is asked nobody knows; about four characters a token
        answer = self.caller.post(f"{p.base_url.rstrip('/')}/chat/completions", body, tokens=tokens)
        text = str(answer["choices"][0]["message"]["content"])
        found = self.pattern.findall(text)
        if not found:
            return None
        value = float(found[-1] if isinstance(found[-1], str) else found[-1][0])
        if not p.least <= value <= p.most:
            return None
        return (value - p.least) / (p.most - p.least)
