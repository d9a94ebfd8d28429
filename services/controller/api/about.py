"""The mesh itself over HTTP: workers, streams, recipes, components, metrics, health."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from services.controller import lifecycles, metrics
from services.controller.api.core import Core
from services.controller.assignment import read_workers
from services.controller.jobs import active
from shared.config import specs
from shared.config.compose import listed, text_of


def about_router(core: Core) -> APIRouter:
    router = APIRouter(tags=["mesh"])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics.JobCollector(core.client))

    @router.get("/v1/workers")
    def workers() -> list[dict[str, Any]]:
        """Registered agents and what they do."""
        return [msgspec.to_builtins(w) for w in read_workers(core.client)]

    @router.get("/v1/streams")
    def streams() -> list[dict[str, Any]]:
        """The stage streams of the jobs that have not ended: waiting, in hand, workers, the oldest message."""
        return [{"job": job, **stage} for job in active(core.client) for stage in metrics.stages(core.client, job)]

    @router.get("/metrics", response_class=Response)
    def prometheus() -> Response:
        """For Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/healthz")
    def healthz() -> dict[str, str]:
        """The process answers, and each of its threads makes progress."""
        if core.mesh is not None and (stuck := core.mesh.stuck()):
            raise HTTPException(503, "; ".join(stuck))
        return {"status": "ok"}

    @router.get("/readyz")
    def readyz() -> dict[str, str]:
        """Redis answers too."""
        core.client.ping()
        return {"status": "ready"}

    return router


def catalogue_router() -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["catalogue"])

    @router.get("/recipes")
    def recipes() -> list[dict[str, str]]:
        """Recipes by name, with what their first comment says."""
        return [{"name": name, "domain": name.partition("/")[0], "about": _about(text_of(name))} for name in listed()]

    @router.get("/recipes/{domain}/{name}")
    def recipe(domain: str, name: str) -> dict[str, Any]:
        """A recipe's text, and the JSON schema of its domain's documents."""
        full = f"{domain}/{name}"
        if full not in listed():
            raise HTTPException(404, f"no recipe {full!r}")
        return {"name": full, "text": text_of(full), "schema": _schema(domain)}

    @router.get("/components")
    def components(kind: specs.Kind | None = None) -> list[dict[str, Any]]:
        """What can be named in a recipe, each with the JSON schema of its parameters."""
        found = sorted(specs.registry().values(), key=lambda s: (s.kind, s.name))
        return [
            {"kind": s.kind, "name": s.name, "summary": s.summary, "parameters": s.params.model_json_schema()}
            for s in found
            if kind in (None, s.kind)
        ]

    return router


def _schema(domain: str) -> dict[str, Any] | None:
    module = lifecycles.DOMAINS.get(domain)
    return None if module is None else dict(module.Recipe.model_json_schema())


def _about(text: str) -> str:
    comments = [line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""
