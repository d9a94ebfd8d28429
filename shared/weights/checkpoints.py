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
"""The controller's state at this position."""
JOB_FILE = "job.msgpack"
"""The job's document: with it a checkpoint can start a job that no Redis knows."""
POSITION_FILE = "position.json"


class Position(msgspec.Struct, frozen=True):
    """Where in the log and in training a checkpoint stands."""

    incarnation: int
    seq: int
    """The last record applied: the checkpoint's own."""
    entry_id: str
    versions: dict[str, int]
    step: int = 0
    """Batches that it holds."""
    words: tuple[bytes, ...] = ()
    """What the trainer had last told the controller of the records that it passed. A trainer that starts here tells it again:
    nobody will redo these records, and a Redis that went back may have lost the words."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.incarnation}-{self.seq}"


def found(folder: Path) -> list[Path]:
    """The complete checkpoints, by (incarnation, seq) ascending."""
    return sorted((p.parent for p in folder.glob(f"*/{COMPLETE}")), key=lambda p: tuple(map(int, p.name.split("-"))))


def newest(folder: Path, incarnation: int | None = None, base: str = "") -> Path | None:
    """The newest of all; or of this incarnation, and until it has one the checkpoint `base` that it began with."""
    if incarnation is None:
        return next(reversed(found(folder)), None)
    own = [path for path in found(folder) if path.name.startswith(f"{incarnation}-")]
    if own:
        return own[-1]
    return folder / base if base and (folder / base / COMPLETE).exists() else None


def position(folder: Path) -> Position:
    return msgspec.json.decode((folder / POSITION_FILE).read_bytes(), type=Position)


def aside(folder: Path, at: Position) -> Path:
    """Where it is written."""
    return folder / f".{at.name}"


def begin(folder: Path, at: Position) -> Path:
    """An empty folder aside."""
    place = aside(folder, at)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def complete(folder: Path, at: Position) -> None:
    """What is written aside becomes the checkpoint; the marker is written last."""
    place, target = aside(folder, at), folder / at.name
    (place / POSITION_FILE).write_bytes(msgspec.json.encode(at))
    for path in place.rglob("*"):
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    place.rename(target)
    (target / COMPLETE).touch()
    sync(target / COMPLETE)
    sync(folder)


@contextmanager
def writing(folder: Path, at: Position) -> Iterator[Path]:
    """A temporary folder that becomes the checkpoint, complete, when the block ends well."""
    yield begin(folder, at)
    complete(folder, at)


def prune(folder: Path, keep: int, every: int = 0) -> None:
    """Removes all but the newest `keep` complete checkpoints, and those whose step `every` divides."""
    for old in found(folder)[:-keep]:
        step = position(old).step
        if every and step and step % every == 0:
            continue
        (old / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
