"""OpenTelemetry spans along a Sample's way, sent when an endpoint is configured.

They are made from the times that services noted (see `tracing.py`), so no service waits for a collector, and every span is
there once its step is. A group is a trace of its own; so is a step, and every group of a batch links to it. Ids follow from the
job and the group, so whoever knows a group's id finds its trace.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

from services.controller.tracing import service_of, spans_of
from shared.wire.envelope import LogEntry, Span

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""Batches of spans; beyond it a slow collector loses some, and nobody waits for it."""


class Telemetry:
    """Of one job. Waits for: spans. Unblocked by: group(), step(), close()."""

    def __init__(self, endpoint: str, job: str) -> None:
        """`endpoint`: base address of an OTLP collector over HTTP, such as http://localhost:4318."""
        self.job = job
        self.exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self.waiting: queue.Queue[list[ReadableSpan] | None] = queue.Queue(MOST_WAITING)
        self.lost = 0
        self.resources: dict[tuple[str, str], Resource] = {}
        self.thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.thread.start()

    def batch(self, entry: LogEntry) -> None:
        """The groups of a train record: each with what its workers and scorers did."""
        slices = iter(entry.slices)
        step = _context(f"{self.job} step {entry.step}", "whole")
        for note in entry.groups:
            own = [next(slices) for _ in range(note.slices)]
            about = {"unimesh.job": self.job, "unimesh.gid": note.gid, "unimesh.step": entry.step}
            whole, *parts = spans_of(note, own)
            self._send(self._trace(f"{self.job} {note.gid}", whole, parts, about, [Link(step)]))

    def step(self, number: int, spans: Sequence[Span]) -> None:
        """What trainer and controller did for it."""
        if not spans:
            return
        start, end = min(s.start for s in spans), max(s.start + s.seconds for s in spans)
        whole = Span(f"step {number}", "", start, end - start)
        about = {"unimesh.job": self.job, "unimesh.step": number}
        self._send(self._trace(f"{self.job} step {number}", whole, spans, about, []))

    def close(self) -> None:
        """After what waits has been sent."""
        self.waiting.put(None)
        self.thread.join(15)

    def _trace(
        self, name: str, whole: Span, parts: Sequence[Span], about: dict[str, Any], links: Sequence[Link]
    ) -> list[ReadableSpan]:
        root = _context(name, "whole")
        made = [self._made(whole, "controller", root, None, about, links)]
        for place, span in enumerate(dict.fromkeys(parts)):
            made.append(self._made(span, service_of(span), _context(name, f"{place} {span}"), root, about, []))
        return made

    def _made(
        self,
        span: Span,
        service: str,
        context: SpanContext,
        parent: SpanContext | None,
        about: dict[str, Any],
        links: Sequence[Link],
    ) -> ReadableSpan:
        key = (service, span.worker)
        if key not in self.resources:
            named = {"service.name": f"unimesh.{service}", "service.instance.id": span.worker or "controller"}
            self.resources[key] = Resource.create(named)
        return ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self.resources[key],
            attributes=about,
            links=links,
            kind=SpanKind.INTERNAL,
            start_time=int(span.start * 1e9),
            end_time=int((span.start + max(0.0, span.seconds)) * 1e9),
        )

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            self.waiting.put_nowait(spans)
        except queue.Full:
            self.lost += len(spans)

    def _run(self) -> None:
        going = True
        while going:
            found: list[ReadableSpan] = []
            try:
                piece = self.waiting.get()
                while piece is not None:
                    found += piece
                    piece = self.waiting.get(timeout=0.2)
                going = False
            except queue.Empty:
                pass
            if found and self.exporter.export(found) is not SpanExportResult.SUCCESS:
                self.lost += len(found)
                log.warning("%d spans were not taken by the collector", len(found))
        self.exporter.shutdown()  # type: ignore[no-untyped-call]


def _context(trace: str, span: str) -> SpanContext:
    """Ids that follow from names: 16 bytes of the trace, 8 of the span."""
    whole = int.from_bytes(hashlib.sha256(trace.encode()).digest()[:16])
    own = int.from_bytes(hashlib.sha256(f"{trace}\0{span}".encode()).digest()[:8])
    return SpanContext(whole, own, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
