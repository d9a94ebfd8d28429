"""How busy the services of a job are, from the times that they noted, and which of them holds the others up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.controller.lifecycles.state import Group

BUSY, WORKERS = "busy/", "workers/"
"""Beginnings of a step's figures: seconds in which a worker of the stage had work of the batch, and how many had."""


def of_batch(groups: Sequence[Group]) -> dict[str, float]:
    """Seconds and workers by stage; what one worker did at the same time counts once."""
    held: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for span in (span for g in groups for head in g.slices or () for span in (*head.spans, *g.scored)):
        if " " not in span.name:  # "rollout.policy adopt" and the like lie within it, or before it
            held.setdefault(span.name, {}).setdefault(span.worker, []).append((span.start, span.start + span.seconds))
    found: dict[str, float] = {}
    for stage, workers in held.items():
        found[f"{BUSY}{stage}"] = sum(map(_union, workers.values()))
        found[f"{WORKERS}{stage}"] = float(len(workers))
    return found


def _union(pieces: Iterable[tuple[float, float]]) -> float:
    """Length that intervals cover together."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(pieces):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def services(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the newest steps: the share of the time in which the stage's workers had work (at most 1), and their number."""
    if len(steps) < 2 or (wall := steps[-1]["at"] - steps[0]["at"]) <= 0:
        return {}
    counted = steps[1:]
    stages = dict.fromkeys(name.removeprefix(BUSY) for step in counted for name in step if name.startswith(BUSY))
    found = {}
    for stage in stages:
        workers = max(step.get(f"{WORKERS}{stage}", 0.0) for step in counted)
        seconds = sum(step.get(f"{BUSY}{stage}", 0.0) for step in counted)
        found[stage] = {"busy": min(1.0, seconds / (wall * max(1.0, workers))), "workers": workers}
    trained = sum(step.get("seconds/train", 0.0) for step in counted)
    return found | {"trainer": {"busy": min(1.0, trained / wall), "workers": 1.0}}


def bottleneck(found: dict[str, dict[str, float]]) -> str:
    """In words; empty while nothing is known."""
    if not found:
        return ""
    name = max(found, key=lambda n: found[n]["busy"])
    others = ", ".join(f"{n} {1 - about['busy']:.0%}" for n, about in found.items() if n != name)
    return f"{name} is the bottleneck: busy {found[name]['busy']:.0%} of the time" + (f"; idle: {others}" if others else "")
