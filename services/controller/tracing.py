"""Who did what when in a step, from the times that services noted along the way, as a trace that viewers open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import HTTPException

from services.controller.records import Records
from shared.wire.codec import unpack
from shared.wire.envelope import GroupNote, Span, TrainSlice
from shared.wire.keys import JobKeys

Event = dict[str, Any]
"""Of the Trace Event Format."""


def of_step(client: Any, job: str, records: Records, step: int) -> dict[str, Any]:
    """The step's groups from their issue on, and the training that ended it. 404 if its times are not kept."""
    acts = next(
        (fields for _, fields in client.xrevrange(JobKeys(job).spans) if int(fields[b"step"]) == step),
        None,
    )
    if acts is None:
        raise HTTPException(404, f"no times of step {step}: it is still to come, or older than logging.keep_steps")
    groups = records.step(step)
    spans = [*unpack(acts[b"t"], tuple[Span, ...]), *(span for note, slices in groups for span in spans_of(note, slices))]
    return {"traceEvents": list(events(spans)), "displayTimeUnit": "ms", "otherData": {"job": job, "step": step}}


def spans_of(note: GroupNote, slices: Sequence[TrainSlice]) -> list[Span]:
    """Of one group: all of its way, and what each worker did for it."""
    whole = Span(f"group {note.gid}", "groups", note.issued_at, note.ready_at - note.issued_at)
    return [whole, *(span for piece in slices for span in piece.head.spans), *note.scored]


def events(spans: Iterable[Span]) -> Iterable[Event]:
    """One process for each worker and service, as many lanes in it as things overlap. Times in microseconds."""
    places: dict[tuple[str, str], list[Span]] = {}
    for span in dict.fromkeys(spans):
        places.setdefault((service_of(span), span.worker), []).append(span)
    for number, ((service, worker), own) in enumerate(sorted(places.items()), 1):
        name = worker if service == "groups" else f"{service} {worker}"
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        busy: list[float] = []
        for span in sorted(own, key=lambda s: (s.start, -s.seconds)):
            lane = next((k for k, until in enumerate(busy) if until <= span.start), len(busy))
            busy[lane : lane + 1] = [span.start + span.seconds]
            times = {"ts": round(span.start * 1e6, 1), "dur": round(span.seconds * 1e6, 1)}
            yield {"ph": "X", "name": span.name, "cat": service, "pid": number, "tid": lane, **times}


def service_of(span: Span) -> str:
    """The service by the span's name."""
    head = span.name.partition(".")[0].partition(" ")[0]
    return {"group": "groups", "adopt": "rollout", "commit": "controller"}.get(head, head if "." in span.name else "trainer")
