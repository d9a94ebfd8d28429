"""How busy the services of a job are, from the times that they noted, and which of them holds the others up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.controller.lifecycles.state import Group

KEPT_S = 600.0
BUSY, WORKERS = "busy/", "workers/"
"""Beginnings of a step's figures: seconds in which a worker of the stage had work of the batch, and how many had."""


class Meter:
    """Counts the work of a job's batches: what a worker did at the same time counts once, also for several batches."""

    def __init__(self) -> None:
        self.covered: dict[tuple[str, str], list[tuple[float, float]]] = {}
        """(stage, worker) → the times that have been counted, disjoint and ascending; the newest KEPT_S of them."""

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """By stage the seconds that these groups add, and the workers that are about."""
        fresh: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for span in (span for g in groups for head in g.slices or () for span in (*head.spans, *g.scored)):
            if " " not in span.name:  # "rollout.policy adopt" and the like lie within it, or before it
                fresh.setdefault((span.name, span.worker), []).append((span.start, span.start + span.seconds))
        found: dict[str, float] = {}
        for (stage, worker), pieces in fresh.items():
            known = self.covered.get((stage, worker), [])
            self.covered[stage, worker] = _merged([*known, *pieces])
            more = _length(self.covered[stage, worker]) - _length(known)
            found[f"{BUSY}{stage}"] = found.get(f"{BUSY}{stage}", 0.0) + more
        ends = [known[-1][1] for known in self.covered.values()]
        oldest = max(ends, default=0.0) - KEPT_S
        self.covered = {
            key: [piece for piece in known if piece[1] > oldest] for key, known in self.covered.items() if known[-1][1] > oldest
        }
        for stage, _ in self.covered:
            found[f"{WORKERS}{stage}"] = found.get(f"{WORKERS}{stage}", 0.0) + 1
        return found


def _length(pieces: Iterable[tuple[float, float]]) -> float:
    return sum(high - low for low, high in pieces)


def _merged(pieces: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint and ascending."""
    found: list[tuple[float, float]] = []
    for low, high in sorted(pieces):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def services(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the newest steps: the share of the time in which the stage's workers had work (at most 1), and their number."""
    if len(steps) < 2 or (wall := steps[-1]["at"] - steps[0]["at"]) <= 0:
        return {}
    counted = steps[1:]
    latest = counted[-1]
    stages = dict.fromkeys(name.removeprefix(BUSY) for step in counted for name in step if name.startswith(BUSY))
    found = {}
    for stage in stages:
        workers = latest.get(f"{WORKERS}{stage}", 0.0)
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
