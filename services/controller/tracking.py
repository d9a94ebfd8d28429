"""Brings a job's figures to its trackers: a thread that follows the steps and evaluations that are durable already.

Nothing waits for it, and a tracker that fails is left out with a warning. Steps that a job makes again after it went back to a
checkpoint are not told twice: in every series the step only rises.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import redis
import structlog

from services.controller import trackers
from services.controller.jobs import JobDoc
from services.controller.trackers.base import Row, Run, Tracker
from services.controller.views import read_step
from shared.config.sections import Logging
from shared.config.settings import Settings
from shared.files import no_space
from shared.wire.client import AWAY
from shared.wire.keys import JobKeys
from shared.wire.scripts import text

log = logging.getLogger(__name__)

POLL_S = 1.0
AT_ONCE = 500
NICENESS = 10


class Position(msgspec.Struct):
    """What the trackers have been told."""

    entry: str = "0"
    """Of the steps' stream."""
    step: int = 0
    evaluations: list[str] = []


class Tracking:
    """Of one job, while this controller holds it. Waits for: steps, evaluations. Unblocked by: the runner's commits."""

    def __init__(self, client: Any, doc: JobDoc, settings: Settings) -> None:
        self.client, self.keys = client, JobKeys(doc.id)
        self.place = settings.tracking(doc.id) / "position.json"
        section = Logging.model_validate(doc.recipe["logging"])
        self.wanted = [("jsonl", {}), *((t.name, t.params) for t in section.trackers if t.name != "jsonl")]
        series = ("train", *(f"eval/{name}" for name in doc.plan.suites))
        began = self.place.exists()
        self.run = Run(doc.id, doc.recipe["name"], doc.recipe, self.place.parent, settings.state / "tracking", began, series)
        self.open: dict[str, Tracker] = {}
        self.closed: set[str] = set()
        """Trackers that are opened when they are needed next."""
        self.told: set[tuple[str, str, int, str]] = set()
        """(tracker, series, step, tag) of what it was told since the disk was full."""
        self.position = Position()
        self.stopping = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.stopping.clear()
        thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            thread.join(15)

    def _run(self) -> None:
        structlog.contextvars.bind_contextvars(job=self.keys.job)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self.position = _read(self.place)
        self.closed = {name for name, _ in self.wanted}
        last = False
        while not last:
            last = self.stopping.wait(POLL_S)
            try:
                while self.tell():
                    pass
            except AWAY:
                continue
            except (OSError, redis.RedisError) as error:
                log.warning("trackers are behind: %s", error)
        for name, tracker in list(self.open.items()):
            with suppress(OSError):
                self._try(name, tracker.close)
        self.open.clear()

    def _start(self, name: str, params: Mapping[str, Any]) -> None:
        self.open[name] = trackers.load(name, params, self.run)
        self.closed.discard(name)

    def tell(self) -> int:
        """Tells what is new; returns how many steps that were. OSError when the disk is full: it is told again later."""
        for name, params in self.wanted:
            if name in self.closed:
                self._try(name, partial(self._start, name, params))
        before = msgspec.structs.replace(self.position, evaluations=list(self.position.evaluations))
        try:
            found = self._tell()
        except Exception:  # whatever it was: nothing was told
            self.position = before
            raise
        self.told.clear()
        return found

    def _tell(self) -> int:
        after = "-" if self.position.entry == "0" else f"({self.position.entry}"
        answer = self.client.xrange(self.keys.steps, after, count=AT_ONCE)
        rows = []
        for entry_id, fields in answer:
            step = read_step(fields)
            self.position.entry = text(entry_id)
            if step["step"] > self.position.step:
                self.position.step = step["step"]
                rows.append(Row("train", step["step"], step["at"], _figures(step)))
        rows += self._evaluations()
        if rows:
            for name, tracker in list(self.open.items()):
                self._try(name, partial(self._log, name, tracker, rows))
            _write(self.place, self.position)
        return len(answer)

    def _log(self, name: str, tracker: Tracker, rows: Sequence[Row]) -> None:
        """What it was told before the disk was full is not told again."""
        tracker.log([row for row in rows if (name, *row.key) not in self.told])
        self.told |= {(name, *row.key) for row in rows}

    def _evaluations(self) -> list[Row]:
        found = []
        for key, packed in self.client.hgetall(self.keys.evals).items():
            result = msgspec.msgpack.decode(packed)
            if text(key) not in self.position.evaluations:
                self.position.evaluations.append(text(key))
                found.append(Row(f"eval/{result['suite']}", result["step"], result["at"], _figures(result), result["tag"]))
        return sorted(found, key=lambda row: row.step)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        """A tracker's failure is told once; the tracker is left out from then on. OSError for a full disk: later again."""
        try:
            act()
        except Exception as error:  # whatever a library raises: no network, a version that does not fit
            self.open.pop(name, None)
            if no_space(error):
                self.closed.add(name)
                raise OSError(errno.ENOSPC, str(error)) from error
            self.closed.discard(name)
            log.warning("tracker %s is left out: %s: %s", name, type(error).__name__, error)
            note = f"tracker {name} is left out: {type(error).__name__}: {str(error)[:300]}"
            with suppress(redis.RedisError):
                self.client.xadd(self.keys.events, {"at": f"{time.time():.3f}", "level": "warning", "text": note})


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a step or a result; versions by track."""
    flat = {name: value for name, value in found.items() if name not in ("step", "seq", "at")}
    flat |= {f"version/{track}": version for track, version in found.get("versions", {}).items()}
    numbers = {n: float(v) for n, v in flat.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _read(path: Path) -> Position:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Position)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Position()


def _write(path: Path, position: Position) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(msgspec.to_builtins(position)))
    temporary.replace(path)
