"""Models for others: a version of a job as a folder of files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec
from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from services.controller import views
from services.controller.api.core import Core
from services.controller.jobs import JobDoc
from shared.agent.storage import storage_id
from shared.config.problems import bad
from shared.http import problem
from shared.weights import checkpoints, exports
from shared.weights.exports import Export
from shared.weights.store import WeightStore
from shared.wire.keys import JobKeys

MOST = 2**53


class Wanted(BaseModel):
    """Neither step nor version means the newest."""

    model_config = ConfigDict(extra="forbid")

    step: int | None = Field(None, ge=1, le=MOST)
    version: int | None = Field(None, ge=0, le=MOST)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    form: Literal["model", "adapter"] = "model"
    """model: a whole one, adapters merged. adapter: a PEFT folder."""


def exports_router(core: Core) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job}/exports", tags=["exports"])

    def found(job: str, export: str) -> Export:
        known = exports.load(core.client, export)
        if known is None or known.job != core.job(job).id:
            raise HTTPException(404, f"no export {export!r} of job {job!r}")
        late = known.state == "waiting" and time.time() - known.at > exports.QUEUE_S
        if late or (known.state == "running" and time.time() - known.beat > exports.PATIENCE_S):
            return msgspec.structs.replace(known, state="failed", error="no trainer agent works on it: ask again")
        return known

    @router.post("", status_code=202)
    def create(job: str, wanted: Wanted) -> dict[str, Any]:
        """Asks a trainer's agent to write a model. Its weights come from the versions and checkpoints that are kept."""
        doc = core.job(job)
        if wanted.form == "adapter" and doc.recipe["model"].get("lora") is None:
            raise bad("form", "adapter", "the job trains all weights", "model")
        incarnation, version, weights = _source(core, doc, wanted)
        own = Export(
            id=uuid4().hex[:12],
            job=doc.id,
            weights=str(weights),
            track=doc.plan.tracks[0],
            incarnation=incarnation,
            version=version,
            dtype=wanted.dtype,
            form=wanted.form,
            at=time.time(),
        )
        exports.hold(core.settings, own)
        exports.ask(core.client, own, storage_id(core.settings))
        return _view(own)

    @router.get("/{export}")
    def look(job: str, export: str) -> dict[str, Any]:
        """Its state, and the names of its files once it is done."""
        return _view(found(job, export))

    @router.get("/{export}/files/{name}", response_class=Response, responses=problem.documented((409, "it is not done")))
    def download(job: str, export: str, name: str) -> Response:
        """One of its files."""
        known = found(job, export)
        if known.state != "done":
            raise HTTPException(409, f"the export is {known.state}")
        if name not in known.files:
            raise HTTPException(404, f"no file {name!r}: there are {', '.join(known.files)}")
        folder = exports.folder(core.settings.exports(known.job), known)
        return FileResponse(folder / name, media_type="application/octet-stream")

    return router


def _view(export: Export) -> dict[str, Any]:
    return {k: v for k, v in msgspec.to_builtins(export).items() if k not in ("weights", "incarnation")}


def _source(core: Core, doc: JobDoc, wanted: Wanted) -> tuple[int, int, Path]:
    """(incarnation, version, folder of its weights); incarnation 0 for a checkpoint. BadInput says what is kept.

    Versions count that belong to the history which goes on: those of the newest incarnation, and the checkpoints.
    """
    track = doc.plan.tracks[0]
    store = WeightStore(core.settings.weights(doc.id), track)
    kept: dict[int, tuple[int, Path]] = {}
    number, base = core.client.hmget(JobKeys(doc.id).meta, "incarnation", "base")
    incarnation = int(number or 1)
    for folder in checkpoints.history(core.settings.checkpoints(doc.id), incarnation, (base or b"").decode()):
        kept[checkpoints.position(folder).versions[track]] = 0, folder
    kept |= {version: (incarnation, store.path(incarnation, version)) for version in store.versions(incarnation)}
    if not kept:
        raise HTTPException(409, "the job has no complete version yet")
    legal = ", ".join(map(str, sorted(kept)))
    version = wanted.version
    if wanted.step is not None:
        steps = views.steps(core.client, doc.id, wanted.step - 1, 1)
        if not steps or steps[0]["step"] != wanted.step:
            raise bad("step", wanted.step, "the job has not trained that step", f"versions {legal}")
        version = int(steps[0]["versions"][track])
    if version is None:
        version = max(kept)
    if version not in kept:
        raise bad("version", version, "it is not kept (weights.keep, train.keep_checkpoints)", f"versions {legal}")
    return kept[version][0], version, kept[version][1]
