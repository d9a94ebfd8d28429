"""`python -m services.trainer.export ID`: writes a version of a job as a folder that transformers or PEFT loads."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from shared.agent.process import guard_parent
from shared.weights import exports


def main() -> None:
    guard_parent()
    from shared import logs
    from shared.config.settings import from_environment
    from shared.wire.client import connect
    from shared.wire.keys import JobKeys

    logs.begin("trainer")
    settings = from_environment()
    client = connect(settings.redis_url)
    export = exports.load(client, sys.argv[1])
    if export is None:
        raise SystemExit(f"no export {sys.argv[1]}")
    doc = msgspec.msgpack.decode(client.get(JobKeys(export.job).doc))
    try:
        target = exports.folder(settings.exports(export.job), export)
        write(doc, export, target)
        files = tuple(sorted(path.name for path in target.iterdir()))
        exports.save(client, msgspec.structs.replace(export, state="done", files=files))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        exports.save(client, msgspec.structs.replace(export, state="failed", error=f"{type(error).__name__}: {error}"))
        raise


def write(doc: dict[str, Any], export: Any, target: Path) -> None:
    """Written aside and renamed; an export that is there already is made anew."""
    temporary = target.with_name(f".{uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        if export.form == "adapter":
            _adapter(doc, export, temporary)
        else:
            _model(doc, export, temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    old = [path for path in target.parent.iterdir() if path.stat().st_mtime < time.time() - exports.KEPT_S]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def _model(doc: dict[str, Any], export: Any, out: Path) -> None:
    """save_pretrained: shards, tied weights once, config with the dtype; tokenizer files beside it. Of a pipeline the trained
    part, which takes the place of the pipeline's own."""
    from shared.models import lora
    from shared.models.ar.bundle import assign, copy_tokenizer

    bundle = _based(doc)
    tensors = _tensors(export)
    assign(bundle.model, tensors)
    lora.merge(bundle.model)
    bundle.model.to(_dtype(export.dtype)).save_pretrained(out)
    if "family" not in doc["recipe"]["model"]:
        copy_tokenizer(Path(doc["files"]), out)


def _adapter(doc: dict[str, Any], export: Any, out: Path) -> None:
    from safetensors.torch import save_file

    from shared.config.sections import Lora
    from shared.models import lora

    section = Lora.model_validate(doc["recipe"]["model"]["lora"])
    bundle = _based(doc)
    modules = [name for name, _ in lora.layers(bundle.model)]
    tensors = {name: value.to(_dtype(export.dtype)).contiguous() for name, value in _tensors(export).items()}
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    (out / lora.CONFIG).write_text(lora.config_text(section, Path(doc["weights"] or doc["files"]), modules))


def _based(doc: dict[str, Any]) -> Any:
    """The model that training started from, with adapters if they were trained."""
    from shared.config.sections import MediaModel, Model
    from shared.models import lora
    from shared.models.ar.bundle import load
    from shared.models.diffusion import family
    from shared.models.diffusion.bundle import load_trained

    files, weights = Path(doc["files"]), Path(doc["weights"]) if doc["weights"] else None
    bundle: Any
    model: Model
    if "family" in doc["recipe"]["model"]:
        model = MediaModel.model_validate(doc["recipe"]["model"])
        bundle = load_trained(files, family(model.family), weights)
    else:
        model = Model.model_validate(doc["recipe"]["model"])
        bundle = load(files, weights)
    if model.lora is not None:
        lora.inject(bundle.model, model.lora)
    return bundle


def _tensors(export: exports.Export) -> dict[str, Any]:
    """Of a version, its checksums verified, or of a checkpoint: there the moving average if one is kept, and adapters under the
    model's own names. A critic is left out."""
    from services.trainer import checkpoint
    from shared.files import place
    from shared.models import lora
    from shared.models.ar.bundle import CRITIC
    from shared.models.tensors import decode
    from shared.weights.store import read_version

    folder = place(export.weights)
    if export.incarnation:
        tensors = [decode(data) for name, data in read_version(folder) if name.endswith(".safetensors")]
    else:
        tensors = [checkpoint.read(folder, "model."), checkpoint.read(folder, "ema.")]
    found = {name: value for part in tensors for name, value in part.items() if not name.startswith(f"{CRITIC}.")}
    return {lora.exported_name(name) if lora.is_adapter(name) else name: value for name, value in found.items()}


def _dtype(name: str) -> Any:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


if __name__ == "__main__":
    main()
