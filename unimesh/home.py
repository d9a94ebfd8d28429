"""Where an embedded mesh keeps its things, and how commands find it."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Home:
    """A mesh that is up. Written once everything answers, removed when it goes down."""

    api: str
    pid: int
    redis: str
    state: str
    score: str = ""
    """Address of `POST /score`."""

    @staticmethod
    def path(state: Path) -> Path:
        return state / "mesh.json"

    def write(self) -> None:
        self.path(Path(self.state)).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, state: Path) -> Home | None:
        """None if no mesh is up there (its process is gone)."""
        try:
            found = cls(**json.loads(cls.path(state).read_text()))
            os.kill(found.pid, 0)
        except (OSError, ValueError, TypeError):
            return None
        return found


def hold(state: Path) -> IO[str] | None:
    """The state folder's lock, held until the file is closed or the process ends; None if another mesh has it."""
    lock = (state / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def is_held(state: Path) -> bool:
    lock = hold(state)
    if lock is not None:
        lock.close()
    return lock is None


def default_state() -> Path:
    return Path(os.environ.get("UNIMESH_STATE", ".unimesh")).resolve()


def api_url() -> str:
    """UNIMESH_API, else that of the embedded mesh in the state folder, else the default port."""
    if url := os.environ.get("UNIMESH_API"):
        return url
    home = Home.read(default_state())
    return home.api if home is not None else "http://127.0.0.1:8080"
