"""What a job trained on: samples with their rewards, lineage, dead letters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Response

from services.controller import letters, tracing
from services.controller.api.core import Core
from services.controller.previews import Previews
from services.controller.records import Records, shown_of
from shared.config.problems import bad
from shared.http import problem
from shared.media import as_file
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.errors import BodyLost, WireError
from shared.wire.keys import JobKeys

MOST_STEPS = 2**53
"""Larger numbers are no steps; SQLite and JSON's readers could not hold them."""


def samples_router(core: Core) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["samples"])

    def records(job: str) -> Records:
        return Records(core.settings.records(core.job(job).id))

    @router.get("/{job}/samples")
    def samples(
        job: str,
        step: Annotated[int | None, Query(ge=1, le=MOST_STEPS)] = None,
        status: Literal["ok", "truncated", "failed"] | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        group: Annotated[str | None, Query(max_length=300)] = None,
        after: Annotated[str | None, Query(max_length=400, description="`next` of the page before")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> dict[str, Any]:
        """Trained samples, the newest step first: rewards by component, advantage, version, worker, times, and some texts."""
        found = records(job).samples(step, status, reward_min, reward_max, group, _cursor(after), limit)
        last = found[-1] if len(found) == limit else None
        return {"samples": found, "next": f"{last['step']}:{last['id']}" if last else None}

    @router.get("/{job}/body", response_class=Response, responses=problem.documented((410, "the message has been swept")))
    def body(job: str, group: Annotated[str, Query(max_length=300)], id: Annotated[str, Query(max_length=300)]) -> Response:
        """The stored message (MessagePack) of the slice that a sample is part of. 410 once a checkpoint has swept it."""
        doc = core.job(job)
        _, ref = records(job).place_of(group, id) or (0, None)
        if ref is None:
            raise HTTPException(404, f"no trained sample {id!r} of group {group!r}")
        store = BodyStore(core.client, JobKeys(doc.id), open_bodies(core.settings.bodies, doc.id))
        try:
            return Response(bytes(store.load(ref)), media_type="application/msgpack")
        except BodyLost as error:
            raise HTTPException(410, f"the message is gone: a checkpoint covers its step ({error})") from error

    @router.get("/{job}/picture", response_class=Response, responses=problem.documented((410, "neither message nor preview")))
    def picture(job: str, group: Annotated[str, Query(max_length=300)], id: Annotated[str, Query(max_length=300)]) -> Response:
        """The picture (PNG) or video (MP4) of a sample while its message is there, then its preview if one was kept."""
        doc = core.job(job)
        place = records(job).place_of(group, id)
        if place is None:
            raise HTTPException(404, f"no trained sample {id!r} of group {group!r}")
        step, ref = place
        try:
            store = BodyStore(core.client, JobKeys(doc.id), open_bodies(core.settings.bodies, doc.id))
            shown = None if ref is None else shown_of(store.glance(ref))[1].get(id)
            found = None if shown is None else as_file(shown)
        except (BodyLost, WireError, ValueError):
            found = None
        return _media(found or Previews(core.settings.previews(doc.id)).find("steps", step, id), f"sample {id!r}")

    @router.get("/{job}/evals/{suite}/{tag}/{index}/picture", response_class=Response)
    def evaluated(job: str, suite: str, tag: str, index: Annotated[int, Path(ge=0, le=MOST_STEPS)]) -> Response:
        """The preview of an evaluation's record: the same prompts and noise at every step, so that they compare."""
        found = Previews(core.settings.previews(core.job(job).id)).find("evals", f"{suite}:{tag}", index)
        if found is None:
            raise HTTPException(404, f"no preview of record {index} in {suite!r}, {tag!r}")
        return _media(found, "")

    @router.get("/{job}/lineage")
    def lineage(job: str, id: Annotated[str, Query(min_length=1, max_length=300)]) -> list[dict[str, Any]]:
        """A root, group or sample: its issues, the worker and version of each Part, scores, advantage, log record and step."""
        found = records(job).lineage(id)
        if not found:
            raise HTTPException(404, f"nothing that was trained is called {id!r} (or it is older than logging.keep_steps)")
        return found

    @router.get("/{job}/trace")
    def trace(job: str, step: Annotated[int, Query(ge=1, le=MOST_STEPS)]) -> dict[str, Any]:
        """Who did what when in one step, in the Trace Event Format that Perfetto and Chrome open."""
        return tracing.of_step(core.client, core.job(job).id, records(job), step)

    @router.get("/{job}/dead-letters")
    def dead_letters(job: str, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[dict[str, Any]]:
        """Messages that no worker could do, with their errors; the newest last."""
        return letters.listed(core.client, core.job(job).id, limit)

    @router.post("/{job}/dead-letters/{letter}/{action}", status_code=202)
    def settle(job: str, letter: str, action: Literal["reissue", "discard"]) -> dict[str, str]:
        """Issues the prompt of a dead letter again, or throws the letter away."""
        doc = core.running(job) if action == "reissue" else core.job(job)
        letters.settle(core.client, doc.id, letter, action)
        return {"id": job, "letter": letter, "action": action}

    return router


def _media(found: tuple[str, bytes] | None, what: str) -> Response:
    if found is None:
        raise HTTPException(410, f"the message of {what} is gone, and no preview of it was kept")
    return Response(found[1], media_type=found[0])


def _cursor(after: str | None) -> tuple[int, str] | None:
    if after is None:
        return None
    step, _, name = after.partition(":")
    if not step.isdecimal() or not name or int(step) > MOST_STEPS:
        raise bad("after", after, "no cursor", "the `next` of the page before")
    return int(step), name
