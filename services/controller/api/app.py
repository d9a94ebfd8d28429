"""The HTTP API. Handlers that touch Redis or files run in the thread pool, so none blocks the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.controller.api import examples
from services.controller.api.about import about_router, catalogue_router
from services.controller.api.core import Core
from services.controller.api.events import events_router
from services.controller.api.exports import exports_router
from services.controller.api.jobs import jobs_router
from services.controller.api.samples import samples_router
from services.controller.mesh import Mesh
from shared.config import tokens
from shared.config.settings import Settings
from shared.http import problem
from shared.http.guard import Guard
from shared.wire.client import connect


def make_app(settings: Settings, mesh: Callable[[], Mesh] | None = None) -> FastAPI:
    """The application; `mesh` makes the threads that run jobs (None: only the API, for tests)."""
    core = Core(settings, connect(settings.redis_url))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        core.mesh = mesh() if mesh is not None else None
        if core.mesh is not None:
            core.mesh.start()
        yield
        if core.mesh is not None:
            core.mesh.stop()

    app = FastAPI(title="UniMesh", version="1", lifespan=lifespan)
    problem.install(app)
    app.add_middleware(Guard, known=tokens.known(settings), most_bytes=settings.most_request_bytes)
    core_routers = (events_router, samples_router, exports_router, jobs_router, about_router)
    for router in (*(make(core) for make in core_routers), catalogue_router()):
        app.include_router(router, responses=problem.documented())
    examples.install(app)
    return app
