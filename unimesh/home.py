"""Where an embedded mesh keeps its things, and how commands find it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """A mesh that is up. Written once everything answers, removed when it goes down."""

    api: str
    pid: int
    redis: str
    state: str

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


def default_state() -> Path:
    return Path(os.environ.get("UNIMESH_STATE", ".unimesh")).resolve()


def api_url() -> str:
    """UNIMESH_API, else that of the embedded mesh in the state folder, else the default port."""
    if url := os.environ.get("UNIMESH_API"):
        return url
    home = Home.read(default_state())
    return home.api if home is not None else "http://127.0.0.1:8080"
