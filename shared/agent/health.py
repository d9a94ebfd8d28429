"""Health is progress: a child shows it by touching a file, its agent tells it over HTTP and acts when it stops.

The child touches the file only while it gets on with its work (or has none), so a process that is frozen, stuck in a library or
waiting for what never comes stops to touch it.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shared.files import waiting_for_space

log = logging.getLogger(__name__)

PROGRESS = "UNIMESH_PROGRESS"
"""Environment of a child: the file to touch."""
TOUCH_S = 1.0
STALE_S = 30.0
"""A child that has not shown progress for so long is not healthy; libraries may hold all threads up for some seconds."""


def show_progress(getting_on: Callable[[], bool]) -> None:
    """In a child, once it has work: touches the file every second while `getting_on` says so."""
    path = os.environ.get(PROGRESS)
    if path is None:
        return

    def touch() -> None:
        while True:
            try:
                if getting_on():
                    Path(path).touch()
            except (OSError, RuntimeError) as error:  # a full disk; a dictionary that changed while it was read
                log.warning("progress is not shown: %s", error)
            time.sleep(TOUCH_S)

    threading.Thread(target=touch, name="progress", daemon=True).start()


class Watch:
    """A child's own measure: it gets on if it ticked within `limit_s`, or is stuck for a reason that it has told."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.last = limit_s, time.monotonic()

    def tick(self) -> None:
        self.last = time.monotonic()

    def getting_on(self) -> bool:
        return time.monotonic() - self.last < self.limit_s or waiting_for_space()


class Progress:
    """The agent's side: when a child last showed progress. A child without work need not show any."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="unimesh-progress-")
        os.close(descriptor)
        self.path = Path(name)
        self.mark, self.since = 0, time.monotonic()

    def begin(self) -> None:
        """A child starts, or gets work: its time counts from now."""
        self.path.touch()
        self.since = time.monotonic()

    def age_s(self) -> float:
        """Seconds of this agent's clock since the last sign was seen: steps of the wall clock do not matter."""
        try:
            mark = self.path.stat().st_mtime_ns
        except FileNotFoundError:  # somebody tidied the folder of temporary files
            self.path.touch()
            mark = 0
        if mark != self.mark:
            self.mark, self.since = mark, time.monotonic()
        return time.monotonic() - self.since

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def serve_health(address: str, report: Callable[[], dict[str, Any]]) -> ThreadingHTTPServer:
    """`GET /healthz` at `host:port`: 200 if the report's `problems` is empty, else 503; the report as JSON either way."""
    host, _, port = address.rpartition(":")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/healthz":
                self.send_error(404)
                return
            found = report()
            body = json.dumps(found).encode()
            self.send_response(503 if found["problems"] else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Docker asks every few seconds; nobody wants to read that."""

    server = ThreadingHTTPServer((host, int(port)), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
