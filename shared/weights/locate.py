"""From a recipe's `model.path` to files: a model folder, or the newest complete version of another job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from shared.config.problems import bad
from shared.config.sections import MediaModel, Model
from shared.config.settings import Settings
from shared.files import fetched
from shared.weights.store import WeightStore, here

FETCHED_S = 24 * 3600.0
"""A version that was fetched is linked into the folder of the job that starts from it; its copy goes a day later."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's parts lie."""

    files: Path
    """Folder with config.json, tokenizer.json and the like."""
    weights: Path | None
    """Folder of a complete version in a weights store; None: the weights stand in `files`."""

    @classmethod
    def of(cls, files: str, weights: str | None) -> ModelFiles:
        """As a job's document names them."""
        return cls(Path(files), Path(weights) if weights else None)


def locate(model: Model, settings: Settings, at: str = "model.path") -> ModelFiles:
    """BadInput if the folder is not below a configured root, or lacks a config or tokenizer."""
    if model.path.startswith("job:"):
        job = model.path.removeprefix("job:")
        if not job.replace("-", "").isalnum():
            raise bad(at, model.path, "not a job id", "job:ID")
        store = WeightStore(settings.weights(job), model.track)
        version = store.latest()
        if version is None:
            raise bad(at, model.path, f"the job has published no complete version of track {model.track!r}")
        try:
            with store.leased(int(version.parent.name), int(version.name[1:]), f"start-{uuid4().hex[:8]}"):
                weights = here(version, settings.fetched / "versions", FETCHED_S)
            pipeline = store.pipeline
            files = fetched(store.files, settings.fetched / "files") if pipeline is None else settings.allowed(pipeline, at)
        except FileNotFoundError as error:
            raise bad(at, model.path, f"version {version.name} was collected meanwhile", "the same once more") from error
        found = ModelFiles(files, weights)
    else:
        found = ModelFiles(settings.allowed(model.path, at), None)
    if isinstance(model, MediaModel):
        if not (found.files / "model_index.json").exists():
            raise bad(at, model.path, "the folder has no model_index.json", "a folder of a diffusers pipeline")
        return found
    for name in ("config.json", "tokenizer.json"):
        if not (found.files / name).exists():
            raise bad(at, model.path, f"the model folder has no {name}", "a Hugging Face model folder with its tokenizer")
    return found
