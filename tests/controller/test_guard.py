"""Who may ask what: tokens and scopes, wrong tokens, large bodies; by a real server on loopback."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn

from services.controller.api.app import make_app
from shared.config import tokens
from shared.config.settings import Settings
from shared.config.tokens import Scope
from shared.http.guard import MOST_WRONG, WINDOW_S, Failures, check_listening
from unimesh.doctor import examine


class Served:
    def __init__(self, settings: Settings) -> None:
        self.secrets: dict[str, str] = {}
        path = settings.state / "tokens"
        for scope in tokens.SCOPES:
            self.secrets[scope], kept = tokens.fresh(f"a {scope}", scope)
            tokens.add(path, kept)
        self.path = path
        settings = replace(settings, tokens=path, most_request_bytes=20_000)
        self.server = uvicorn.Server(uvicorn.Config(make_app(settings), port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=10)

    def ask(self, scope: Scope | None, method: str, path: str, **more: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.secrets[scope]}"} if scope else {}
        return self.http.request(method, path, headers=headers, **more)  # type: ignore[arg-type]


@pytest.fixture
def served(settings: Settings) -> Iterator[Served]:
    found = Served(settings)
    yield found
    found.server.should_exit = True
    found.thread.join(20)


def test_scopes(served: Served) -> None:
    assert served.ask(None, "GET", "/healthz").status_code == 200
    answer = served.ask(None, "GET", "/v1/jobs")
    assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/problem+json" and "unimesh token" in answer.json()["detail"]
    assert all(served.ask(scope, "GET", "/v1/jobs").status_code == 200 for scope in tokens.SCOPES)
    refused = served.ask("read", "POST", "/v1/jobs/x/pause")
    assert refused.status_code == 403 and "needs submit" in refused.json()["detail"]
    assert served.ask("submit", "POST", "/v1/jobs/x/pause").status_code == 404
    assert served.ask("submit", "DELETE", "/v1/workers").status_code == 403
    assert served.ask("admin", "DELETE", "/v1/workers").status_code == 405


def test_tokens_are_kept_as_hashes_that_only_their_owner_reads(served: Served) -> None:
    text = served.path.read_text()
    assert all(secret not in text for secret in served.secrets.values()) and text.count("sha256") == 3
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600


def test_the_environments_token_has_every_right_beside_the_files(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    secret, kept = tokens.fresh("a reader", "read")
    tokens.add(path, kept)
    assert tokens.known(settings) is None
    known = tokens.known(replace(settings, tokens=path, token="chosen-by-hand-1234"))
    assert known is not None and [token.scope for token in known] == ["read", "admin"]
    both = [tokens.match(word, known) for word in (secret, "chosen-by-hand-1234", "chosen-by-hand-1235", "")]
    assert [token.name if token else None for token in both] == ["a reader", "UNIMESH_TOKEN", None, None]
    again = tokens.known(replace(settings, tokens=path, token=secret))
    assert again is not None and [token.scope for token in again] == ["read"], "a command's token gets no more rights by it"
    with pytest.raises(ValueError, match="has 6 characters: must have at least 16"):
        tokens.known(replace(settings, token="secret"))


def test_without_any_token_only_loopback_is_listened_on(settings: Settings) -> None:
    """A container listens on all addresses, so it always needs one."""
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        with pytest.raises(ValueError, match="set UNIMESH_TOKENS or UNIMESH_TOKEN"):
            check_listening(host, settings)
        check_listening(host, replace(settings, token="chosen-by-hand-1234"))
    check_listening("127.0.0.1", settings)
    check_listening("localhost", settings)


def test_a_broken_token_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text('{"name": "a", "scope": "read", "sha256": "x"}\n{"name": "b", "scope": "god"}\n')
    with pytest.raises(ValueError, match="line 2 is no token"):
        tokens.read(path)


def test_wrong_tokens_make_an_address_wait(served: Served) -> None:
    wrong = {"Authorization": "Bearer um_wrong"}
    codes = [served.http.get("/v1/jobs", headers=wrong).status_code for _ in range(MOST_WRONG + 2)]
    assert codes == [401] * MOST_WRONG + [429] * 2
    last = served.ask("admin", "GET", "/v1/jobs")
    assert last.status_code == 429 and 0 < int(last.headers["Retry-After"]) <= WINDOW_S + 1
    assert served.http.get("/healthz").status_code == 200


def test_failures_are_forgotten() -> None:
    now = [0.0]
    failures = Failures(lambda: now[0])
    for _ in range(MOST_WRONG):
        failures.add("a")
        now[0] += 1
    assert failures.wait("a") == pytest.approx(WINDOW_S - MOST_WRONG) and failures.wait("b") == 0
    now[0] += WINDOW_S - MOST_WRONG + 0.1
    assert failures.wait("a") == 0


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_that_is_too_large_is_refused(served: Served, chunked: bool) -> None:
    body = b'{"document": {"name": "' + b"x" * 30_000 + b'"}}'
    content = (body[i : i + 1000] for i in range(0, len(body), 1000)) if chunked else body
    answer = served.ask("admin", "POST", "/v1/jobs", content=content)
    assert answer.status_code == 413 and "20000 bytes" in answer.json()["detail"]
    assert served.ask("admin", "POST", "/v1/jobs", content=b"{}").status_code == 422


def test_doctor_says_whether_a_token_works(served: Served, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token, a wrong one, the right one."""
    monkeypatch.setenv("UNIMESH_API", served.url)
    found = []
    for value in ("", "wrong-wrong", served.secrets["read"]):
        monkeypatch.setenv("UNIMESH_TOKEN", value)
        found.append({f.name: f for f in examine(settings.state, settings.redis_url)})
    assert [f["token"].ok for f in found] == [False, False, True] and "unimesh token" in found[1]["token"].fix
    assert found[0]["clock"].ok and "from Redis's" in found[0]["clock"].detail
