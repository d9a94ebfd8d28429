"""A job's notes and steps as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Request
from fastapi.responses import StreamingResponse

from services.controller import views
from services.controller.api.core import Core
from shared.wire.client import connect_async
from shared.wire.keys import JobKeys


def events_router(core: Core) -> APIRouter:
    router = APIRouter(tags=["jobs"])

    @router.get("/v1/jobs/{job}/events")
    async def events(
        request: Request, job: str, last_event_id: Annotated[str | None, Header()] = None, follow: bool = True
    ) -> StreamingResponse:
        """Server-sent events: `step`, `note` and `state`; resumes after `Last-Event-ID`."""
        keys = JobKeys(job)
        async with connect_async(core.settings.redis_url) as client:
            if not await client.exists(keys.doc):
                raise HTTPException(404, f"no job {job!r}")
        found = _events(core.settings.redis_url, keys, last_event_id, request, follow)
        return StreamingResponse(found, media_type="text/event-stream")

    return router


async def _events(url: str, keys: JobKeys, after: str | None, request: Request, follow: bool) -> AsyncIterator[str]:
    """Notes and steps merged; an event's id names the place in both streams."""
    places = dict(zip((keys.events, keys.steps), (after or "0-0/0-0").split("/"), strict=False))
    async with connect_async(url) as client:
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
