"""What several stores do with files."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast
from uuid import uuid4

import xxhash

T = TypeVar("T")
PAUSE_S = 5.0
_waiting: set[int] = set()
"""Threads that wait."""


def waiting_for_space() -> bool:
    """Whether a thread of this process waits for a full disk: it is stuck for a reason that was told."""
    return bool(_waiting)


def no_space(error: BaseException) -> bool:
    """Whether a disk is full, or a quota is used up; libraries that are no Python say it in words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "StorageFull" in str(error)


def when_there_is_space(act: Callable[[], T], say: Callable[[str], None]) -> T:
    """Repeats `act`, which may be repeated, until the disk has room for it; `say` is told once."""
    said = False
    try:
        while True:
            try:
                return act()
            except Exception as error:  # libraries that are no Python raise errors of their own for a full disk
                if not no_space(error):
                    raise
                if not said:
                    say(f"no space left: {error}; free some, and it goes on by itself")
                    _waiting.add(threading.get_ident())
                    said = True
                time.sleep(PAUSE_S)
    finally:
        _waiting.discard(threading.get_ident())


def place(url: str) -> Path:
    """A folder: a path of this host, or by its URL what fsspec reaches (s3://bucket/folder). Both are used as pathlib's."""
    if "://" not in url:
        return Path(url)
    from upath import UPath

    return cast(Path, UPath(url, use_listings_cache=False))  # what others have written meanwhile is asked for


def local(path: Path) -> bool:
    """Whether it is of this host's own file system, where a rename is atomic and files can be mapped and linked."""
    return isinstance(path, PurePath)


def remove(folder: Path) -> None:
    """With all that is in it; whatever is gone already is none the worse."""
    if local(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    away: Any = folder
    with suppress(FileNotFoundError):
        away.fs.rm(away.path, recursive=True)


def fetched(
    folder: Path,
    below: Path,
    kept_s: float | None = None,
    names: Mapping[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> Path:
    """A folder of this host with the same files: itself, or a copy in a folder of `below`. Copies older than `kept_s` go.

    `names`: which files, and what they are called in the copy; None: all. `own`: further files of the copy, their text.
    """
    if local(folder):
        return folder
    oldest = 0.0 if kept_s is None else time.time() - kept_s
    for old in below.glob("*"):
        with suppress(FileNotFoundError):
            if old.stat().st_mtime < oldest:
                shutil.rmtree(old, ignore_errors=True)
    target = below / xxhash.xxh3_64_hexdigest(str(folder).encode())
    if target.exists():
        return target
    aside = below / f".{uuid4().hex}"
    aside.mkdir(parents=True)
    away: Any = folder
    try:
        chosen = names or {path.name: path.name for path in away.iterdir() if path.is_file()}
        for there, name in chosen.items():
            away.fs.get_file((away / there).path, str(aside / name))
        for name, text in (own or {}).items():
            (aside / name).write_text(text)
        with suppress(OSError):  # another has fetched it meanwhile
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def sync(path: Path) -> None:
    """Until the file's bytes, or the folder's names, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(path: Path, target: Path) -> None:
    """The same file under a second name; a copy where the file systems are two, or know no links. One that is there stays."""
    if not local(path):
        away: Any = path
        away.fs.copy(away.path, cast(Any, target).path)
        return
    try:
        os.link(path, target)
    except FileExistsError:
        pass
    except OSError as error:
        if no_space(error):
            raise
        shutil.copyfile(path, target)


def checksum(path: Path) -> str:
    """XXH3-64 of the file, in hex; read in pieces."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
