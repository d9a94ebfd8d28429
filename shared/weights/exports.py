"""Exports: requests that the API writes and a trainer's agent carries out, one folder of a job each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.wire.codec import pack, unpack

QUEUE = "unimesh:exports"
"""List of ids that wait for an agent."""
REQUESTS = "unimesh:export-requests"
"""Hash: id → Export (msgpack)."""
PATIENCE_S = 900.0
"""An export that nobody has finished by then has failed; whoever wanted it asks again."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and what became of it."""

    id: str
    job: str
    weights: str
    """Folder that the weights come from: a version of the store, or a checkpoint."""
    version: int
    dtype: Literal["float32", "bfloat16", "float16"]
    form: Literal["model", "adapter"]
    """model: a whole one, adapters merged into it. adapter: a PEFT folder."""
    at: float
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    error: str = ""
    files: tuple[str, ...] = ()


def save(client: Any, export: Export) -> None:
    client.hset(REQUESTS, export.id, pack(export))


def load(client: Any, export: str) -> Export | None:
    packed = client.hget(REQUESTS, export)
    return None if packed is None else unpack(packed, Export)


def ask(client: Any, export: Export) -> None:
    with client.pipeline() as pipe:
        pipe.hset(REQUESTS, export.id, pack(export))
        pipe.rpush(QUEUE, export.id)
        pipe.execute()


def take(client: Any) -> Export | None:
    """The next that waits; None if nothing does."""
    found = client.lpop(QUEUE)
    return None if found is None else load(client, found.decode())


def folder(root: Path, export: Export) -> Path:
    """Where its files lie, below a job's export root."""
    return root / f"v{export.version}-{export.dtype}-{export.form}"
