"""Asking others over HTTP: how many at once, how many a minute, what is tried again and when."""

from __future__ import annotations

import email.utils
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from shared.config.builtin import Asking
from shared.config.problems import bad

A = TypeVar("A")
B = TypeVar("B")

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_PAUSE_S = 60.0


class Refused(RuntimeError):
    """The other side answered with an error that another attempt would not change, or failed every attempt."""


def authorization(params: Asking) -> dict[str, str]:
    """The header of the token that the parameters name. BadInput if this service does not have it."""
    if params.key_variable is None:
        return {}
    key = os.environ.get(params.key_variable, "")
    if not key:
        raise bad("key_variable", params.key_variable, "this variable is not set where the reward service runs")
    return {"Authorization": f"Bearer {key}"}


class Bucket:
    """At most `per_minute` units in any minute, evenly refilled. None: no limit."""

    def __init__(
        self,
        per_minute: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = None if per_minute is None else per_minute / 60
        self.clock, self.sleep = clock, sleep
        self.lock = threading.Lock()
        self.free_at = clock()
        """When everything taken so far will have been refilled."""

    def take(self, amount: float = 1.0) -> None:
        """Waits until the units may be used. A burst of up to a tenth of a minute's worth goes at once."""
        if self.rate is None:
            return
        with self.lock:
            now = self.clock()
            self.free_at = max(self.free_at, now - 6.0) + amount / self.rate
            wait = self.free_at - now
        if wait > 0:
            self.sleep(wait)


class Caller:
    """Posts JSON, several at a time. Only what may be repeated is: 408, 425, 429, 5xx, time-outs and broken connections."""

    def __init__(
        self,
        headers: Mapping[str, str],
        timeout_s: float,
        attempts: int,
        concurrency: int,
        requests_per_minute: float | None,
        tokens_per_minute: float | None = None,
        pause_s: float = 1.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.http = httpx.Client(headers=dict(headers), timeout=timeout_s, transport=transport)
        self.attempts, self.pause_s = attempts, pause_s
        self.requests, self.tokens = Bucket(requests_per_minute), Bucket(tokens_per_minute)
        self.pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ask")

    def each(self, call: Callable[[A], B], items: Sequence[A]) -> list[B | None]:
        """`call` of every item, concurrently; None where it raised Refused or could not read the answer."""

        def one(item: A) -> B | None:
            try:
                return call(item)
            except (Refused, ValueError, KeyError, TypeError, IndexError):
                return None

        return list(self.pool.map(one, items))

    def post(self, url: str, body: Any, headers: Mapping[str, str] | None = None, tokens: float = 0.0) -> Any:
        """The answer's JSON. Refused if it cannot be had."""
        said = ""
        for attempt in range(self.attempts):
            self.requests.take()
            if tokens:
                self.tokens.take(tokens)
            wait = random.uniform(0.5, 1.5) * self.pause_s * 2**attempt
            try:
                answer = self.http.post(url, json=body, headers=dict(headers or {}))
                if answer.is_success:
                    return answer.json()
                said = f"{answer.status_code}: {answer.text[:200]}"
                if answer.status_code not in AGAIN:
                    break
                wait = max(wait, retry_after(answer))
            except httpx.TransportError as error:
                said = f"{type(error).__name__}: {error}"
            if attempt + 1 < self.attempts:
                time.sleep(min(wait, LONGEST_PAUSE_S))
        raise Refused(said)


def retry_after(answer: httpx.Response) -> float:
    """Seconds that the answer asks to wait; 0 if it does not say."""
    value = answer.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
