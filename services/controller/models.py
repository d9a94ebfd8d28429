"""What a recipe says of its models, checked by their files' headers before anything loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from shared.config import specs
from shared.config.problems import bad
from shared.config.sections import MediaModel, Model
from shared.config.settings import Settings
from shared.files import link_or_copy
from shared.models.targets import chosen, linear_modules
from shared.weights.locate import ModelFiles, locate
from shared.weights.store import COMPLETE

SIDE_FILES = (
    "model_index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
SAMPLED = 1 << 20
"""Bytes read of either end of a file of weights."""

if TYPE_CHECKING:
    from services.controller.jobs import JobDoc


def adapted(model: Model, files: ModelFiles) -> list[str]:
    """The modules that get adapters, as far as the files tell. BadInput for those that the model does not have."""
    if model.lora is None:
        return []
    try:
        part = files.files / "transformer" if isinstance(model, MediaModel) else files.files
        known = linear_modules(files.weights or part)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise bad("model.path", model.path, f"its weights cannot be read: {error}", "safetensors files") from error
    if not known:
        return []  # weights in another format: the trainer will say
    try:
        found = chosen(known, model.lora)
    except ValueError as error:
        raise bad("model.lora.targets", model.lora.targets, str(error), "names of linear modules, or all-linear") from error
    if not found:
        raise bad("model.lora.targets", model.lora.targets, "names no module")
    return found


REFERENCE = "algorithm.reference"
TEACHERS = "algorithm.params.teachers"


def frozen_of(recipe: Any, files: ModelFiles, settings: Settings) -> dict[str, tuple[str, str | None]]:
    """The frozen models that the recipe names. BadInput if one is needed and missing, useless, or does not fit."""
    algorithm = recipe.algorithm
    flags = specs.find("algorithm", algorithm.name, "algorithm.name").flags
    found = {
        f"{TEACHERS}.{domain}": _located(recipe, path, f"{TEACHERS}.{domain}", settings)
        for domain, path in (algorithm.params.get("teachers") or {}).items()
        if flags.get("requires_teachers")
    }
    named = getattr(algorithm, "reference", None)
    if named is None:
        if flags.get("requires_reference"):
            raise bad(REFERENCE, None, f"{algorithm.name} needs a teacher", "a model folder, or job:ID")
        return {field: _folders(place) for field, place in found.items()}
    weighs = [name for name in ("kl_coef", "beta", "mse_weight", "ref_deviation_coef") if algorithm.params.get(name)]
    if algorithm.name == "diffusion_nft" and "ref_deviation_coef" not in weighs:
        weighs = []  # its beta is no penalty
    if not flags.get("requires_reference") and not weighs:
        raise bad(REFERENCE, named, "nothing compares with it", "algorithm.params.kl_coef above 0, or leave it out")
    found[REFERENCE] = place = _located(recipe, named, REFERENCE, settings)
    if not isinstance(recipe.model, MediaModel):
        own, other = (json.loads((f / "config.json").read_text()).get("vocab_size") for f in (files.files, place.files))
        if own != other:
            why = f"its vocabulary has {other} tokens, the model's {own}"
            raise bad(REFERENCE, named, why, "a model of the same tokenizer")
    return {field: _folders(place) for field, place in found.items()}


def _located(recipe: Any, path: str, field: str, settings: Settings) -> ModelFiles:
    return locate(recipe.model.model_copy(update={"path": path, "lora": None}), settings, field)


def _folders(place: ModelFiles) -> tuple[str, str | None]:
    return str(place.files), str(place.weights) if place.weights else None


def fingerprint(files: ModelFiles) -> str:
    """Of what decides how it is trained: config, tokenizer, template, stop tokens, and of the weights (of an adapter its base's
    too) sizes, headers and ends: reading all of a large model would take minutes."""
    digest = xxhash.xxh3_64()
    for path in (files.files / name for name in SIDE_FILES):
        digest.update(path.read_bytes() if path.exists() else b"-")
    folders = [files.weights or files.files]
    if (adapter := folders[0] / "adapter_config.json").exists():
        digest.update(adapter.read_bytes())
        folders.append(Path(json.loads(adapter.read_bytes())["base_model_name_or_path"]))
    deep = (files.files / "model_index.json").exists()  # a pipeline's parts are folders of their own
    held = [path for folder in folders for path in sorted(folder.rglob("*") if deep else folder.glob("*"))]
    weights = [path for path in held if path.suffix in (".safetensors", ".bin", ".gguf")]
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in sorted({0, max(0, size - SAMPLED)}):
                file.seek(place)
                digest.update(file.read(SAMPLED))
    return digest.hexdigest()


def kept(doc: JobDoc, settings: Settings) -> JobDoc:
    """The job's own hold on versions of others that it starts from or compares with: their files, linked into its folder, which
    so holds all that the job needs of other jobs."""
    base = settings.base(doc.id)
    files, weights = _held(doc.files, doc.weights, base / "model")
    frozen = {
        field: _held(*place, base / xxhash.xxh3_64_hexdigest(field.encode()))  # a domain may have any name
        for field, place in doc.frozen.items()
    }
    return msgspec.structs.replace(doc, files=files, weights=weights, frozen=frozen)


def _held(files: str, weights: str | None, target: Path) -> tuple[str, str | None]:
    """A model folder stays where it is; of a version weights, config and tokenizer are linked, not parts of a pipeline."""
    if weights is None:
        return files, None
    linked = str(_linked(Path(weights), target))
    if (Path(files) / "model_index.json").exists():
        return files, linked
    return str(_linked(Path(files), target.with_name(f"{target.name}-files"))), linked


def _linked(version: Path, target: Path) -> Path:
    """OSError if the version has been collected meanwhile."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(version.iterdir(), key=lambda p: p.name == COMPLETE):
        if path.is_file():
            link_or_copy(path, target / path.name)
    return target
