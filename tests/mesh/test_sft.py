"""Conversations through the mesh: the held-out loss in the job's view is what transformers computes of its model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.models import lora
from shared.models.ar.bundle import load
from shared.weights import checkpoints
from tests.conftest import recipe
from tests.mesh.conftest import Mesh
from unimesh.demo import conversations

LORA = {"rank": 8, "alpha": 16}


def files(folder: Path) -> dict[str, Path]:
    found = {}
    for name, count in (("train", 64), ("held_out", 10)):
        found[name] = folder / f"talk-{name}.jsonl"
        found[name].write_text("".join(json.dumps(row) + "\n" for row in conversations(3, count, name == "held_out")))
    return found


def document(model: Path, **changes: Any) -> dict[str, Any]:
    paths = files(model.parent)
    source = {name: {"name": "jsonl", "params": {"path": str(path), "messages": "messages"}} for name, path in paths.items()}
    given: dict[str, Any] = {
        "domain": "sft",
        "steps": 6,
        "data": {"source": source["train"], "batch_size": 16, "chat": True},
        "algorithm": {"name": "cross_entropy"},
        "train": {"optimizer": {"lr": 3e-3}, "replay": "packed", "micro_batch_tokens": 512, "checkpoint_every": 3},
        "eval": {"held_out": {"source": source["held_out"], "every": 3, "batch_size": 4}},
    }
    found = recipe(model, **(given | changes))
    return {name: value for name, value in found.items() if name not in ("rollout", "reward")}


def loss_of(model: Any, folder: Path) -> tuple[float, int]:
    """Mean over the assistant's tokens, one conversation at a time, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for line in files(folder.parent)["held_out"].read_text().splitlines():
        messages = json.loads(line)["messages"]
        found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = torch.tensor([found["input_ids"]]), found["assistant_masks"]
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)
        for place in range(1, ids.shape[1]):
            if mask[place]:
                total -= float(log_probs[0, place - 1, ids[0, place]])
                count += 1
    return total / count, count


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_held_out_loss_falls_and_is_transformers_own(mesh: Mesh, model_folder: Path, adapters: bool) -> None:
    job = mesh.submit(document(model_folder, **({"model__lora": LORA} if adapters else {})))
    view = mesh.done(job)
    evals = {e["tag"]: e for e in view["evals"]}
    assert list(evals) and {e["step"] for e in view["evals"]} == {0, 3, 6} and evals["end"]["versions"] == {"policy": 6}
    first, count = loss_of(AutoModelForCausalLM.from_pretrained(model_folder), model_folder)
    assert evals["start"]["loss"] == pytest.approx(first, rel=1e-5) and evals["start"]["tokens"] == count
    assert evals["end"]["loss"] < evals["step-3"]["loss"] < evals["start"]["loss"]
    version = mesh.state / "jobs" / job / "weights" / "policy" / "1" / "v6"
    assert (version / lora.CONFIG).exists() == adapters
    last, _ = loss_of(load(model_folder, version).model, model_folder)
    assert evals["end"]["loss"] == pytest.approx(last, rel=1e-4)
    assert evals["end"]["perplexity"] == pytest.approx(math.exp(last), rel=1e-3) and evals["end"]["reward"] is None
    assert [p.name for p in version.parent.iterdir() if p.name.startswith("v")] in (["v0", "v6"], ["v6", "v0"])
    last_step = mesh.get(f"/v1/jobs/{job}/steps")[-1]
    assert last_step["updates"] == 1 and 0 < last_step["target_probability"] < 1


def test_one_can_be_asked_for(mesh: Mesh, model_folder: Path) -> None:
    job = mesh.submit(document(model_folder, steps=40))
    mesh.until(job, lambda view: view["step"] >= 1)
    assert mesh.http.post(f"/v1/jobs/{job}/evaluate").status_code == 202
    view = mesh.done(job)
    [asked] = [e for e in view["evals"] if e["tag"].startswith("asked")]
    assert 1 <= asked["step"] < 40 and asked["versions"] == {"policy": asked["step"]} and asked["prompts"] == 10


def test_targets_count_in_the_logs_budget(mesh: Mesh, model_folder: Path) -> None:
    """Their bodies are built by the controller; checkpoints that the recipe did not ask for make room for them."""
    steps = 10
    short = document(model_folder, steps=steps, eval={})
    short["train"] |= {"checkpoint_every": 0, "keep_checkpoints": 20, "log_budget_mb": 0.015}
    job = mesh.submit(short)
    mesh.done(job)
    made = checkpoints.found(mesh.state / "jobs" / job / "checkpoints")
    at = [checkpoints.position(path).step for path in made]
    assert at[-1] == steps and 2 < len(at) < steps and at == sorted(set(at)), at
