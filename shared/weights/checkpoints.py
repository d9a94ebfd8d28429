"""The layout of a job's checkpoints: folders `{incarnation}-{seq}`, written aside, renamed, the complete marker last.

The trainer writes them, and the controller finds its own state of the same cut in them. JSON, MessagePack and safetensors only:
loading one runs no code.
"""

from __future__ import annotations

import shutil
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
    base: str = ""
    """The checkpoint that its incarnation began with; empty: with nothing."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.incarnation}-{self.seq}"


def found(folder: Path) -> list[Path]:
    """The complete checkpoints, by (incarnation, seq) ascending."""
    return sorted((p.parent for p in folder.glob(f"[0-9]*/{COMPLETE}")), key=_number)


def history(folder: Path, incarnation: int | None = None, base: str = "") -> list[Path]:
    """The complete checkpoints of the history that goes on, ascending: this incarnation's, before them those up to the one that
    it began with (`base`, where it has none of its own), and so on. None: the newest incarnation that has any.

    What another incarnation wrote behind the checkpoint that was returned to belongs to a history that was left.
    """
    known = {_number(path): path for path in found(folder)}
    if incarnation is None:
        incarnation = max((number[0] for number in known), default=0)
    chain: list[Path] = []
    last: tuple[int, float] = (incarnation, float("inf"))
    while True:
        own = [path for number, path in known.items() if number[0] == last[0] and number[1] <= last[1]]
        if own:
            base = position(own[-1]).base
        chain = [*own, *chain]
        if not base:
            return chain
        last, base = _number(Path(base)), ""


def newest(folder: Path, incarnation: int | None = None, base: str = "") -> Path | None:
    """The last of the history."""
    return next(reversed(history(folder, incarnation, base)), None)


def sweep(folder: Path) -> None:
    """Removes what a trainer that died left unfinished; the next one does it before it writes."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not (path / COMPLETE).exists():
            shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> tuple[int, int]:
    incarnation, _, seq = path.name.partition("-")
    return int(incarnation), int(seq)


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


def prune(folder: Path, keep: int, every: int = 0) -> None:
    """Removes all but the newest `keep` complete checkpoints, and those whose step `every` divides."""
    for old in found(folder)[:-keep]:
        step = position(old).step
        if every and step and step % every == 0:
            continue
        (old / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
