"""The mesh against one plain process and against TRL, and what its services cost. `python -m benchmarks.mesh [--quick]`.

Every ratio is measured side by side: same cores and threads, alternating order, medians. The limits of the machine: two shared
cores, so a figure moves by some per cent from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
LONG = ["rollout.group_size=64", "rollout.sampling.max_new_tokens=48", "train.micro_batch_size=256"]
"""A step of more than 10 s: 2048 completions that seldom end early."""


class Bench:
    """One embedded mesh for all measurements; its children wait idle while something else is timed."""

    def __init__(self) -> None:
        shutil.rmtree(FOLDER / "state", ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.mesh = EmbeddedMesh(FOLDER / "state", Shape(), (FOLDER,), say=lambda text: None)
        self.model = FOLDER / "model"
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
        body = {"recipe": recipe, "overrides": list(overrides)}
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

    def plain(self, steps: int, *more: str) -> list[float]:
        env = self.environment() | {"UNIMESH_ROOTS": str(FOLDER)}
        command = [sys.executable, "-m", "benchmarks.plain", str(self.model), str(steps), "eval=null", f"steps={steps}", *more]
        return list(_json(command, env)["seconds"])

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


def overhead(bench: Bench, rounds: int, steps: int) -> Row:
    times: dict[str, list[float]] = {"mesh": [], "plain": []}
    for index in range(rounds):
        for who in ("mesh", "plain") if index % 2 else ("plain", "mesh"):
            seconds = bench.rl(steps)[0] if who == "mesh" else bench.plain(steps)
            times[who].append(statistics.median(seconds[SKIP:]))
    mesh, plain = statistics.median(times["mesh"]), statistics.median(times["plain"])
    note = f"{mesh:.3f} s against {plain:.3f} s a step; medians of {rounds} runs each"
    return Row("mesh / plain process, a step of the demo", mesh / plain, 1.10, note=note)


def long_overhead(bench: Bench, rounds: int) -> Row:
    ratios, times = [], []
    for index in range(rounds):
        pair: dict[str, float] = {}
        for who in ("mesh", "plain") if index % 2 else ("plain", "mesh"):
            seconds = bench.rl(3, *LONG)[0] if who == "mesh" else bench.plain(3, *LONG)
            pair[who] = statistics.fmean(seconds[1:])
        ratios.append(pair["mesh"] / pair["plain"])
        times.append(pair["plain"])
    note = f"{statistics.median(times):.1f} s a step; {rounds} rounds"
    return Row("mesh / plain process, a step of over 10 s", statistics.median(ratios), 1.03, note=note)


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


def slopes(bench: Bench, steps: int = 200) -> list[Row]:
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
    bench.job("ar/sort", f"model.path={bench.model}", f"steps={steps}")
    stop.set()
    watcher.join()
    rows = []
    for name, points in sorted(samples.items()):
        late = [(x, y) for x, y in points if 50 <= x < steps]
        if len(late) > 10:
            slope = statistics.linear_regression([x for x, _ in late], [y for _, y in late]).slope
            rows.append(Row(f"memory of {name.split()[0]}, MB a step", slope, 0.5, note=f"{late[-1][1]:.0f} MB at the end"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; no TRL, no long steps")
    args = parser.parse_args()
    rows = [*codec.rows(), *hop.rows()]
    bench = Bench()
    with bench.up():
        bench.warm()
        rows.append(overhead(bench, 3 if args.quick else 5, 20))
        if not args.quick:
            rows.append(long_overhead(bench, 3))
            if TRL.exists():
                rows += against_trl(bench, 70, 3)
            rows += slopes(bench)
    rows += controller.rows(bench.model, 20_000 if args.quick else 100_000)
    return publish("mesh", rows)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
