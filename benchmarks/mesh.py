"""The mesh against one plain process and against TRL, and what its services cost. `python -m benchmarks.mesh [--quick]`.

Every ratio is measured side by side: same cores and threads, alternating order, medians. The limits of the machine: two shared
cores, so a figure moves by some per cent from run to run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import codec, controller, hop
from benchmarks.report import Row, publish
from unimesh.supervisor import MALLOC, EmbeddedMesh, Shape

FOLDER = Path("build/bench").resolve()
SKIP = 4
"""First steps of a run are left out: caches, allocators, the learning-rate warm-up."""
TRL = Path(".venv-bench/bin/python").absolute()
LONG = ["data.batch_size=512", "rollout.group_size=32", "train.micro_batch_size=1024"]
"""A step of more than 10 s: 16,384 completions."""


class Bench:
    """One embedded mesh for all measurements; its children wait idle while something else is timed."""

    def __init__(
        self, recipe: str = "ar/sort", module: str = "benchmarks.plain", name: str = "model", threads: int = 0
    ) -> None:
        """`module`: the plain process that makes the recipe's steps. `name`: of the model's folder. `threads`: of a child."""
        self.recipe, self.module = recipe, module
        shutil.rmtree(FOLDER / "state", ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.mesh = EmbeddedMesh(FOLDER / "state", Shape(threads=threads), (FOLDER,), say=lambda text: None)
        self.model = FOLDER / name
        self.last = ""
        """The id of the newest job."""

    @contextmanager
    def up(self) -> Iterator[None]:
        self.mesh.start()
        self.http = httpx.Client(base_url=self.mesh.api, timeout=120)
        tending = threading.Thread(target=self.mesh.run)
        tending.start()
        try:
            yield
        finally:
            self.mesh.stop()
            tending.join()

    def job(self, recipe: str, *overrides: str) -> list[dict[str, Any]]:
        """Runs a job to its end; returns its steps."""
        body = {"recipe": recipe, "overrides": [*overrides, "name="]}
        answer = self.http.post("/v1/jobs", json=body)
        answer.raise_for_status()
        self.last = answer.json()["id"]
        while (view := self.http.get(f"/v1/jobs/{self.last}").json())["state"] != "done":
            if view["state"] in ("failed", "cancelled"):
                raise RuntimeError(view["reason"])
            time.sleep(2)
        steps: list[dict[str, Any]] = self.http.get(f"/v1/jobs/{self.last}/steps", params={"limit": 10_000}).json()
        time.sleep(8)  # the next children finish their imports before anything else is timed
        return steps

    def warm(self) -> None:
        """The checkpoint that all runs start from: the demo's warm start."""
        if (self.model / "config.json").exists():
            return
        base = FOLDER / "base"
        subprocess.run([sys.executable, "-m", "shared.models.ar.tiny", str(base), "0"], check=True, capture_output=True)
        self.job("sft/sort", f"model.path={base}", "data.source.params.seed=1000")
        weights = self.mesh.state / "jobs" / self.last / "weights" / "policy"
        shutil.copytree(base, self.model)
        shutil.copyfile(weights / "1" / "v200" / "model.safetensors", self.model / "model.safetensors")

    def rl(self, steps: int, *more: str, seed: int = 0) -> tuple[list[float], list[float]]:
        """(seconds of each step, rewards) of the demo's job without evaluation."""
        seeds = (f"seed={seed}", f"data.source.params.seed={2000 + seed}")
        found = self.job("ar/sort", f"model.path={self.model}", f"steps={steps}", "eval=null", *seeds, *more)
        ends = [s["at"] for s in found]
        view = self.http.get(f"/v1/jobs/{self.last}").json()
        return [b - a for a, b in zip([view["started"], *ends], ends, strict=False)], [s["reward"] for s in found]

    @contextmanager
    def plain(self, *more: str) -> Iterator[Callable[[int], list[float]]]:
        """The plain process; what it yields makes so many steps and returns their seconds."""
        env = self.environment() | {"UNIMESH_ROOTS": str(FOLDER)}
        command = [sys.executable, "-m", self.module, str(self.model), "eval=null", *more]
        log = (FOLDER / "plain.log").open("w")
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def run(steps: int) -> list[float]:
            print(steps, file=questions, flush=True)
            return list(json.loads(answers.readline()))

        try:
            yield run
        finally:
            questions.close()
            process.wait(60)

    @contextmanager
    def held(self, *more: str) -> Iterator[Callable[[int], list[float]]]:
        """A job that is paused; what this yields resumes it for so many steps and returns their seconds."""
        overrides = [f"model.path={self.model}", "eval=null", "steps=1000000", "train.checkpoint_every=0", "name=", *more]
        answer = self.http.post("/v1/jobs", json={"recipe": self.recipe, "overrides": overrides})
        if answer.is_error:
            raise RuntimeError(answer.text)
        job = f"/v1/jobs/{answer.json()['id']}"

        def run(steps: int) -> list[float]:
            before = self.http.get(job).json()["step"]
            self.http.post(f"{job}/resume")
            while self.http.get(job).json()["step"] <= before + steps:
                time.sleep(0.5)
            self.http.post(f"{job}/pause")
            while (view := self.http.get(job).json())["ledger"]["in_flight"]:
                time.sleep(0.1)
            made = self.http.get(f"{job}/steps", params={"limit": 10_000}).json()
            ends = [step["at"] for step in made if step["step"] > before]
            assert view["step"] == made[-1]["step"]
            return [b - a for a, b in itertools.pairwise(ends)][:steps]

        try:
            yield run
        finally:
            self.http.post(f"{job}/cancel")

    def trl(self, steps: int, seed: int) -> dict[str, list[float]]:
        command = [str(TRL), "-m", "benchmarks.trl_grpo", str(self.model), str(steps), str(seed)]
        found: dict[str, list[float]] = _json(command, self.environment())
        return found

    def environment(self) -> dict[str, str]:
        """The same threads as the mesh's children have."""
        threads = str(os.cpu_count() or 1)
        ours = {"OMP_NUM_THREADS": threads, "UNIMESH_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        return MALLOC | dict(os.environ) | ours


def _json(command: list[str], env: dict[str, str]) -> Any:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def overhead(bench: Bench, blocks: int, steps: int, name: str, limit: float, *more: str) -> Row:
    """Both processes stand ready and make `steps` steps in turn, so that both see the same minutes of the machine."""
    times: dict[str, list[float]] = {"mesh": [], "plain": []}
    with bench.held(*more) as mesh, bench.plain(*more) as plain:
        mesh(SKIP), plain(SKIP + 1)
        for index in range(blocks):
            for who in ("mesh", "plain") if index % 2 else ("plain", "mesh"):
                seconds = (mesh if who == "mesh" else plain)(steps)
                times[who].append(statistics.median(seconds))
    mesh_s, plain_s = (statistics.median(times[who]) for who in ("mesh", "plain"))
    ratios = sorted(a / b for a, b in zip(times["mesh"], times["plain"], strict=True))
    spread = f"pairs from {ratios[0]:.2f} to {ratios[-1]:.2f}, their median {statistics.median(ratios):.2f}"
    note = f"{mesh_s:.3f} s against {plain_s:.3f} s; {blocks} blocks of {steps} steps each in turn; {spread}"
    return Row(name, mesh_s / plain_s, limit, note=note)


def against_trl(bench: Bench, steps: int, seeds: int) -> list[Row]:
    """Step time, time to a mean reward of 0.8 over ten steps, and the rewards at equal steps."""
    rows: dict[str, list[float]] = {"step": [], "time": []}
    ours_last, theirs_last, ours_step, theirs_step = [], [], [], []
    for seed in range(seeds):
        seconds, rewards = bench.rl(steps, seed=seed)
        other = bench.trl(steps, seed)
        ends = other["ends"]
        theirs = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
        ours_step.append(statistics.median(seconds[SKIP:]))
        theirs_step.append(statistics.median(theirs[SKIP:]))
        rows["step"].append(ours_step[-1] / theirs_step[-1])
        rows["time"].append(reached(seconds, rewards) / reached(theirs, other["rewards"]))
        ours_last.append(statistics.fmean(rewards[-10:]))
        theirs_last.append(statistics.fmean(other["rewards"][-10:]))
    pace = f"{statistics.median(ours_step):.3f} s against {statistics.median(theirs_step):.3f} s"
    learnt = statistics.fmean(ours_last) - statistics.fmean(theirs_last)
    return [
        Row("step time / TRL GRPOTrainer", statistics.median(rows["step"]), 0.90, note=f"{pace}; medians of {seeds} runs each"),
        Row("time to reward 0.8 / TRL", statistics.median(rows["time"]), 0.90, note="differs by 10 steps between seeds"),
        Row(
            "reward of the last 10 steps - TRL's",
            learnt,
            -0.05,
            most=False,
            note=f"{steps} steps, {seeds} seeds; TRL's advantages are sqrt(7/8) of ours (unbiased std)",
        ),
    ]


def reached(seconds: list[float], rewards: list[float]) -> float:
    """Seconds until the mean reward of ten steps is 0.8; those of the whole run if it never is."""
    for end in range(10, len(rewards) + 1):
        if statistics.fmean(rewards[end - 10 : end]) >= 0.8:
            return sum(seconds[:end])
    return sum(seconds)


def slopes(bench: Bench, steps: int = 200, *more: str) -> list[Row]:
    """Resident memory of every process of the mesh over steps 50 to 200: least-squares slope in MB a step."""
    samples: dict[str, list[tuple[int, float]]] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            try:
                view = bench.http.get(f"/v1/jobs/{bench.last}").json()
                for process in psutil.Process().children(recursive=True):
                    words = [w for w in process.cmdline() if w.startswith("services.") or "redis-server" in w]
                    if words:
                        size = process.memory_info().rss / 2**20
                        samples.setdefault(f"{words[0].rpartition('/')[2]} {process.pid}", []).append((view["step"], size))
            except (httpx.HTTPError, psutil.Error, KeyError):
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    bench.job(bench.recipe, f"model.path={bench.model}", f"steps={steps}", *more)
    stop.set()
    watcher.join()
    rows = []
    for name, points in sorted(samples.items()):
        late = [(x, y) for x, y in points if 50 <= x < steps]
        if len(late) > 10:
            slope = statistics.linear_regression([x for x, _ in late], [y for _, y in late]).slope
            rows.append(Row(f"memory of {name.split()[0]}, MB a step", slope, 0.5, note=f"{late[-1][1]:.0f} MB at the end"))
    return rows


def api_latency(bench: Bench, steps: int = 60) -> Row:
    """How long `GET /v1/jobs/{id}` takes while the job runs as fast as it can."""
    times: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=bench.mesh.api, timeout=20) as client:
            while not stop.wait(0.02):
                if bench.last:
                    started = time.perf_counter()
                    client.get(f"/v1/jobs/{bench.last}")
                    times.append(time.perf_counter() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    bench.rl(steps)
    stop.set()
    thread.join()
    slow = statistics.quantiles(times, n=100)[98] * 1000
    return Row("GET /v1/jobs/{id} while it runs, p99, ms", slow, 100.0, note=f"{len(times)} requests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; no TRL, no long steps")
    args = parser.parse_args()
    rows = [*codec.rows(), *hop.rows()]
    bench = Bench()
    with bench.up():
        bench.warm()
        rows.append(overhead(bench, 12 if args.quick else 30, 8, "mesh / plain process, a step of the demo", 1.10))
        rows.append(api_latency(bench))
        if not args.quick:
            rows.append(overhead(bench, 3, 1, "mesh / plain process, a step of over 10 s", 1.03, *LONG))
            if TRL.exists():
                rows += against_trl(bench, 70, 3)
            rows += slopes(bench)
    rows += controller.rows(bench.model, 20_000 if args.quick else 100_000)
    return publish("mesh", rows)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
