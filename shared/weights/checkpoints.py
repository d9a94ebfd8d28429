"""The layout of a job's checkpoints: folders `{incarnation}-{seq}`, written aside, renamed, the complete marker last.

The trainer writes them, and the controller finds its own state of the same cut in them. JSON, MessagePack and safetensors only:
loading one runs no code.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shared.files import sync

COMPLETE = "COMPLETE"
STATE_FILE = "controller.msgpack"
POSITION_FILE = "position.json"


class Position(msgspec.Struct, frozen=True):
    """Where in the log and in training a checkpoint stands."""

    incarnation: int
    seq: int
    """The last record applied: the checkpoint's own."""
    entry_id: str
    versions: dict[str, int]
    words: tuple[bytes, ...] = ()
    """What the trainer had last told the controller of trained records. A trainer that starts here tells it again: nobody will
    redo these records, and a Redis that went back may have lost the words."""


def found(folder: Path) -> list[Path]:
    """The complete checkpoints, by (incarnation, seq) ascending."""
    return sorted((p.parent for p in folder.glob(f"*/{COMPLETE}")), key=lambda p: tuple(map(int, p.name.split("-"))))


def newest(folder: Path) -> Path | None:
    return next(reversed(found(folder)), None)


def position(folder: Path) -> Position:
    return msgspec.json.decode((folder / POSITION_FILE).read_bytes(), type=Position)


@contextmanager
def writing(folder: Path, at: Position) -> Iterator[Path]:
    """A temporary folder that becomes the checkpoint, complete, when the block ends well."""
    target = folder / f"{at.incarnation}-{at.seq}"
    temporary = folder / f".{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    (temporary / POSITION_FILE).write_bytes(msgspec.json.encode(at))
    for path in temporary.iterdir():
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    (target / COMPLETE).touch()
    sync(target / COMPLETE)
    sync(folder)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints."""
    for old in found(folder)[:-keep]:
        (old / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
