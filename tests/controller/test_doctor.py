"""The doctor: each thing that can be wrong is found, and its fix is said."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shared.agent.devices import Device
from unimesh import doctor
from unimesh.doctor import Finding, Served, examine


@pytest.fixture
def found(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the doctor of a service finds, by name."""
    monkeypatch.setenv("UNIMESH_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("UNIMESH_REDIS_URL", redis_url)
    monkeypatch.setattr(doctor, "API_PORT", 0)
    monkeypatch.setattr(doctor, "_ask_torch", lambda: SimpleNamespace(stdout="2.13.0 cpu", stderr="", returncode=0))
    return lambda service="trainer": {f.name: f for f in examine(tmp_path, redis_url, service)}


def fails(found: Finding, detail: str, fix: str) -> None:
    assert not found.ok and detail in found.detail and fix in found.fix, found


@pytest.mark.parametrize("service", doctor.SERVICES)
def test_a_good_machine_passes(found: Any, service: Served) -> None:
    assert all(f.ok for f in found(service).values()), found(service)


@pytest.fixture
def evicting(client: Any) -> Iterator[None]:
    client.config_set("maxmemory-policy", "allkeys-lru")
    yield
    client.config_set("maxmemory-policy", "noeviction")


def test_a_redis_that_forgets(evicting: None, found: Any) -> None:
    fails(found()["redis"], "maxmemory-policy", "see the message")


def test_no_redis(found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [redis] = [f for f in examine(tmp_path, "redis://127.0.0.1:1/0", "reward") if f.name == "redis"]
    fails(redis, "127.0.0.1:1", "see the message")
    monkeypatch.delenv("UNIMESH_REDIS_URL")
    [redis] = [f for f in examine(tmp_path, None, "reward") if f.name == "redis"]
    fails(redis, "no mesh is up", "UNIMESH_REDIS_URL")


@pytest.mark.parametrize(
    ("total", "devices", "fine"), [(64, "1", True), (63, "1", False), (1024, "2", True), (512, "2", False)]
)
def test_shared_memory(found: Any, monkeypatch: pytest.MonkeyPatch, total: int, devices: str, fine: bool) -> None:
    """Docker's 64 MiB do for one device; ranks of several talk through it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total << 20, free=50 << 30))
    monkeypatch.setenv("UNIMESH_DEVICE_COUNT", devices)
    if fine:
        assert found()["shared memory"].ok
    else:
        fails(found()["shared memory"], f"{total} MiB", "--shm-size 1g")


def test_a_full_disk(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=8 << 30, free=1 << 30))
    fails(found()["disk"], "1.0 GiB free", "UNIMESH_STATE")


@pytest.mark.parametrize(
    ("driver", "there", "count", "torch", "detail", "fix"),
    [
        (None, 0, "1", "cpu", "none", "profile gpu"),
        ("570.1", 0, "1", "cpu", "though driver 570.1", "container toolkit"),
        ("570.1", 2, "4", "cuda", "4 wanted", "UNIMESH_DEVICE_COUNT"),
        ("570.1", 2, "2", "cpu", "torch 2.13.0 cannot use them", "CUDA build"),
    ],
)
def test_devices(
    found: Any, monkeypatch: pytest.MonkeyPatch, driver: str | None, there: int, count: str, torch: str, detail: str, fix: str
) -> None:
    """A lister and a driver written by hand."""
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    monkeypatch.setattr(doctor, "list_devices", lambda setting: [Device(f"GPU-{n}", "H200") for n in range(there)])
    monkeypatch.setattr(doctor, "_ask_torch", lambda: SimpleNamespace(stdout=f"2.13.0 {torch}", stderr="", returncode=0))
    monkeypatch.setenv("UNIMESH_DEVICE_COUNT", count)
    fails(found()["devices"], detail, fix)


def test_a_port_that_another_has(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(doctor, "API_PORT", port)
        monkeypatch.setenv("UNIMESH_HEALTH", f"127.0.0.1:{port}")
        other.settimeout(0)  # it answers nobody
        monkeypatch.setattr(httpx, "get", _refused)
        fails(found("controller")["port"], f"{port}: Address already in use", "--port 0")
        fails(found("reward")["health port"], "Address already in use", "of a free port")


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise httpx.ConnectError("refused")


def test_folders_that_cannot_be_written(found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNIMESH_STATE", str(tmp_path / "file" / "state"))
    fails(found("rollout")["storage"], "Not a directory", "UNIMESH_BODIES")


def test_a_token_that_is_too_short(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMESH_TOKEN", "short")
    fails(found("controller")["token"], "16", "openssl rand -hex 24")


def test_spinning_threads(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    fails(found()["OMP_WAIT_POLICY"], "ACTIVE", "unset it")


def test_it_speaks_when_a_service_starts(redis_url: str, tmp_path: Path) -> None:
    """`unimesh serve`, which containers run: what is wrong stands in the log, with its fix; the service starts all the same."""
    env = os.environ | {
        "UNIMESH_REDIS_URL": redis_url,
        "UNIMESH_STATE": str(tmp_path),
        "UNIMESH_HEALTH": "127.0.0.1:nowhere",
    }
    code = "import sys; from unimesh.cli import main; sys.argv[1:] = ['serve', 'reward']; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "FAIL health port: 127.0.0.1:nowhere" in done.stderr and "fix: UNIMESH_HEALTH is host:port" in done.stderr
    assert done.returncode != 0, "the service refuses what cannot be served"
