"""MLflow: a tracking server, or a SQLite file below the state folder."""

from __future__ import annotations

import logging
import os
import re

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from services.controller.trackers.base import Row, Run
from shared.config.builtin import MlflowTracker as Params

NOT_ALLOWED = r"[^\w. :/-]"
"""In the names of its metrics."""
MOST_PARAM = 6000
"""Characters of a parameter's value that its stores take."""


class MlflowTracker:
    def __init__(self, run: Run, params: Params) -> None:
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        folder = run.shared / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(tracking_uri=params.uri or f"sqlite:///{folder / 'mlflow.db'}")
        known = self.client.get_experiment_by_name(params.experiment)
        place = None if params.uri else (folder / "artifacts").as_uri()
        number = known.experiment_id if known else self.client.create_experiment(params.experiment, artifact_location=place)
        found = self.client.search_runs([number], filter_string=f"tags.job = '{run.job}'", max_results=1)
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(number, run_name=run.name or run.job, tags={"job": run.job}).info.run_id
        settings = [Param(name, str(value)[:MOST_PARAM]) for name, value in sorted(_flat(run.config, "").items())]
        for low in range(0, len(settings), 100):
            self.client.log_batch(self.run, params=settings[low : low + 100])

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            at = int(row.at * 1000)
            figures = {re.sub(NOT_ALLOWED, "_", name.replace("@", "_at_")): value for name, value in row.named().items()}
            self.client.log_batch(self.run, metrics=[Metric(name, value, at, row.step) for name, value in figures.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)


def _flat(value: object, at: str) -> dict[str, object]:
    """Leaves of nested mappings by their dotted path."""
    if not isinstance(value, dict):
        return {at: value}
    return {
        name: leaf for key, inner in value.items() for name, leaf in _flat(inner, f"{at}.{key}" if at else str(key)).items()
    }
