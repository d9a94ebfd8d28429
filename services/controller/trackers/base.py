"""What a tracker is: a place that keeps a job's figures as series, each on an axis of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """The job as trackers know it. A controller that goes on with a job opens its run again under the same id."""

    job: str
    name: str
    config: dict[str, Any]
    """The recipe."""
    folder: Path
    """The job's own."""
    shared: Path
    """For stores that hold many runs."""
    began: bool = False
    """Whether it was opened before: then it goes on."""
    series: tuple[str, ...] = ("train",)


@dataclass(frozen=True)
class Row:
    """Figures of one step of one series. Within a series steps only rise."""

    series: str
    """`train`, or `eval/NAME`."""
    step: int
    at: float
    """Seconds since the epoch."""
    values: dict[str, float] = field(default_factory=dict)
    tag: str = ""
    """Of an evaluation: there may be several at one step."""

    @property
    def key(self) -> tuple[str, int, str]:
        return self.series, self.step, self.tag

    def named(self) -> dict[str, float]:
        """The values under the series' name."""
        return {f"{self.series}/{name}": value for name, value in self.values.items()}


class Tracker(Protocol):
    """Used by one thread. May raise whatever its library raises: then it is left out, and the job goes on."""

    def log(self, rows: list[Row]) -> None: ...

    def close(self) -> None:
        """The job has ended, or another controller goes on with it."""
        ...
