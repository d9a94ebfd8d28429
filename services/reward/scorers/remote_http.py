"""A scorer that runs elsewhere, asked over HTTP: `POST {url}` with rows, answered with one number a row.

Request: `{"scorer", "rows": [{"sample_id", "prompt", "completion", "truncated", "tokens", "metadata"}]}`, an `Idempotency-Key`
that is the same for every attempt, and `X-Scorer-Version` if a version is pinned. A row with a picture or video has it as
`"media": {"mime", "base64"}`, a PNG or MP4, and the picture that its prompt is about as `"reference"`, likewise. Answer:
`{"scores": [number | null], "version"}`, the numbers in the rows' order, with `sample_ids` echoed where the service gives them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from services.reward.scorers.http import Caller, authorization
from services.reward.scorers.images import as_png, given
from shared.config.builtin import RemoteHttp
from shared.media import as_file
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
        body = {"scorer": self.params.scorer, "rows": [_plain(row) for row in rows]}
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


def _plain(row: RewardRequest) -> dict[str, Any]:
    """As JSON: pictures and videos as files in base64."""
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(row, media=None, reference=""))
    del found["media"], found["reference"]
    files = {"media": as_file(row.media)} if row.media is not None else {}
    for picture in given(row):
        files["reference"] = as_png(picture)
    return found | {n: {"mime": mime, "base64": base64.b64encode(data).decode()} for n, (mime, data) in files.items()}
