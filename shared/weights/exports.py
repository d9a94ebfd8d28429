"""Exports: requests that the API writes and a trainer's agent carries out, one folder of a job each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.config.settings import Settings
from shared.weights.store import WeightStore
from shared.wire.codec import pack, unpack

REQUESTS = "unimesh:export-requests"
"""Hash: id → Export (msgpack)."""
PATIENCE_S = 60.0
"""A running export whose agent has been silent for so long has failed."""
QUEUE_S = 900.0
"""One that no agent has begun by then has failed too."""
KEPT_S = 24 * 3600.0
"""Files of an export are swept after so long, when another one is written."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and what became of it."""

    id: str
    job: str
    weights: str
    """Folder that the weights come from: a version of the store, or a checkpoint."""
    track: str
    incarnation: int
    """Of the version in the store; 0: the weights stand in a checkpoint."""
    version: int
    dtype: Literal["float32", "bfloat16", "float16"]
    form: Literal["model", "adapter"]
    """model: a whole one, adapters merged into it. adapter: a PEFT folder."""
    at: float
    beat: float = 0.0
    """time.time() of its agent's last sign."""
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    error: str = ""
    files: tuple[str, ...] = ()


def queue(storage: str) -> str:
    """List of ids that wait for an agent which shares the controller's folders."""
    return f"unimesh:exports:{storage}"


def save(client: Any, export: Export) -> None:
    client.hset(REQUESTS, export.id, pack(export))


def load(client: Any, export: str) -> Export | None:
    packed = client.hget(REQUESTS, export)
    return None if packed is None else unpack(packed, Export)


def ask(client: Any, export: Export, storage: str) -> None:
    """Also puts a request back that an agent could not finish."""
    with client.pipeline() as pipe:
        pipe.hset(REQUESTS, export.id, pack(export))
        pipe.rpush(queue(storage), export.id)
        pipe.execute()


def take(client: Any, storage: str) -> Export | None:
    """The next that waits; None if nothing does."""
    found = client.lpop(queue(storage))
    return None if found is None else load(client, found.decode())


def folder(root: Path, export: Export) -> Path:
    """Where its files lie, below a job's export root. Nobody else's: it may be read while the next one is written."""
    return root / export.id


def hold(settings: Settings, export: Export) -> None:
    """Keeps the version from being collected, for a while; to be repeated until release."""
    if export.incarnation:
        _store(settings, export).hold(export.incarnation, export.version, f"export-{export.id}")


def release(settings: Settings, export: Export) -> None:
    if export.incarnation:
        _store(settings, export).release(export.incarnation, export.version, f"export-{export.id}")


def _store(settings: Settings, export: Export) -> WeightStore:
    return WeightStore(settings.weights(export.job), export.track)
