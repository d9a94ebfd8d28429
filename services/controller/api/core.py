"""What all routers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from services.controller.jobs import JobDoc, load_doc, phase_of
from services.controller.mesh import Mesh
from shared.config.settings import Settings
from shared.wire.envelope import ENDED


@dataclass
class Core:
    """The API's Redis client and, while it runs, the threads that run jobs."""

    settings: Settings
    client: Any
    mesh: Mesh | None = None

    def job(self, job: str) -> JobDoc:
        """404 if there is none of that id."""
        doc = load_doc(self.client, job)
        if doc is None:
            raise HTTPException(404, f"no job {job!r}")
        return doc

    def running(self, job: str) -> JobDoc:
        """404 if there is none, 409 if it has ended."""
        doc = self.job(job)
        phase = phase_of(self.client, job)
        if phase in ENDED:
            raise HTTPException(409, f"job {job} is {phase}: it takes no commands")
        return doc
