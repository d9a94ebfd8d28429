"""Health is progress: what an agent says over HTTP, and what it does to a child that has got stuck."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import files
from shared.agent import agent as agent_module
from shared.agent.devices import Device
from shared.agent.health import Progress, Watch
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.server import RedisServer
from tests.agent.agents import gone, make, running, seen, soon


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def ask(address: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"http://{address}/healthz", timeout=5)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGSTOP], ids=["stuck", "frozen"])
def test_a_child_that_gets_stuck_is_told_and_started_again(
    settings: Settings, folder: Path, address: str, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(agent_module, "STALE_S", 2.5)
    agent = make(replace(settings, health=address, hang_s=6))
    with running(agent):
        soon(lambda: seen(agent, folder))
        status, said = ask(address)
        assert status == 200 and said["problems"] == [] and said["worker"] == agent.name and said["progress_s"] < 2.5
        first = agent.child
        assert first is not None
        time.sleep(3)
        assert ask(address)[0] == 200, "it shows progress"
        os.kill(first.pid, how)
        status, said = soon(lambda: found if (found := ask(address))[0] == 503 else None, 10)
        assert "the child has shown no progress for" in said["problems"][0]
        soon(lambda: gone(first.pid), 10)
        soon(lambda: agent.child is not None and seen(agent, folder))
        status, said = ask(address)
        assert status == 200 and said["restarts"] == 1 and "no progress" in said["error"]
        assert httpx.get(f"http://{address}/other", timeout=5).status_code == 404


def test_a_child_without_work_need_not_show_progress(settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "STALE_S", 0.5)
    agent = make(replace(settings, hang_s=1), assigned=True)
    with running(agent):
        soon(lambda: seen(agent, folder))
        child = agent.child
        assert child is not None
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(2.5)
        assert agent.child is child and agent.health()["problems"] == [] and agent.health()["progress_s"] is None


def test_an_agent_without_redis_is_not_well(tmp_path: Path, settings: Settings, folder: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    agent = make(replace(settings, redis_url=server.url, lease_s=1))
    with running(agent):
        soon(lambda: seen(agent, folder))
        child = agent.child
        assert agent.health()["problems"] == []
        server.kill()
        soon(lambda: any("Redis has been away" in p for p in agent.health()["problems"]), 30)
        server.start()
        soon(lambda: agent.health()["problems"] == [], 30)
        assert agent.child is child
    connect(server.url).close()
    server.kill()


def test_devices_are_used_only_while_nobody_else_can_have_them(tmp_path: Path, settings: Settings, folder: Path) -> None:
    """A short outage of Redis changes nothing; in one longer than a lease the child ends, and its device is taken anew."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    agent = make(replace(settings, redis_url=server.url, lease_s=1), lambda: [Device("GPU-0")])
    with running(agent):
        assert soon(lambda: seen(agent, folder)) == "GPU-0"
        child = agent.child
        assert child is not None
        server.kill()
        time.sleep(2)
        server.start()
        time.sleep(2)
        assert agent.child is child
        server.kill()
        soon(lambda: gone(child.pid), 20)
        server.start()
        assert soon(lambda: seen(agent, folder) if agent.child is not child else None, 40) == "GPU-0"
    server.kill()


def test_an_agent_lives_on_while_redis_refuses_writes(tmp_path: Path, settings: Settings, folder: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    agent = make(replace(settings, redis_url=server.url))
    with running(agent):
        soon(lambda: seen(agent, folder))
        child, client = agent.child, connect(server.url)
        client.config_set("maxmemory", "1")
        time.sleep(2)
        client.config_set("maxmemory", "0")
        time.sleep(1.5)
        assert agent.child is child and agent.health()["problems"] == []
    server.kill()


def test_who_waits_for_a_full_disk_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stuck for a reason that was told is not ended: its results are in memory."""
    monkeypatch.setattr(files, "PAUSE_S", 0.01)
    watch = Watch(limit_s=0)
    during: list[bool] = []

    def act() -> None:
        during.append(watch.getting_on())
        if len(during) < 3:
            raise OSError(28, "No space left on device")

    assert not watch.getting_on()
    files.when_there_is_space(act, lambda text: None)
    assert during == [False, True, True] and not watch.getting_on()


def test_a_tidied_temporary_folder_is_no_fault() -> None:
    progress = Progress()
    progress.path.unlink()
    assert progress.age_s() < 1 and progress.path.exists()
    progress.close()


@pytest.mark.parametrize("value", ["nonsense", "127.0.0.1:port", "127.0.0.1:99999"])
def test_a_wrong_health_address_is_named(settings: Settings, value: str) -> None:
    with pytest.raises(SystemExit, match=r"UNIMESH_HEALTH=.*host:port"):
        make(replace(settings, health=value)).run()
