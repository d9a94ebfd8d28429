"""What several stores do with files."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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


def sync(path: Path) -> None:
    """Until the file's bytes, or the folder's names, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(path: Path, target: Path) -> None:
    """The same file under a second name; a copy where the file systems are two, or know no links. One that is there stays."""
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
