"""Server faults that the wire has to live with: a torn log, full memory, forgotten scripts, a server set wrongly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from shared.wire.client import RedisUnfit, check_server, connect
from shared.wire.scripts import new_revision, xadd
from shared.wire.server import RedisServer
from tests.wire.test_scripts import FILLED, Bench, refused


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


def test_a_torn_commit_is_cut_whole_and_swallows_nothing_after_it(own: RedisServer, tmp_path: Path) -> None:
    b = Bench(connect(own.url), tmp_path)
    work = b.work("rollout.policy")
    b.commit("rollout.policy", work, FILLED)
    log = own.log_tail.read_bytes()
    own.kill()
    own.cut((len(log) - log.rindex(b"MULTI")) // 4)  # into the commit's writes
    own.start()
    client = connect(own.url)
    assert client.xlen(work.entry.stream) == 1 and not client.xlen(b.keys.stage("reward.a"))
    for n in range(10):
        client.set(f"n{n}", n)
    own.kill()
    own.start()
    client = connect(own.url)
    assert sum(client.exists(f"n{n}") for n in range(10)) == 10 and client.xlen(work.entry.stream) == 1


def test_an_unrepaired_torn_commit_does_swallow_what_follows(tmp_path: Path) -> None:
    """Why the repair is there: the same cut, left to Redis's own aof-load-truncated, loses acknowledged writes."""
    server = RedisServer(tmp_path / "redis", truncated="yes")
    server.start()
    try:
        b = Bench(connect(server.url), tmp_path)
        b.commit("rollout.policy", b.work("rollout.policy"), FILLED)
        log = server.log_tail.read_bytes()
        server.kill()
        server.cut((len(log) - log.rindex(b"MULTI")) // 4)
        server.start()
        client = connect(server.url)
        for n in range(10):
            client.set(f"n{n}", n)
        server.kill()
        server.start()
        assert sum(connect(server.url).exists(f"n{n}") for n in range(10)) < 10
    finally:
        server.kill()


def test_with_full_memory_work_drains_and_nothing_half_is_written(own: RedisServer, tmp_path: Path) -> None:
    b = Bench(connect(own.url), tmp_path)
    work = b.work("rollout.policy")
    b.client.xadd(b.keys.inbox, {"e": "x"})
    event = b.read("inbox")
    b.scripts.lease(b.keys.lease, "t", 60000, take=True)
    out = [xadd(b.keys.log, {"e": "x"}, "1-0")]
    b.client.config_set("maxmemory", 1)
    assert refused(lambda: b.client.xadd(b.keys.log, {"e": "x"}), "maxmemory")
    revision = new_revision("")
    assert refused(lambda: b.scripts.commit_state(b.keys, "t", "", revision, b"s", [], out), "maxmemory")
    assert not b.client.exists(b.keys.state, b.keys.log)
    assert b.commit("rollout.policy", work, FILLED) == "OK"
    assert b.scripts.commit_state(b.keys, "t", "", revision, b"s", [event.id], out) == ["OK"]


def test_forgotten_scripts_are_sent_again(own: RedisServer, tmp_path: Path) -> None:
    b = Bench(connect(own.url), tmp_path)
    b.client.script_flush()
    assert b.scripts.lease(b.keys.lease, "t", 9000, take=True) == "MINE"
    work = b.work("rollout.policy")
    b.client.script_flush()
    assert b.commit("rollout.policy", work, FILLED) == "OK"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--maxmemory-policy", "allkeys-lru"), "Set `maxmemory-policy noeviction`"),
        (("--appendonly", "no"), "Set `appendonly yes`"),
    ],
)
def test_a_server_that_would_lose_work_is_refused(tmp_path: Path, options: tuple[str, str], word: str) -> None:
    server = RedisServer(tmp_path / "redis", options=options)
    server.start()
    try:
        with pytest.raises(RedisUnfit, match=word):
            check_server(connect(server.url))
    finally:
        server.kill()


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(RedisUnfit, match=r"redis\.sock does not answer .* set UNIMESH_REDIS_URL"):
        check_server(connect(f"unix://{tmp_path}/redis.sock"), patience_s=0.2)


class DeafProxy:
    """Forwards to Redis and swallows the reply to an XADD; counts connections."""

    def __init__(self, target: str, path: Path) -> None:
        self.target, self.connections = target, 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            near, _ = self.listener.accept()
            self.connections += 1
            far = socket.socket(socket.AF_UNIX)
            far.connect(self.target)
            while sent := near.recv(65536):
                far.sendall(sent)
                reply = far.recv(65536)  # Redis has done it
                if b"XADD" in sent:
                    break
                near.sendall(reply)
            near.close()
            far.close()


def test_a_lost_reply_is_not_resent_by_the_client(own: RedisServer, tmp_path: Path) -> None:
    """redis-py's defaults would turn one XADD into several."""
    proxy = DeafProxy(str(own.socket), tmp_path / "deaf.sock")
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        connect(f"unix://{tmp_path / 'deaf.sock'}").execute_command("XADD", "s", "*", "a", "1")
    assert proxy.connections == 1 and connect(own.url).xlen("s") == 1
