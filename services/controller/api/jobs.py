"""Jobs over HTTP: submit, list, look, command."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Body, Header, HTTPException, Query
from fastapi.responses import JSONResponse

from services.controller import views
from services.controller.api.core import Core
from services.controller.estimate import estimate
from services.controller.jobs import create, prepare
from services.controller.lifecycles.state import Phase
from services.controller.mesh import SCALED
from services.controller.models import kept
from services.controller.restore import revive
from shared.config.compose import compose
from shared.config.problems import bad, unknown
from shared.http import problem
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

    def composed(self) -> dict[str, Any]:
        if (self.document is None) == (self.recipe is None):
            raise bad("recipe", self.recipe, "give either a recipe or a document", "exactly one of them")
        return compose(self.recipe or "", self.overrides) if self.document is None else self.document


class Scale(pydantic.BaseModel):
    """Of one job."""

    model_config = pydantic.ConfigDict(extra="forbid")

    rollout: Annotated[int, pydantic.Field(ge=1, le=100_000)] | None
    """None: its fair share of all that there are."""


def jobs_router(core: Core) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @router.post("", status_code=201)
    def submit(
        submission: Annotated[Submission, Body()],
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
    ) -> Any:
        """Checks everything, then starts the job. `dry_run` starts nothing: it returns plan and cost."""
        job = prepare(submission.composed(), core.settings)
        plan = {"plan": msgspec.to_builtins(job.doc.plan), "warnings": list(job.doc.warnings)}
        if submission.dry_run:
            return JSONResponse({"id": None, **plan, "estimate": estimate(job)}, 200)
        try:
            job = replace(job, doc=kept(job.doc, core.settings))
        except FileNotFoundError as error:
            path = job.recipe.model.path
            raise bad("model.path", path, f"the version is gone: {error}", "the same again: a newer one is there") from error
        job_id = create(core.client, job, idempotency_key)
        if job_id != job.doc.id:  # a repetition of an earlier submission
            shutil.rmtree(core.settings.base(job.doc.id).parent, ignore_errors=True)
        if core.mesh is not None:
            core.mesh.wake.set()
        return {"id": job_id, **plan}

    @router.get("")
    def jobs(
        state: Phase | None = None,
        name: str | None = None,
        after: Annotated[str | None, Query(max_length=100, description="`next` of the page before")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """Jobs, newest first."""
        facts = {k.decode(): dict(msgspec.msgpack.decode(v)) for k, v in core.client.hgetall(JOBS).items()}
        rows = views.summary(core.client, facts)
        wanted = [r for r in rows if state in (None, r["state"]) and name in (None, r["name"])]
        if after is not None:
            places = [index for index, row in enumerate(wanted) if row["id"] == after]
            if not places:
                raise bad("after", after, "no job of this list", "the `next` of the page before")
            wanted = wanted[places[0] + 1 :]
        return {"jobs": wanted[:limit], "next": wanted[limit - 1]["id"] if len(wanted) > limit else None}

    @router.get("/{job}")
    def job(job: str) -> dict[str, Any]:
        """State, step, rates, what it waits for, ledger, evaluations."""
        return views.job_view(core.client, core.job(job))

    @router.get("/{job}/recipe")
    def recipe(job: str) -> dict[str, Any]:
        """The validated document with its defaults, and the derived plan."""
        doc = core.job(job)
        return {"recipe": doc.recipe, "plan": msgspec.to_builtins(doc.plan)}

    @router.post("/{job}/restore", status_code=202, responses=problem.documented((409, "the job runs")))
    def restore(job: str, step: Annotated[int | None, Query(ge=0, le=2**53)] = None) -> dict[str, Any]:
        """Starts a job that has ended, or that this Redis does not know, from its newest checkpoint or that of a step."""
        if re.fullmatch("[0-9a-f]{12}", job) is None:
            raise HTTPException(404, f"no job {job!r}")
        try:
            found = revive(core.client, core.settings, job, step)
        except LookupError as error:
            raise HTTPException(404, str(error)) from error
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from error
        if core.mesh is not None:
            core.mesh.wake.set()
        return found

    @router.post("/{job}/scale", status_code=202)
    def scale(job: str, wanted: Annotated[Scale, Body()]) -> dict[str, Any]:
        """How many rollout workers the job gets, if there are so many. What the others had in hand goes to those that stay."""
        doc = core.running(job)
        if not doc.plan.route:
            raise bad("rollout", wanted.rollout, "the job rolls nothing out")
        core.client.hset(JobKeys(doc.id).meta, SCALED, wanted.rollout or 0)
        said = "its share" if wanted.rollout is None else str(wanted.rollout)
        note = {"at": f"{time.time():.3f}", "level": "info", "text": f"rollout workers wanted: {said}"}
        core.client.xadd(JobKeys(doc.id).events, note)
        return {"id": job, "rollout": wanted.rollout}

    @router.post("/{job}/{command}", status_code=202)
    def command(
        job: str,
        command: Literal["pause", "resume", "cancel", "checkpoint", "evaluate"],
        suite: Annotated[str, Query(max_length=200, description="evaluate: one suite; all of them without it")] = "",
    ) -> dict[str, str]:
        """Tells the job's runner; its effect shows in the job's state and events. 409 for a job that has ended."""
        doc = core.running(job)
        if command == "evaluate" and not doc.plan.suites:
            raise bad("command", command, "the recipe has no eval section")
        if suite and suite not in doc.plan.suites:
            raise unknown("suite", suite, doc.plan.suites, "no suite of the job")
        core.client.xadd(JobKeys(doc.id).inbox, {"e": pack(Operator(command=command, suite=suite))})
        return {"id": job, "command": command}

    @router.get("/{job}/steps")
    def steps(job: str, since: int = 0, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[dict[str, Any]]:
        """Metrics of the steps after `since`."""
        return views.steps(core.client, core.job(job).id, since, limit)

    return router
