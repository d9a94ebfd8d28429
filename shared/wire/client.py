"""The Redis client that every service uses, and the server settings without which none starts.

redis-py's defaults would resend a command up to ten times after a lost reply (one XADD became four entries when measured) and
read in 32 KiB pieces. Here nothing is resent silently: the callers repeat scripts, which are safe to repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

T = TypeVar("T")
BLOCK_MS = 2000
"""Longest blocking read; well below the socket's time-out."""
AWAY = (redis.ConnectionError, redis.TimeoutError)
"""What a client raises while Redis is away or still loading its log."""


def connect(url: str) -> Any:
    """A client of bytes (no decoding), RESP2 on every server version, no silent retries."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=10,
        socket_connect_timeout=5,
        socket_read_size=1 << 20,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **({} if url.startswith("unix") else {"socket_keepalive": True}),
    )


def connect_async(url: str) -> Any:
    """The same for the API's event loop, which only reads and runs scripts."""
    return redis.asyncio.Redis.from_url(url, protocol=2, socket_timeout=10, socket_connect_timeout=5)


class RedisUnfit(RuntimeError):
    """The server is away or set so that work would be lost; the message says what to set."""


def check_server(client: Any, patience_s: float = 15) -> None:
    """RedisUnfit unless the server answers within `patience_s`, never evicts, and keeps an append-only file."""
    where = client.connection_pool.connection_kwargs
    place = where.get("path") or f"{where.get('host')}:{where.get('port')}"
    deadline = time.monotonic() + patience_s
    while True:
        try:
            client.ping()
            break
        except redis.AuthenticationError as error:
            raise RedisUnfit(f"Redis at {place} refused the password: set it in UNIMESH_REDIS_URL") from error
        except (redis.RedisError, OSError) as error:
            if time.monotonic() > deadline:
                raise RedisUnfit(f"Redis at {place} does not answer ({error}): start it, or set UNIMESH_REDIS_URL") from error
            time.sleep(0.1)
    found = {k.decode(): v.decode() for k, v in _settings(client).items()}
    policy = found.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        raise RedisUnfit(f"Redis maxmemory-policy is {policy!r}: it would evict work. Set `maxmemory-policy noeviction`")
    if found.get("appendonly", "yes") != "yes":
        raise RedisUnfit("Redis appendonly is 'no': a restart would lose work. Set `appendonly yes`")


def _settings(client: Any) -> dict[bytes, bytes]:
    out: dict[bytes, bytes] = {}
    for name in ("maxmemory-policy", "appendonly"):
        answer = client.execute_command("CONFIG", "GET", name)
        rows = answer.items() if isinstance(answer, dict) else zip(answer[::2], answer[1::2], strict=True)
        out |= {_bytes(k): _bytes(v) for k, v in rows}
    return out


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def answered(call: Callable[[], T], stop: Callable[[], bool] = lambda: False, pause_s: float = 0.05) -> T:
    """Repeats `call` until Redis has answered. Right only for what is safe to repeat. `stop` lets the last error out."""
    while True:
        try:
            return call()
        except AWAY:
            if stop():
                raise
            time.sleep(pause_s)
