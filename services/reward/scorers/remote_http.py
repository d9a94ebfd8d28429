"""A scorer that runs elsewhere, asked over HTTP: `POST {url}` with rows, answered with one number a row.

Request: `{"scorer", "rows": [{"sample_id", "prompt", "completion", "truncated", "tokens", "metadata"}]}`, an `Idempotency-Key`
that is the same for every attempt, and `X-Scorer-Version` if a version is pinned. Answer: `{"scores": [number | null],
"version"}`, the numbers in the rows' order, with `sample_ids` echoed where the service gives them. `POST /score` of the reward
service is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from services.reward.scorers.http import Caller, authorization
from shared.config.builtin import RemoteHttp
from shared.types.rewards import RewardRequest


class RemoteHttpScorer:
    def __init__(self, params: RemoteHttp, transport: Any = None) -> None:
        self.params = params
        headers = authorization(params)
        if params.version is not None:
            headers["X-Scorer-Version"] = params.version
        self.caller = Caller(
            headers, params.timeout_s, params.attempts, params.concurrency, params.requests_per_minute, transport=transport
        )

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        """None for every row of a piece that could not be had, or whose answer names other samples or another version."""
        size = self.params.rows_per_request
        pieces = [rows[low : low + size] for low in range(0, len(rows), size)]
        found = self.caller.each(self._piece, pieces)
        return [
            score
            for piece, scores in zip(pieces, found, strict=True)
            for score in (scores if scores is not None else [None] * len(piece))
        ]

    def _piece(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        body = {"scorer": self.params.scorer, "rows": msgspec.to_builtins(list(rows))}
        digest = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
        answer = self.caller.post(self.params.url, body, {"Idempotency-Key": digest})
        if not isinstance(answer, dict):
            raise ValueError(f"the answer is a {type(answer).__name__}, not an object")
        if self.params.version is not None and answer.get("version") != self.params.version:
            raise ValueError(f"version {answer.get('version')!r} answered, {self.params.version!r} was asked for")
        names = answer.get("sample_ids")
        if names is not None and names != [row.sample_id for row in rows]:
            raise ValueError("the answer is for other samples")
        scores = answer["scores"]
        if not isinstance(scores, list) or len(scores) != len(rows):
            raise ValueError("the answer has another number of scores")
        return scores
