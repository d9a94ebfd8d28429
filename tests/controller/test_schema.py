"""Schemathesis asks the API everything that its OpenAPI document allows: no 5xx, no status that is not documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup

from services.controller.api.app import make_app
from services.controller.jobs import create, prepare
from shared.config.settings import Settings
from shared.wire.client import connect
from tests.conftest import recipe

load_all_checks()
CHECKS = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
]


@pytest.fixture
def schema(settings: Settings, model_folder: Path) -> Any:
    """Of an API with one job."""
    app = make_app(settings)
    document = recipe(model_folder, name="asked", eval={"easy": {"source": {"name": "sorting"}, "size": 2}})
    job = create(connect(settings.redis_url), prepare(document, settings))
    found = schemathesis.openapi.from_asgi("/openapi.json", app)
    found.config.phases.update(phases=["examples", "coverage", "fuzzing"])
    return found, job


def test_no_answer_is_undocumented(schema: Any) -> None:
    found, job = schema
    asked: list[str] = []
    for result in found.get_all_operations():
        operation = result.ok()
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
    assert len(asked) > 100 and len(set(asked)) > 15
