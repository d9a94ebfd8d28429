"""One JSON object a line: series, step, time, figures."""

from __future__ import annotations

import json

from services.controller.trackers.base import Row, Run
from shared.config.builtin import JsonlTracker as Params


class JsonlTracker:
    def __init__(self, run: Run, _params: Params) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.file = (run.folder / "metrics.jsonl").open("a+", encoding="utf-8")
        self.newest: dict[str, int] = {}
        self.file.seek(0)
        end = 0
        for line in self.file:
            if not line.endswith("\n"):
                break  # torn by a kill
            row = json.loads(line)
            self.newest[row["series"]] = row["step"]
            end += len(line.encode())
        self.file.truncate(end)

    def log(self, rows: list[Row]) -> None:
        """What stands in the file already (written just before a kill) is not repeated."""
        for row in rows:
            if row.step > self.newest.get(row.series, -1):
                place = {"series": row.series, "step": row.step, "at": row.at}
                self.file.write(json.dumps(place | row.values) + "\n")
                self.newest[row.series] = row.step
        self.file.flush()

    def close(self) -> None:
        self.file.close()
