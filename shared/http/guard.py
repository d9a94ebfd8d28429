"""Before any handler: who asks, how much they send, and how often they may be wrong."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.config import tokens
from shared.config.settings import Settings
from shared.config.tokens import Token
from shared.http.problem import response

OPEN = ("/healthz", "/readyz", "/docs", "/openapi.json")
"""Answered without a token: they tell nothing of any job."""
MOST_WRONG = 10
"""Wrong tokens that an address may send in WINDOW_S before it has to wait."""
WINDOW_S = 60.0
MOST_ADDRESSES = 10_000


class Failures:
    """Wrong tokens by address, within the last WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.times: OrderedDict[str, list[float]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Seconds until the address may try again; 0: at once."""
        young = [t for t in self.times.get(address, ()) if t > self.clock() - WINDOW_S]
        return 0.0 if len(young) < MOST_WRONG else young[-MOST_WRONG] + WINDOW_S - self.clock()

    def add(self, address: str) -> None:
        young = [t for t in self.times.pop(address, ()) if t > self.clock() - WINDOW_S]
        self.times[address] = [*young, self.clock()]
        while len(self.times) > MOST_ADDRESSES:
            self.times.popitem(last=False)


class Guard:
    """ASGI middleware. `known` None: no token is asked for (an embedded mesh on loopback that was told so)."""

    def __init__(self, app: ASGIApp, known: Sequence[Token] | None, most_bytes: int) -> None:
        self.app, self.known, self.most_bytes = app, known, most_bytes
        self.failures = Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self.refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._limited(scope, receive, send, headers)

    def refusal(self, scope: Scope, headers: Headers) -> Any:
        """The answer to who may not ask this; None: go on."""
        if self.known is None or scope["path"] in OPEN:
            return None
        address = (scope.get("client") or ("unknown", 0))[0]
        if (wait := self.failures.wait(address)) > 0:
            answer = response(429, "too many wrong tokens", f"wait {wait:.0f} s and try again")
            answer.headers["Retry-After"] = str(int(wait) + 1)
            return answer
        kind, _, secret = headers.get("authorization", "").partition(" ")
        token = tokens.match(secret.strip(), self.known) if kind.lower() == "bearer" else None
        if token is None:
            if secret:
                self.failures.add(address)
            said = "the token is not known" if secret else "a token is needed"
            answer = response(401, "not allowed", f"{said}: send `Authorization: Bearer …` (make one with `unimesh token`)")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        wanted = needed(scope["method"], scope["path"])
        if not tokens.allows(token, wanted):
            return response(403, "not allowed", f"token {token.name!r} has scope {token.scope}, this needs {wanted}")
        return None

    async def _limited(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        size, started = 0, False

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return {"type": "http.disconnect"} if size > self.most_bytes else message

        async def sending(message: Message) -> None:
            nonlocal started
            if started or size <= self.most_bytes:  # what the app says of a body that was cut off is not sent
                started = True
                await send(message)

        said = headers.get("content-length", "0")
        if said.isdigit() and int(said) > self.most_bytes:
            size = int(said)
        else:
            try:
                await self.app(scope, counted, sending)
            except ClientDisconnect:
                if size <= self.most_bytes:
                    raise
        if size > self.most_bytes and not started:
            detail = f"the body is longer than {self.most_bytes} bytes"
            await response(413, "request too large", detail)(scope, receive, send)


def needed(method: str, path: str) -> tokens.Scope:
    """Looking needs `read`, changing a job `submit`, changing the mesh `admin`."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return "read"
    return "submit" if path.startswith(("/v1/jobs", "/score")) else "admin"


def check_listening(host: str, settings: Settings) -> None:
    """ValueError for an address that others can reach, without tokens."""
    if tokens.known(settings) is None and not (host == "localhost" or ipaddress.ip_address(host).is_loopback):
        raise ValueError(f"without tokens the API listens on loopback only, not on {host}: set UNIMESH_TOKENS or UNIMESH_TOKEN")
