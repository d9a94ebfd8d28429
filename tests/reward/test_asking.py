"""Scorers that ask others, against a real HTTP server on loopback that answers as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.reward.scorers import load
from services.reward.scorers.http import Bucket
from shared.config import specs
from shared.config.problems import BadInput
from shared.types import RewardRequest


class Other:
    """The other side: `answers` are (status, headers, body), used up one by one; the last stays."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], Any]] = []
        self.seen: list[tuple[dict[str, str], Any]] = []
        self.lock, self.now, self.most, self.delay = threading.Lock(), 0, 0, 0.0
        other = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with other.lock:
                    other.now += 1
                    other.most = max(other.most, other.now)
                    other.seen.append((dict(self.headers), body))
                    status, headers, answer = other.answers.pop(0) if len(other.answers) > 1 else other.answers[0]
                time.sleep(other.delay)
                data = json.dumps(answer(body) if callable(answer) else answer).encode()
                with other.lock:
                    other.now -= 1
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def other() -> Iterator[Other]:
    found = Other()
    yield found
    found.server.shutdown()


def row(completion: str = "c", name: str = "r/0") -> RewardRequest:
    return RewardRequest(sample_id=name, prompt="p {x}", completion=completion)


def said(text: str) -> Any:
    return {"choices": [{"message": {"content": text}}]}


def judge(other: Other, **more: Any) -> Any:
    return load("llm_judge", {"base_url": f"{other.url}/v1", "model": "m", "timeout_s": 5, **more})


def test_a_judges_rating_is_scaled_and_only_a_rating_counts(other: Other) -> None:
    def answer(body: Any) -> Any:
        text = body["messages"][-1]["content"]
        return said("Score: 7.5" if "good" in text else "Score: 2 no, Score: 0" if "bad" in text else "Score: 11")

    other.answers = [(200, {}, answer)]
    assert judge(other).score([row("good"), row("bad"), row("odd")]) == [0.75, 0.0, None]
    assert {body["model"] for _, body in other.seen} == {"m"} and "p {x}" in other.seen[0][1]["messages"][0]["content"]
    other.answers = [(200, {}, said("I refuse"))]
    assert judge(other).score([row()]) == [None]


def test_only_what_may_be_repeated_is(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("services.reward.scorers.http.time.sleep", pauses.append)
    other.answers = [(429, {"retry-after": "7"}, {}), (503, {}, {}), (200, {}, said("Score: 10"))]
    assert judge(other).score([row()]) == [1.0]
    pauses = [p for p in pauses if p]
    assert len(pauses) == 2 and pauses[0] >= 7 and 1 <= pauses[1] <= 3
    other.answers, before = [(400, {}, {"error": "no such model"})], len(other.seen)
    assert judge(other).score([row()]) == [None] and len(other.seen) == before + 1
    other.answers, before = [(500, {}, {})], len(other.seen)
    assert judge(other, attempts=2).score([row()]) == [None] and len(other.seen) == before + 2


def test_as_many_at_once_as_allowed(other: Other) -> None:
    other.answers, other.delay = [(200, {}, said("Score: 5"))], 0.05
    assert judge(other, concurrency=3).score([row() for _ in range(9)]) == [0.5] * 9
    assert 2 <= other.most <= 3


def test_a_bucket_never_gives_more_than_its_rate() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    bucket = Bucket(60, lambda: now[0], sleep)
    for _ in range(130):
        bucket.take()
    assert 130 - 1 - 6 <= now[0] <= 130
    now[0] += 1000
    before = now[0]
    for _ in range(66):
        bucket.take()
    assert now[0] - before >= 59


def test_a_token_comes_from_a_variable_that_is_meant_for_it(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMESH_KEY_JUDGE", "secret")
    other.answers = [(200, {}, said("Score: 1"))]
    judge(other, key_variable="UNIMESH_KEY_JUDGE").score([row()])
    assert other.seen[0][0]["Authorization"] == "Bearer secret"
    with pytest.raises(BadInput, match="not set"):
        judge(other, key_variable="UNIMESH_KEY_OTHER")
    with pytest.raises(BadInput, match="key_variable"):
        specs.check("scorer", "llm_judge", {"base_url": other.url, "model": "m", "key_variable": "HOME"}, "scorer")


def test_a_remote_scorer_echoes_identity_and_version(other: Other) -> None:
    def answer(body: Any) -> Any:
        names = [r["sample_id"] for r in body["rows"]]
        return {"scores": [float(len(r["completion"])) for r in body["rows"]], "sample_ids": names, "version": "2"}

    other.answers = [(200, {}, answer)]
    params = {"url": f"{other.url}/score", "scorer": "size", "version": "2", "rows_per_request": 2, "timeout_s": 5}
    rows = [row("a" * n, f"r/{n}") for n in range(5)]
    assert load("remote_http", params).score(rows) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(other.seen) == 3 and all(h["X-Scorer-Version"] == "2" for h, _ in other.seen)
    keys = {h["Idempotency-Key"] for h, _ in other.seen}
    load("remote_http", params).score(rows)
    assert keys == {h["Idempotency-Key"] for h, _ in other.seen}, "the same rows have the same key"
    for wrong in (
        {"scores": [1.0, 2.0], "version": "3"},
        {"scores": [1.0], "version": "2"},
        {"scores": [1.0, 2.0], "sample_ids": ["x", "y"], "version": "2"},
        ["no object"],
    ):
        other.answers = [(200, {}, wrong)]
        assert load("remote_http", params).score(rows[:2]) == [None, None]


def test_nobody_there_is_a_failure(other: Other) -> None:
    params = {"url": "http://127.0.0.1:9/score", "attempts": 1}
    assert load("remote_http", params).score([row(), row()]) == [None, None]
