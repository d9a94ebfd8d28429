"""Event files for TensorBoard, written as they come: no thread, nothing is lost in a kill but a torn last record."""

from __future__ import annotations

import os
import time

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from services.controller.trackers.base import Row, Run
from shared.config.builtin import TensorboardTracker as Params


class TensorboardTracker:
    def __init__(self, run: Run, _params: Params) -> None:
        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        unique = f".{time.time_ns()}.{os.getpid()}"  # the library's own names are unique to the second only
        self.writer = EventsWriter(str(folder / "events"), unique)

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.named().items()]
            self.writer.write_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
