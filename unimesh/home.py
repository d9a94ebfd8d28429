"""Where an embedded mesh keeps its things, and how commands find it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
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


SCALABLE = ("rollout", "reward")
"""Services of which an embedded mesh has as many agents as it is told."""


def scale_file(state: Path) -> Path:
    """What the embedded mesh in a state folder was told last."""
    return state / "agents.json"


def read_scale(state: Path) -> dict[str, int]:
    """Agents by service; empty if nothing was told."""
    try:
        found = json.loads(scale_file(state).read_text())
        return {service: max(0, int(found[service])) for service in SCALABLE if service in found}
    except (OSError, ValueError, TypeError):
        return {}


def write_scale(state: Path, agents: Mapping[str, int]) -> None:
    """Adds to what was told before."""
    place = scale_file(state)
    fresh = place.with_suffix(".new")
    fresh.write_text(json.dumps(read_scale(state) | dict(agents)))
    fresh.replace(place)


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
