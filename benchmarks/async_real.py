"""Overlap with real models: how soon a run that overlaps reaches the reward at which the synchronous one ends.

The demos' tiny models train as ever; each batch of an engine and each step of the trainer is padded to a fixed time, as on
devices that work beside each other (`benchmarks.paced`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import paced
from benchmarks.mesh import FOLDER, Bench
from benchmarks.report import Row
from shared.pictures import PROMPTS

WINDOW = 10
"""Steps whose mean reward counts."""


def rows(quick: bool) -> list[Row]:
    paced.install(FOLDER / "paced")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER / "paced"), os.environ.get("PYTHONPATH")]))
    bench = Bench(threads=1)
    with bench.up():
        bench.warm()
        return [texts(bench, 20 if quick else 60), pictures(bench, 12 if quick else 30)]


def texts(bench: Bench, steps: int) -> Row:
    own = ["+rollout.engine.name=paced_transformers", "+rollout.engine.params.pace_s=0.8"]
    own += ["algorithm.name=paced_grpo", "+algorithm.params.pace_s=0.8", f"model.path={bench.model}"]
    return compared(bench, "async_ar", "ar/sort", "ar/sort_async", steps, own)


def pictures(bench: Bench, steps: int) -> Row:
    model, prompts = FOLDER / "painter", FOLDER / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [sys.executable, "-m", "shared.models.diffusion.tiny", str(model), "0"]
    subprocess.run(command, check=True, capture_output=True)
    records = {"data": "train", "eval.held_out": "held_out"}
    paths = [f"{place}.source.params.path={model / name / 'records.jsonl'}" for place, name in records.items()]
    bench.job("sft/painter", f"model.path={model}", *paths)
    own = [f"model.path=job:{bench.last}", f"data.source.params.path={prompts}"]
    own += ["rollout.engine.name=paced_diffusers", "+rollout.engine.params.pace_s=2.4"]
    own += ["rollout.engine.params.forward_batch_size=128"]
    own += [
        "algorithm.name=paced_flow_grpo",
        "+algorithm.params.pace_s=0.4",
    ]  # a step has two updates of three drawn steps each
    return compared(bench, "async_diffusion", "diffusion/demo", "diffusion/demo_async", steps, own)


def compared(bench: Bench, name: str, plain: str, overlapped: str, steps: int, own: list[str]) -> Row:
    common = [*own, "eval=null", "train.checkpoint_every=0"]
    times, rewards = run(bench, plain, steps, common)
    wanted, whole = statistics.fmean(rewards[-WINDOW:]), times[-1]
    times, found = run(bench, overlapped, 2 * steps, common)
    reached = next((k for k in range(WINDOW, len(found) + 1) if statistics.fmean(found[k - WINDOW : k]) >= wanted), None)
    needed = times[-1] if reached is None else times[reached - 1]
    what = "never" if reached is None else f"at step {reached}"
    note = f"reward {rewards[0]:.2f} to {wanted:.2f} in {steps} steps, {whole:.0f} s; overlapped {what}, {needed:.0f} s"
    return Row(f"{name}: time to the synchronous run's reward / its wall time", needed / whole, 0.70, note=note)


def run(bench: Bench, recipe: str, steps: int, overrides: list[str]) -> tuple[list[float], list[float]]:
    """(when each step was done, rewards)."""
    found: list[dict[str, Any]] = bench.job(recipe, f"steps={steps}", *overrides)
    started = bench.http.get(f"/v1/jobs/{bench.last}").json()["started"]
    return [step["at"] - started for step in found], [step["reward"] for step in found]
