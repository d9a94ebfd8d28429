"""What all routers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from services.controller.jobs import JobDoc, load_doc
from services.controller.lifecycles.state import Root
from services.controller.mesh import Mesh
from shared.config.settings import Settings
from shared.wire.codec import unpack
from shared.wire.envelope import ENDED
from shared.wire.keys import JobKeys


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
        packed = self.client.hget(JobKeys(job).state, "snapshot")
        phase = unpack(packed, Root).phase if packed else "starting"
        if phase in ENDED:
            raise HTTPException(409, f"job {job} is {phase}: it takes no commands")
        return doc
