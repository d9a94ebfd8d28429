"""One JSON object a line: series, step, time, figures."""

from __future__ import annotations

import json

from services.controller.trackers.base import Row, Run
from shared.config.builtin import JsonlTracker as Params


class JsonlTracker:
    def __init__(self, run: Run, _params: Params) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.file = (run.folder / "metrics.jsonl").open("a+", encoding="utf-8")
        self.held: set[tuple[str, int, str]] = set()
        self.file.seek(0)
        end = 0
        for line in self.file:
            if not line.endswith("\n"):
                break  # torn by a kill
            row = json.loads(line)
            self.held.add((row["series"], row["step"], row.get("tag", "")))
            end += len(line.encode())
        self.file.truncate(end)

    def log(self, rows: list[Row]) -> None:
        """What stands in the file already (written just before a kill) is not repeated."""
        for row in rows:
            if row.key not in self.held:
                place = {"series": row.series, "step": row.step, "at": row.at} | ({"tag": row.tag} if row.tag else {})
                self.file.write(json.dumps(place | row.values) + "\n")
                self.held.add(row.key)
        self.file.flush()

    def close(self) -> None:
        self.file.close()
