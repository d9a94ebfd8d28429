"""Trackers by name. Each is imported only when a job asks for it; `jsonl` is always there."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.controller.trackers.base import Run, Tracker
from shared.config import specs
from shared.config.problems import bad

BUILTIN = {
    "jsonl": "services.controller.trackers.jsonl:JsonlTracker",
    "tensorboard": "services.controller.trackers.tensorboard:TensorboardTracker",
    "wandb": "services.controller.trackers.wandb_run:WandbTracker",
    "trackio": "services.controller.trackers.trackio_run:TrackioTracker",
    "mlflow": "services.controller.trackers.mlflow_run:MlflowTracker",
}


def check(name: str, params: Any, at: str) -> None:
    """BadInput for an unknown tracker, wrong parameters, or a package that is not installed here."""
    specs.check("tracker", name, params, at)
    for package in specs.find("tracker", name, at).flags.get("packages", ()):
        if find_spec(package) is None:
            raise bad(
                f"{at}.name", name, f"needs the package {package}, which the controller lacks", "pip install unimesh[trackers]"
            )


def load(name: str, params: Any, run: Run) -> Tracker:
    """Whatever opening it raises: no place to write, no network."""
    spec = specs.find("tracker", name, "tracker")
    module, _, attribute = (spec.entry_point or BUILTIN[name]).partition(":")
    made: Tracker = vars(import_module(module))[attribute](run, specs.check("tracker", name, params, "tracker"))
    return made
