"""Schemathesis asks the API everything that its OpenAPI document allows: no 5xx, no status that is not documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup

from services.controller.api.app import make_app
from services.controller.jobs import create, prepare
from services.reward import score_api
from shared.config.settings import Settings
from shared.wire.client import connect
from tests.conftest import recipe

load_all_checks()
CHECKS = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
]


def ask_everything(app: FastAPI, job: str) -> list[str]:
    """Every operation in many ways, every second time about the job that there is; returns what was asked."""
    asked: list[str] = []
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    schema.config.phases.update(phases=["examples", "coverage", "fuzzing"])
    for result in schema.get_all_operations():
        operation = result.ok()  # type: ignore[union-attr]
        if operation.path.endswith("/events"):
            continue  # a stream that does not end: tests of its own

        @hypothesis.settings(
            max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if "job" in (case.path_parameters or {}) and len(asked) % 2:
                case.path_parameters["job"] = job
            asked.append(f"{case.method} {case.path}")
            case.call_and_validate(checks=CHECKS)

        try:
            ask()
        except FailureGroup as failures:
            raise AssertionError(f"{operation.label}: {[str(f) for f in failures.exceptions]}") from failures
    return asked


def test_no_answer_of_the_controller_is_undocumented(settings: Settings, model_folder: Path) -> None:
    document = recipe(model_folder, name="asked", eval={"easy": {"source": {"name": "sorting"}, "size": 2}})
    job = create(connect(settings.redis_url), prepare(document, settings))
    asked = ask_everything(make_app(settings), job)
    assert len(asked) > 100 and len(set(asked)) > 15


def test_no_answer_of_the_scorers_is_undocumented(settings: Settings) -> None:
    asked = ask_everything(score_api.make_app(settings), "")
    assert len(asked) > 20 and set(asked) == {"POST /score", "GET /healthz"}
