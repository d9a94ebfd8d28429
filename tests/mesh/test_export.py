"""Models leave in Hugging Face form: what is exported scores as what was trained, by the API and the command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.models import lora
from shared.models.ar.bundle import load
from tests.agent.agents import soon
from tests.conftest import recipe
from tests.mesh.conftest import Mesh
from tests.mesh.test_training import LORA, OPTIMIZER, SCORED, version
from tests.mesh.test_up import unimesh

IDS = torch.arange(4, 14)[None]


@pytest.fixture(scope="module")
def jobs(mesh: Mesh, model_folder: Path) -> dict[str, str]:
    """A job that trained all weights, with a critic beside them, and one that trained adapters."""
    given: dict[str, Any] = {"steps": 3, "train": OPTIMIZER, "rollout__group_size": 4, "reward": SCORED}
    found = {
        "full": mesh.submit(recipe(model_folder, **given, algorithm={"name": "ppo"})),
        "lora": mesh.submit(recipe(model_folder, **given, model__lora=LORA)),
    }
    for job in found.values():
        mesh.done(job)
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_model_is_loaded_by_plain_transformers(
    mesh: Mesh, jobs: dict[str, str], model_folder: Path, tmp_path: Path, kind: str
) -> None:
    done = unimesh(mesh.state, "export", jobs[kind], "--to", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "version 3 in" in done.stdout and "config.json" in done.stdout
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    newest = version(mesh, jobs[kind])
    wanted = load(model_folder, newest).model
    assert torch.allclose(logits(plain), logits(wanted), rtol=0, atol=1e-6)
    assert not torch.allclose(logits(plain), logits(load(model_folder, None).model), atol=1e-6)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("lora" in name or "value_head" in name for name in tensors)
    assert "lm_head.weight" not in tensors, "tied weights stand once"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("123")["input_ids"]


def test_an_adapter_is_exported_for_peft(mesh: Mesh, jobs: dict[str, str], model_folder: Path, tmp_path: Path) -> None:
    done = unimesh(mesh.state, "export", jobs["lora"], "--adapter", "--step", "2", "--to", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["version"] == 2 and said["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    adapter = lora.read_config(tmp_path)
    assert adapter.rank == 4 and adapter.base == model_folder and len(adapter.modules) == 6
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names and len(names) == 12
    merged = load(model_folder, tmp_path).model
    assert not torch.equal(logits(merged), logits(load(model_folder, None).model))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path)
    assert torch.allclose(logits(theirs), logits(merged), rtol=0, atol=1e-5), "the library itself reads it as we do"


def test_a_dtype_is_chosen_and_a_checkpoint_is_enough(mesh: Mesh, jobs: dict[str, str], tmp_path: Path) -> None:
    """Of versions two are kept; older ones may still stand in a checkpoint."""
    store = version(mesh, jobs["full"]).parent
    for path in store.glob("v2"):
        (path / "COMPLETE").unlink()
    done = unimesh(mesh.state, "export", jobs["full"], "--version", "2", "--dtype", "bfloat16", "--to", str(tmp_path))
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors and all(value.dtype == torch.bfloat16 for value in tensors.values())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_said(mesh: Mesh, jobs: dict[str, str], tmp_path: Path) -> None:
    cases = [
        (["--step", "9"], "the job has not trained that step"),
        (["--version", "77"], "it is not kept"),
        (["--adapter"], "the job trains all weights"),
    ]
    for words, said in cases:
        done = unimesh(mesh.state, "export", jobs["full"], *words, "--to", str(tmp_path))
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert mesh.http.get(f"/v1/jobs/{jobs['full']}/exports/nothing").status_code == 404
    other = mesh.http.post(f"/v1/jobs/{jobs['full']}/exports", json={}).json()["id"]
    assert mesh.http.get(f"/v1/jobs/{jobs['lora']}/exports/{other}").status_code == 404, "exports belong to their job"
    place = f"/v1/jobs/{jobs['full']}/exports/{other}"
    soon(lambda: mesh.http.get(place).json()["state"] == "done", 60)
    for name in ("../config.json", "..%2f..%2fdoc", "nothing"):
        assert mesh.http.get(f"{place}/files/{name}").status_code == 404


def test_an_export_whose_process_dies_has_failed(mesh: Mesh, jobs: dict[str, str]) -> None:
    def exporting() -> list[psutil.Process]:
        return [p for p in mesh.descendants() if any("services.trainer.export" in word for word in _words(p))]

    soon(lambda: not exporting(), 30)  # the one before may still be ending
    place = f"/v1/jobs/{jobs['full']}/exports"
    export = mesh.http.post(place, json={"dtype": "float16"}).json()["id"]
    [process] = soon(exporting, 30)
    os.kill(process.pid, signal.SIGKILL)
    view = soon(lambda: found if (found := mesh.http.get(f"{place}/{export}").json())["state"] == "failed" else None, 30)
    assert "ended with code -9" in view["error"]
    again = mesh.http.post(place, json={"dtype": "float16"}).json()["id"]
    soon(lambda: mesh.http.get(f"{place}/{again}").json()["state"] == "done", 60)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
