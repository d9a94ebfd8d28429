"""OpenTelemetry spans, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.controller.telemetry import _context
from shared.config.settings import Settings
from tests.conftest import recipe
from tests.controller.test_api import api, submit, until  # noqa: F401  (the fixture)
from tests.simulated import Simulated


class Collector:
    """OTLP over HTTP on loopback."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.spans += [(named["service.name"], span) for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()


@pytest.fixture
def settings(settings: Settings, collector: Collector) -> Settings:
    return replace(settings, otlp=collector.url)


def test_a_group_is_a_trace_and_links_to_its_step(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    collector: Collector,
    model_folder: Path,
) -> None:
    job = submit(api, recipe(model_folder, steps=3))
    with Simulated(settings, job, delay=0.01):
        until(api, job, "done")
    groups = {s.name: s for service, s in collector.spans if s.name.startswith("group ") and service == "unimesh.controller"}
    assert len(groups) == 6
    for name, whole in groups.items():
        parts = [(service, s) for service, s in collector.spans if s.trace_id == whole.trace_id and s is not whole]
        assert sorted(service for service, _ in parts) == ["unimesh.reward", "unimesh.rollout"]
        assert all(s.parent_span_id == whole.span_id for _, s in parts) and not whole.parent_span_id
        assert all(whole.start_time_unix_nano < s.start_time_unix_nano < s.end_time_unix_nano for _, s in parts)
        assert whole.trace_id == _context(f"{job} {name.removeprefix('group ')}", "whole").trace_id.to_bytes(16)
    steps = {s.span_id: s for _, s in collector.spans if s.name.startswith("step ")}
    assert sorted(s.name for s in steps.values()) == ["step 1", "step 2", "step 3"]
    assert {link.span_id for g in groups.values() for link in g.links} == set(steps)
    for whole in steps.values():
        names = {(service, s.name) for service, s in collector.spans if s.parent_span_id == whole.span_id}
        assert ("unimesh.trainer", "train") in names and ("unimesh.controller", "commit") in names
    ids = [(s.trace_id, s.span_id) for _, s in collector.spans]
    assert len(ids) == len(set(ids)), "no span is told twice"


def test_a_collector_that_is_away_does_not_hold_up_the_job(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    collector: Collector,
    model_folder: Path,
) -> None:
    collector.server.shutdown()
    collector.server.server_close()
    job = submit(api, recipe(model_folder, steps=3))
    with Simulated(settings, job):
        until(api, job, "done", patience=10)
