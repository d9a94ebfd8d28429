"""Bearer tokens of the HTTP API: kept as hashes, compared in constant time.

A token is 32 random bytes, so a plain SHA-256 hides it: there is nothing to guess. The file holds one JSON object a line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shared.config.settings import Settings

Scope = Literal["read", "submit", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")
"""Each may do what those before it may."""


class Token(msgspec.Struct, frozen=True):
    name: str
    scope: Scope
    sha256: str


def fresh(name: str, scope: Scope) -> tuple[str, Token]:
    """A new token for its holder, and what is kept of it."""
    secret = f"um_{secrets.token_urlsafe(32)}"
    return secret, Token(name, scope, _digest(secret))


def add(path: Path, token: Token) -> None:
    """Appends to the file, which only its owner may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, msgspec.json.encode(token) + b"\n")
    finally:
        os.close(descriptor)


SHORTEST = 16
"""Characters of a token that somebody chose by hand."""


def known(settings: Settings) -> list[Token] | None:
    """The tokens that a service takes: those of its file, and the one that its environment gives every right. None: it asks for
    none. ValueError for a file that holds something else, and for a token that could be guessed.
    """
    if settings.tokens is None and settings.token is None:
        return None
    found = [] if settings.tokens is None else read(settings.tokens)
    if settings.token is not None:
        if len(settings.token) < SHORTEST:
            raise ValueError(f"UNIMESH_TOKEN has {len(settings.token)} characters: must have at least {SHORTEST}")
        own = _digest(settings.token)
        if own not in {token.sha256 for token in found}:  # one of the file's keeps its scope: commands use this variable too
            found.append(Token("UNIMESH_TOKEN", "admin", own))
    return found


def read(path: Path) -> list[Token]:
    """ValueError names the line that is none."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=Token))
        except (msgspec.MsgspecError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} line {number} is no token ({error}): make one with `unimesh token`") from error
    return found


def match(secret: str, tokens: Sequence[Token]) -> Token | None:
    """The token of this secret. Every one is compared, in constant time."""
    digest, found = _digest(secret), None
    for token in tokens:
        if hmac.compare_digest(token.sha256, digest):
            found = token
    return found


def allows(token: Token, scope: Scope) -> bool:
    return SCOPES.index(token.scope) >= SCOPES.index(scope)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
