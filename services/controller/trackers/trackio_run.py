"""trackio: one SQLite file a project, shown by its own dashboard."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from services.controller.trackers.base import Row, Run
from shared.config.builtin import TrackioTracker as Params


class TrackioTracker:
    def __init__(self, run: Run, params: Params) -> None:
        folder = Path(os.environ.setdefault("TRACKIO_DIR", str(run.shared / "trackio")))  # read when it is imported
        folder.mkdir(parents=True, exist_ok=True)
        import trackio

        self.series = run.series
        with contextlib.redirect_stdout(io.StringIO()):  # it greets, and has no switch for that
            self.run = trackio.init(
                project=params.project,
                name=f"{run.name or 'job'}-{run.job}",
                config=run.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            self.run.log(row.named() | {f"{row.series}/step": row.step}, step=row.step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()
