"""The HTTP API. Handlers that touch Redis or files run in the thread pool, so none blocks the loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
import pydantic
from fastapi import Body, FastAPI, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse

from services.controller import views
from services.controller.api import problem
from services.controller.assignment import read_workers
from services.controller.jobs import JobDoc, create, load_doc, prepare
from services.controller.mesh import Mesh
from shared.config.compose import compose, listed
from shared.config.problems import bad
from shared.config.settings import Settings
from shared.wire.client import connect, connect_async
from shared.wire.codec import pack
from shared.wire.envelope import Operator
from shared.wire.keys import JOBS, JobKeys


class Submission(pydantic.BaseModel):
    """Either a recipe of the controller's own folder with overrides, or a composed document."""

    model_config = pydantic.ConfigDict(extra="forbid")

    recipe: str | None = None
    overrides: list[str] = []
    document: dict[str, Any] | None = None
    dry_run: bool = False


def make_app(settings: Settings, mesh: Callable[[], Mesh] | None = None) -> FastAPI:
    """The application; `mesh` makes the threads that run jobs (None: only the API, for tests)."""
    client = connect(settings.redis_url)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = mesh() if mesh is not None else None
        if running is not None:
            running.start()
        app.state.mesh = running
        yield
        if running is not None:
            running.stop()

    app = FastAPI(title="UniMesh", version="1", lifespan=lifespan)
    problem.install(app)

    def found(job: str) -> JobDoc:
        doc = load_doc(client, job)
        if doc is None:
            raise HTTPException(404, f"no job {job!r}")
        return doc

    @app.post("/v1/jobs", status_code=201)
    def submit(
        submission: Annotated[Submission, Body()],
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
    ) -> Any:
        """Checks everything, then starts the job. `dry_run` returns the derived plan only."""
        document = submission.document
        if (document is None) == (submission.recipe is None):
            raise bad("recipe", submission.recipe, "give either a recipe or a document", "exactly one of them")
        if document is None:
            document = compose(submission.recipe or "", submission.overrides)
        job = prepare(document, settings)
        plan = {"plan": msgspec.to_builtins(job.doc.plan), "warnings": list(job.doc.warnings)}
        if submission.dry_run:
            return JSONResponse({"id": None, **plan}, 200)
        job_id = create(client, job, idempotency_key)
        if app.state.mesh is not None:
            app.state.mesh.wake.set()
        return {"id": job_id, **plan}

    @app.get("/v1/jobs")
    def jobs(state: str | None = None) -> list[dict[str, Any]]:
        """All jobs, newest first."""
        facts = {k.decode(): dict(msgspec.msgpack.decode(v)) for k, v in client.hgetall(JOBS).items()}
        return [row for row in views.summary(client, facts) if state in (None, row["state"])]

    @app.get("/v1/jobs/{job}")
    def job(job: str) -> dict[str, Any]:
        """State, step, rates, what it waits for, ledger, evaluations."""
        return views.job_view(client, found(job))

    @app.get("/v1/jobs/{job}/recipe")
    def recipe(job: str) -> dict[str, Any]:
        """The validated document with its defaults, and the derived plan."""
        doc = found(job)
        return {"recipe": doc.recipe, "plan": msgspec.to_builtins(doc.plan)}

    @app.post("/v1/jobs/{job}/{command}", status_code=202)
    def command(job: str, command: Literal["pause", "resume", "cancel", "checkpoint"]) -> dict[str, str]:
        """Tells the job's runner; its effect shows in the job's state and events."""
        client.xadd(JobKeys(found(job).id).inbox, {"e": pack(Operator(command=command))})
        return {"id": job, "command": command}

    @app.get("/v1/jobs/{job}/steps")
    def steps(job: str, since: int = 0, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[dict[str, Any]]:
        """Metrics of the steps after `since`."""
        rows = client.xrange(JobKeys(found(job).id).steps)
        return [s for s in (views.read_step(fields) for _, fields in rows) if s["step"] > since][:limit]

    @app.get("/v1/jobs/{job}/dead-letters")
    def dead_letters(job: str) -> list[dict[str, str]]:
        """Messages that no worker could do, with their errors."""
        rows = client.xrange(JobKeys(found(job).id).dead, count=1000)
        shown = ("gid", "stage", "errors", "error")
        return [{n: fields.get(n.encode(), b"").decode(errors="replace") for n in shown} for _, fields in rows]

    @app.get("/v1/jobs/{job}/events")
    async def events(
        request: Request, job: str, last_event_id: Annotated[str | None, Header()] = None, follow: bool = True
    ) -> StreamingResponse:
        """Server-sent events: `step`, `note` and `state`; resumes after `Last-Event-ID`."""
        if (await _exists(settings, job)) is False:
            raise HTTPException(404, f"no job {job!r}")
        return StreamingResponse(
            _events(settings, JobKeys(job), last_event_id, request, follow), media_type="text/event-stream"
        )

    @app.get("/v1/workers")
    def workers() -> list[dict[str, Any]]:
        """Registered agents and what they do."""
        return [msgspec.to_builtins(w) for w in read_workers(client)]

    @app.get("/v1/recipes")
    def recipes() -> list[str]:
        return listed()

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        """The process answers, and its job threads are alive."""
        running = app.state.mesh
        if running is not None and not all(t.is_alive() for t in running.threads):
            raise HTTPException(503, "a thread of the controller has ended")
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> dict[str, str]:
        """Redis answers too."""
        client.ping()
        return {"status": "ready"}

    return app


async def _exists(settings: Settings, job: str) -> bool:
    async with connect_async(settings.redis_url) as client:
        return bool(await client.exists(JobKeys(job).doc))


async def _events(settings: Settings, keys: JobKeys, after: str | None, request: Request, follow: bool) -> AsyncIterator[str]:
    """Notes and steps merged; an event's id names the place in both streams."""
    places = dict(zip((keys.events, keys.steps), (after or "0-0/0-0").split("/"), strict=False))
    async with connect_async(settings.redis_url) as client:
        while not await request.is_disconnected():
            answer = await client.xread(places, count=100, block=1000 if follow else None)
            for stream, rows in answer or []:
                name = stream.decode()
                for entry_id, fields in rows:
                    places[name] = entry_id.decode()
                    kind, data = _event(name == keys.steps, fields)
                    yield f"id: {places[keys.events]}/{places[keys.steps]}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
            if not answer:
                if not follow:
                    return
                yield ": still here\n\n"


def _event(is_step: bool, fields: dict[bytes, bytes]) -> tuple[str, dict[str, Any]]:
    if is_step:
        return "step", views.read_step(fields)
    return "note", {k.decode(): v.decode() for k, v in fields.items()}
