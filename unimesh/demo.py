"""`make demo`: two jobs on one embedded mesh, shown from the first service up to the last table."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from shared.pictures import PROMPTS
from shared.types.metrics import average_metrics
from shared.wire.client import connect
from unimesh import show
from unimesh.client import Api
from unimesh.home import default_state
from unimesh.supervisor import EmbeddedMesh, Shape, install_signals

STEPS = 100
REWARD_RISE, ACCURACY_RISE, PICTURES_RISE = 0.2, 0.3, 0.3
"""A demo passes only if both of its rises are reached."""


def run(seed: int, domain: str, model: str, steps: int | None = None) -> int:
    """0 if the figures moved as they should. The main thread tends the mesh, another one runs the jobs."""
    if (domain, model) not in FLOWS:
        legal = ", ".join(d for d, m in FLOWS if m == model)
        raise SystemExit(f"model {model!r}: its demos are of the domains {legal}, not {domain}")
    console = Console()
    state = default_state() / f"demo-{domain}-{model}-{seed}"
    shutil.rmtree(state, ignore_errors=True)
    mesh = EmbeddedMesh(state, Shape(), (default_state(),), say=lambda text: console.print(text, highlight=False))
    install_signals(mesh)
    outcome: list[int] = []

    def act() -> None:
        try:
            outcome.append(FLOWS[domain, model](mesh, console, seed, steps).run())
        finally:
            mesh.stopping.set()

    started = time.monotonic()
    mesh.start()
    thread = threading.Thread(target=act, name="demo")
    thread.start()
    mesh.run()
    thread.join()
    mesh.stop()
    console.print(f"total {time.monotonic() - started:.0f} s", highlight=False)
    return outcome[0] if outcome else 1


class Flow:
    """What the demos share."""

    recipe: ClassVar[str]
    places: ClassVar[tuple[str, ...]] = ()
    """Sources of the recipe whose file is the demo's own."""

    def __init__(self, mesh: EmbeddedMesh, console: Console, seed: int, steps: int | None) -> None:
        self.mesh, self.console, self.seed, self.steps = mesh, console, seed, steps
        self.api = Api(mesh.api)

    def run(self) -> int:
        """0 if the figures moved as they should."""
        raise NotImplementedError

    def going(self) -> bool:
        return not self.mesh.stopping.is_set()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def launch(self, recipe: str, *overrides: str) -> dict[str, Any]:
        answer = self.api.post("/v1/jobs", {"recipe": recipe, "overrides": list(overrides)})
        self.say(f"\n[bold]{recipe}[/bold]  job {answer['id']}")
        view = show.follow(self.api, answer["id"], self.console, self.going)
        if view["state"] != "done":
            self.say(f"[red]job {view['id']} {view['state']}: {view['reason']}[/red]")
            self.say(f"look into {self.mesh.logs}")
            raise SystemExit(1)
        return view

    def table(self, view: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        """Where the time went, rates, versions, bytes, ledger."""
        wall = max(s["at"] for s in steps) - view["started"]
        beside = view["domain"].startswith("async")
        table = Table("stage", "seconds", "share", title="what worked beside each other" if beside else "where the time went")
        if beside:
            stages = dict.fromkeys(n for s in steps for n in s if n.startswith("busy/"))
            times = {n.removeprefix("busy/"): sum(s.get(n, 0.0) for s in steps) for n in stages}
            times["trainer"] = sum(s["seconds/train"] for s in steps)
        else:
            times = {n: sum(s.get(f"seconds/{n}", 0.0) for s in steps) for n in ("rollout", "reward", "train")}
            times["publish"] = view["publishes"]["seconds"]
            times["mesh (messages, waiting)"] = wall - sum(times.values())
        for name, seconds in times.items():
            table.add_row(name, f"{seconds:.1f}", f"{seconds / wall:.0%}")
        table.add_row("all", f"{wall:.1f}", "100%")
        self.console.print(table)
        samples = sum(s.get("samples", 0) for s in steps)
        stats = connect(self.mesh.redis.url).info("stats")
        moved = stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
        ledger, publishes = view["ledger"], view["publishes"]
        facts = Table.grid(padding=(0, 2))
        facts.add_row("samples", f"{samples:.0f}, {samples / wall:.0f} a second")
        facts.add_row("versions", f"{publishes['count']} published, {publishes['bytes'] / 2**20:.0f} MiB")
        facts.add_row("through Redis", f"{moved / 2**20:.0f} MiB in both directions")
        dropped = sum(ledger["dropped"].values())
        facts.add_row(
            "ledger",
            f"issued {ledger['issued']} = trained {ledger['trained']} + dropped {dropped}"
            f" + dead {ledger['dead']} + in flight {ledger['in_flight']}",
        )
        self.console.print(facts)

    def tiny(self) -> Path:
        model = self.mesh.state / "model"
        self.say("making a Qwen3 of 0.41 M parameters")
        command = [sys.executable, "-m", "shared.models.ar.tiny", str(model), str(self.seed)]
        subprocess.run(command, check=True, capture_output=True)
        return model

    def smollm2(self) -> Path:
        model: Path = default_state() / "models" / "smollm2"
        if not (model / "config.json").exists():
            self.say("converting SmolLM2-135M-Instruct from GGUF to safetensors (once)")
            command = [sys.executable, "-m", "shared.models.ar.gguf", str(model)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                self.say(done.stderr[-1500:])
                raise SystemExit(1)
        return model

    def previews(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        table = Table("prompt", "before", "after", "answer", title="held-out prompts")
        for old, new in zip(before["previews"], after["previews"], strict=False):
            answer = str(old["metadata"].get("answer", ""))
            table.add_row(old["prompt"][-60:], old["completion"], new["completion"], answer)
        self.console.print(table)

    def next_steps(self, job: str) -> None:
        self.say(f"\nState, logs, weights and checkpoints stay in {self.mesh.state}. To look around:")
        self.say(f"  unimesh up --state {os.path.relpath(self.mesh.state)}   (API at http://127.0.0.1:8080/docs)")
        self.say(f"  unimesh jobs; unimesh watch {job}")


class Sorting(Flow):
    """A tiny Qwen3 imitates a careless teacher, then learns from exact-match rewards to sort six digits."""

    recipe = "ar/sort"

    def run(self) -> int:
        model = self.tiny()
        steps = f"steps={self.steps or STEPS}"
        warm = self.launch(
            "sft/sort", f"model.path={model}", f"seed={self.seed}", f"data.source.params.seed={1000 + self.seed}"
        )
        view = self.launch(
            self.recipe,
            f"model.path=job:{warm['id']}",
            f"seed={self.seed}",
            f"data.source.params.seed={2000 + self.seed}",
            steps,
        )
        records = self.api.get(f"/v1/jobs/{view['id']}/steps")
        evals = {e["tag"]: e for e in view["evals"]}
        first, last = (average_metrics(some)["reward"] for some in (records[:10], records[-10:]))
        before, after = evals["start"]["reward"], evals["end"]["reward"]
        self.table(view, records)
        self.previews(evals["start"], evals["end"])
        self.say(f"reward, mean of 10 steps:    {first:.3f} -> {last:.3f}  (must rise by {REWARD_RISE})")
        self.say(f"held-out accuracy, greedy:   {before:.3f} -> {after:.3f}  (must rise by {ACCURACY_RISE})")
        passed = last >= first + REWARD_RISE and after >= before + ACCURACY_RISE
        self.say("[green]the demo passed[/green]" if passed else "[red]the demo did not pass[/red]")
        self.next_steps(view["id"])
        return 0 if passed else 1


QUESTIONS = {
    "What is the capital of France?": "paris",
    "What is the capital of Spain?": "madrid",
    "What is the capital of Italy?": "rome",
    "What is the opposite of hot?": "cold",
    "What is the opposite of up?": "down",
    "What color is the sky on a clear day?": "blue",
    "What color is grass?": "green",
    "Which animal barks?": "dog",
}


class AsyncSorting(Sorting):
    """The same, while rollouts run ahead of the trainer."""

    recipe = "ar/sort_async"


class SmolLM(Flow):
    """A real model: SmolLM2-135M-Instruct from its GGUF file, chat template, a format reward; a few full-weight steps."""

    recipe = "ar/smollm2"
    places = ("data.source", "eval.held_out.source")

    def run(self) -> int:
        model = self.smollm2()
        questions = self.mesh.state / "questions.jsonl"
        rows = ({"question": question, "answer": answer} for question, answer in QUESTIONS.items())
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = [f"{place}.params.path={questions}" for place in self.places]
        steps = f"steps={self.steps or 8}"
        view = self.launch(self.recipe, f"model.path={model}", f"seed={self.seed}", steps, *paths)
        records = self.api.get(f"/v1/jobs/{view['id']}/steps")
        evals = {e["tag"]: e for e in view["evals"]}
        self.table(view, records)
        self.previews(evals["start"], evals["end"])
        self.next_steps(view["id"])
        return 0


def conversations(seed: int, count: int, held_out: bool) -> Iterator[dict[str, Any]]:
    """Two questions and two answers each; a tenth of the digits (CRC-32 divisible by 10) is held out."""
    rng = random.Random(f"{seed}:{held_out}")
    while count:
        digits = "".join(rng.choice("0123456789") for _ in range(6))
        if (zlib.crc32(digits.encode()) % 10 == 0) == held_out:
            count -= 1
            said = [f"sort {digits}", "".join(sorted(digits)), "backwards", "".join(sorted(digits, reverse=True))]
            roles = ("user", "assistant") * 2
            yield {"messages": [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]}


class Chat(Flow):
    """Supervised: conversations of two turns are imitated, the assistant's side alone."""

    recipe = "sft/chat"
    places = ("data.source", "eval.held_out.source")
    left = 0.1
    """Share of the first held-out loss that may be left in the end."""
    overrides: tuple[str, ...] = ()

    def model(self) -> Path:
        return self.tiny()

    def run(self) -> int:
        files = {}
        for name, count in (("train", 4000), ("held_out", 200)):
            files[name] = self.mesh.state / f"{name}.jsonl"
            rows = conversations(self.seed, count, name == "held_out")
            files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        view = self.launch(
            self.recipe,
            f"model.path={self.model()}",
            f"seed={self.seed}",
            *(f"{place}.params.path={files[name]}" for place, name in zip(self.places, files, strict=True)),
            *self.overrides,
            *([] if self.steps is None else [f"steps={self.steps}"]),
        )
        evals = sorted(view["evals"], key=lambda e: (e["step"], e["tag"] == "end"))
        table = Table("step", "held-out loss", "perplexity", "tokens", title="conversations that were not trained on")
        for found in evals:
            table.add_row(str(found["step"]), f"{found['loss']:.4f}", f"{found['perplexity']:.2f}", f"{found['tokens']:.0f}")
        self.console.print(table)
        first, last = evals[0]["loss"], evals[-1]["loss"]
        self.say(f"held-out loss: {first:.3f} -> {last:.3f}  (must fall to {self.left:.0%} of it)")
        passed = last <= self.left * first
        self.say("[green]the demo passed[/green]" if passed else "[red]the demo did not pass[/red]")
        self.next_steps(view["id"])
        return 0 if passed else 1


class SmolChat(Chat):
    """The same with adapters on a real model, a few steps."""

    left = 0.5
    overrides = (
        "steps=12",
        "data.batch_size=16",
        "eval.held_out.size=32",
        "eval.held_out.every=4",
        "+model.lora.rank=8",
        "+model.lora.alpha=16",
        "train.optimizer.warmup_steps=2",
    )

    def model(self) -> Path:
        return self.smollm2()


class Painter(Flow):
    """A tiny Stable Diffusion 3 that imitates a careless painter learns from a rule what its prompts mean."""

    recipe, warm_up = "diffusion/demo", "sft/painter"
    places = ("data.source", "eval.fixed.source")

    def run(self) -> int:
        model, prompts = self.mesh.state / "model", self.mesh.state / "prompts.jsonl"
        self.say("making a Stable Diffusion 3 of 1.2 M parameters, and pictures of a careless painter (half a minute)")
        command = [sys.executable, "-m", "shared.models.diffusion.tiny", str(model), str(self.seed)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            self.say(done.stderr[-1500:])
            return 1
        records = {"data": "train", "eval.held_out": "held_out"}
        paths = [f"{place}.source.params.path={model / name / 'records.jsonl'}" for place, name in records.items()]
        steps = [] if self.steps is None else [f"steps={self.steps}"]
        warm = self.launch(self.warm_up, f"model.path={model}", f"seed={self.seed}", *paths, *steps)
        losses = {e["tag"]: e["loss"] for e in warm["evals"]}
        self.say(f"it paints as the painter does: held-out loss {losses['start']:.3f} -> {losses['end']:.3f}")
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        paths = [f"{place}.params.path={prompts}" for place in self.places]
        view = self.launch(self.recipe, f"model.path=job:{warm['id']}", f"seed={self.seed}", *paths, *steps)
        records = self.api.get(f"/v1/jobs/{view['id']}/steps")
        evals = {e["tag"]: e for e in view["evals"]}
        first, last = (average_metrics(some)["reward"] for some in (records[:10], records[-10:]))
        before, after = evals["start"]["reward"], evals["end"]["reward"]
        self.table(view, records)
        self.console.print(f"reward  {show.sparkline([r['reward'] for r in records])}", highlight=False)
        sheet = self.mesh.state / "before_after.png"
        versions = [str(self.version(one)) for one in (warm, view)]
        command = [sys.executable, "-m", "shared.models.diffusion.sheet", str(model), *versions, str(sheet)]
        subprocess.run(command, check=True, capture_output=True)
        self.say(f"pictures before and after:   {os.path.relpath(sheet)}")
        self.say(f"reward, mean of 10 steps:    {first:.3f} -> {last:.3f}  (must rise by {REWARD_RISE})")
        self.say(f"reward of fixed noise, eta 0: {before:.3f} -> {after:.3f}  (must rise by {PICTURES_RISE})")
        passed = last >= first + REWARD_RISE and after >= before + PICTURES_RISE
        self.say("[green]the demo passed[/green]" if passed else "[red]the demo did not pass[/red]")
        self.next_steps(view["id"])
        return 0 if passed else 1

    def version(self, view: dict[str, Any]) -> Path:
        """The newest of a job."""
        store: Path = self.mesh.state / "jobs" / view["id"] / "weights" / "policy" / str(view["incarnation"])
        return store / f"v{view['versions']['published']['policy']}"


class AsyncPainter(Painter):
    """The same, while rollouts run ahead of the trainer."""

    recipe = "diffusion/demo_async"


FLOWS: dict[tuple[str, str], type[Flow]] = {
    ("ar", "tiny"): Sorting,
    ("async_ar", "tiny"): AsyncSorting,
    ("async_diffusion", "tiny"): AsyncPainter,
    ("ar", "smollm2"): SmolLM,
    ("diffusion", "tiny"): Painter,
    ("sft", "tiny"): Chat,
    ("sft", "smollm2"): SmolChat,
}
"""By domain and model."""
