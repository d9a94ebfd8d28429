"""`POST /score`: the scorers of training for others. A failure is null with its reason, never a 0."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from services.reward.score_api import EXAMPLE, KEPT, Scorers, make_app
from shared.config import tokens
from shared.config.sections import Scorer
from shared.config.settings import Settings
from shared.media import as_file, encoded_video
from shared.types.part import Media


@pytest.fixture
def plain(tmp_path: Path) -> Settings:
    return Settings("redis://unused", tmp_path, (tmp_path,), f"dir:{tmp_path}", 1, None, most_request_bytes=100_000)


@pytest.fixture
def client(plain: Settings) -> Iterator[TestClient]:
    with TestClient(make_app(plain)) as client:
        yield client


def ask(client: TestClient, scorers: dict[str, Any], *rows: dict[str, Any], **more: Any) -> Any:
    reward = {"scorers": scorers, **more.pop("reward", {})}
    answer = client.post("/score", json={"reward": reward, "rows": list(rows), **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["rows"]


def test_the_example_of_the_document_works(client: TestClient) -> None:
    answer = client.post("/score", json=EXAMPLE).json()
    assert answer["rows"] == [{"id": "", "reward": 1.0, "components": {"answer": 1.0}, "errors": {}}]
    assert EXAMPLE in client.get("/openapi.json").json()["components"]["schemas"]["Request"]["examples"]


def test_pictures_are_scored_for_others_too(client: TestClient) -> None:
    """As files in base64: the same score as of the pixels; what is no picture is refused by name."""
    pixels = np.full((8, 8, 3), 51, np.uint8)
    kinds = {"still": as_file(Media(mime="image/raw", data=pixels))}
    kinds["moving"] = as_file(encoded_video(np.stack([pixels] * 3), 16, 10))
    rows = [{"id": n, "media": {"mime": m, "base64": base64.b64encode(d).decode()}} for n, (m, d) in kinds.items()]
    found = ask(client, {"light": {"name": "brightness"}}, *rows)
    assert [row["reward"] for row in found] == [pytest.approx(0.2, abs=1e-6), pytest.approx(0.2, abs=0.02)]
    for media in ({"mime": "image/png", "base64": "AAAA"}, {"mime": "text/plain", "base64": "AAAA"}):
        body = {"reward": {"scorers": {"light": {"name": "brightness"}}}, "rows": [{"media": media}]}
        answer = client.post("/score", json=body)
        assert answer.status_code == 422 and "rows.0.media" in answer.text, answer.text
    [row] = ask(client, {"light": {"name": "brightness"}}, {"completion": "a text"})
    assert row["reward"] is None and "no picture" in row["errors"]["light"]


def test_components_are_blended_as_in_training(client: TestClient) -> None:
    scorers = {
        "exact": {"name": "exact_match", "weight": 3.0},
        "digits": {"name": "regex", "params": {"pattern": r"\d+"}, "weight": 1.0},
    }
    rows: list[dict[str, Any]] = [
        {"id": "a", "completion": "12", "metadata": {"answer": "12"}},
        {"id": "b", "completion": "13", "metadata": {"answer": "12"}},
        {"id": "c", "completion": "12"},
    ]
    found = ask(client, scorers, *rows)
    assert [r["id"] for r in found] == ["a", "b", "c"] and [r["reward"] for r in found] == [1.0, 0.25, None]
    assert found[2]["components"] == {"exact": None, "digits": 1.0} and set(found[2]["errors"]) == {"exact"}
    assert ask(client, scorers, *rows[:2], reward={"aggregation": "min"})[1]["reward"] == 0.0


def test_a_scorer_that_hangs_fails_at_the_deadline_and_the_others_count(client: TestClient) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(3)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    scorers = {
        "far": {"name": "remote_http", "params": {"url": f"http://127.0.0.1:{server.server_port}/"}},
        "exact": {"name": "exact_match"},
    }
    row = {"completion": "1", "metadata": {"answer": "1"}}
    started = time.monotonic()
    [found, _] = ask(client, scorers, row, row, deadline_s=0.5)
    assert time.monotonic() - started < 2
    assert found["components"] == {"far": None, "exact": 1.0} and found["reward"] is None
    assert "deadline of 0.5 s" in found["errors"]["far"]
    [again] = ask(client, scorers, row, deadline_s=0.2)
    assert "deadline" in again["errors"]["far"]
    server.shutdown()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"reward": {"scorers": {"x": {"name": "exact_mach"}}}}, ["reward.scorers.x.name", "exact_match"]),
        ({"reward": {"scorers": {"x": {"name": "exact_match", "params": {"strp": 1}}}}}, ["reward.scorers.x.params.strp"]),
        ({"reward": {"scorers": {}}}, ["reward", "at least 1"]),
        ({"rows": []}, ["rows", "at least 1"]),
        ({"rows": [{"prompt": "x"}]}, ["rows.0", "completion: give it, or media"]),
        ({"deadline_s": 0}, ["deadline_s", "greater than 0"]),
        ({"roes": 1}, ["roes"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_requests_name_the_field(client: TestClient, body: dict[str, Any], words: list[str]) -> None:
    answer = client.post("/score", json=EXAMPLE | body)
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    assert all(word in answer.text.replace("Field required", "required") for word in words), answer.text


def test_tokens_and_limits_are_those_of_the_controller(plain: Settings) -> None:
    path = plain.state / "tokens"
    secrets = {}
    for scope in ("read", "submit"):
        secrets[scope], kept = tokens.fresh(scope, scope)
        tokens.add(path, kept)
    with TestClient(make_app(replace(plain, tokens=path))) as client:
        codes = [client.post("/score", json=EXAMPLE, headers=headers).status_code for headers in headers_of(secrets)]
        assert codes == [401, 401, 403, 200]
        large = client.post("/score", content=b" " * 200_000, headers={"Authorization": f"Bearer {secrets['submit']}"})
        assert large.status_code == 413


def headers_of(secrets: dict[str, str]) -> list[dict[str, str]]:
    asked = ["", "Bearer wrong", f"Bearer {secrets['read']}", f"Bearer {secrets['submit']}"]
    return [{"Authorization": value} if value else {} for value in asked]


def test_scorers_stay_loaded_and_are_forgotten_in_time() -> None:
    scorers = Scorers(kept=2)

    def asked(*fields: str) -> dict[str, Any]:
        with scorers.using({f: Scorer(name="exact_match", params={"field": f}) for f in fields}) as found:
            return dict(found)

    first = asked("a")["a"]
    assert asked("a")["a"] is first and KEPT > 2
    with scorers.using({"a": Scorer(name="exact_match", params={"field": "a"})}) as held:
        asked("b", "c", "d")
        assert held["a"] is first and first.submit([]).result(5).scores == (), "in use: not forgotten"
    assert len(scorers.loaded) == 2
    asked("e", "f")
    assert asked("a")["a"] is not first
    scorers.close()


def test_more_scorers_than_stay_loaded_are_refused(client: TestClient) -> None:
    many = {f"s{i}": {"name": "exact_match", "params": {"field": f"f{i}"}} for i in range(KEPT + 1)}
    answer = client.post("/score", json=EXAMPLE | {"reward": {"scorers": many}})
    assert answer.status_code == 422 and f"at most {KEPT}" in answer.text
