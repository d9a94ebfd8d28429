"""What the training stack costs: packed against padded replay and plain loops, publishing. `python -m benchmarks.trainer`.

Rows have long-tailed lengths, as completions do. Everything runs in one process on the same cores, in alternating order; the
figures are medians. On CPUs attention is a small part of a forward pass, so what is saved is the padding's matrix products.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Row as Line
from benchmarks.report import publish
from services.trainer.algorithms.grpo import Grpo
from services.trainer.backend import Backend
from services.trainer.batch import Batch, Row
from services.trainer.planner import Size, chunks, first_fit_decreasing
from services.trainer.publisher import Publisher, shards
from services.trainer.stack import TrainStack
from services.trainer.world import World
from shared.config import algorithms
from shared.config.sections import Optimizer, Train
from shared.models.ar import packed
from shared.models.ar.bundle import Bundle
from shared.models.ar.replay import replay
from shared.models.ar.tiny import make_model
from shared.models.tensors import decode
from shared.weights.store import WeightStore

ROWS, TOKENS, COUNT = 48, 3072, 12
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "max_position_embeddings": 1024}


class Made(Batch):
    """Rows that need no bodies."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.heads = [Head(len(row.completion)) for row in rows]  # type: ignore[misc]

    def row(self, index: int) -> Row:
        return self.rows[index]


class Head:
    def __init__(self, length: int) -> None:
        self.length = length


def batch(seed: int = 0) -> Made:
    """Lengths are log-normal: most are short, few are long."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.6, 0.9, ROWS).astype(int), 4, 400)
    rows = []
    for length in lengths:
        prompt, completion = (rng.integers(3, 90, n).astype(np.int32) for n in (16, length))
        ones = np.ones(length, np.float32)
        rows.append(Row(prompt, completion, ones, -4 * ones, float(rng.normal()), 0.0))
    return Made(rows)


def bundle(how: str) -> Bundle:
    model = make_model(0, **SHAPE).eval()
    if how == "packed":
        packed.enable(model)
    return Bundle(model, None, 0)  # type: ignore[arg-type]


def stack(how: str) -> TrainStack:
    limits = {"micro_batch_tokens": TOKENS} if how == "packed" else {"micro_batch_size": COUNT}
    section = Train(optimizer=Optimizer(lr=1e-4), replay=how, **limits)
    algorithm = Grpo(algorithms.Grpo(clip_range=0.2))
    return TrainStack(Backend(bundle(how), World(), "float32"), algorithm, section, World(), 1000, 1.0)


def plain(how: str) -> Callable[[Made], None]:
    """The same forward and backward passes in a loop by hand: no planner's agreement, no figures, no checks."""
    own = bundle(how)
    optimizer = torch.optim.AdamW(own.model.parameters(), lr=1e-4)

    def step(made: Made) -> None:
        rows = made.rows
        if how == "packed":
            sizes = [Size(len(r.prompt), len(r.completion)) for r in rows]
            micros: Sequence[Sequence[int]] = first_fit_decreasing(sizes, TOKENS, "sum")
        else:
            micros = chunks(range(len(rows)), COUNT)
        total = sum(len(r.completion) for r in rows)
        optimizer.zero_grad(set_to_none=True)
        for micro in micros:
            members = [rows[i] for i in micro]
            found = replay(own, [m.prompt for m in members], [m.completion for m in members], 1.0, how == "packed")
            advantages = torch.cat([torch.full((len(m.completion),), m.advantage) for m in members])
            ratio = (found.log_probs - found.log_probs.detach()).exp()
            loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(own.model.parameters(), 1.0)
        optimizer.step()

    return step


def steps(rounds: int) -> list[Line]:
    runs: dict[str, Callable[[Made], Any]] = {
        "packed": stack("packed").train_track,
        "padded": stack("padded").train_track,
        "plain packed": plain("packed"),
        "plain padded": plain("padded"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    data = [batch(seed) for seed in range(rounds)]
    for index, made in enumerate(data):
        for name in sorted(runs, reverse=bool(index % 2)):
            started = time.perf_counter()
            runs[name](made)
            if index:  # the first warms caches and allocators
                seconds[name].append(time.perf_counter() - started)
    at = {name: statistics.median(values) for name, values in seconds.items()}
    useful = statistics.fmean(_useful(made) for made in data)
    tokens = statistics.fmean(sum(len(r.prompt) + len(r.completion) for r in made.rows) for made in data)
    pace = f"{tokens / at['packed']:.0f} tokens/s, {at['packed']:.2f} s a step"
    return [
        Line("packed stack, tokens/s over a plain packed loop", at["plain packed"] / at["packed"], 0.95, most=False, note=pace),
        Line(
            "packed stack, tokens/s over a plain padded loop",
            at["plain padded"] / at["packed"],
            1.5,
            most=False,
            note=f"useful / padded tokens {useful:.2f}",
        ),
        Line("padded stack, step time over packed", at["padded"] / at["packed"], 1.5, most=False, note=f"{at['padded']:.2f} s"),
    ]


def _useful(made: Made) -> float:
    """Tokens over what padded tensors of the counted micro-batches hold."""
    rows = made.rows
    held = 0
    for micro in chunks(range(len(rows)), COUNT):
        held += len(micro) * (max(len(rows[i].prompt) for i in micro) + max(len(rows[i].completion) for i in micro))
    return sum(len(r.prompt) + len(r.completion) for r in rows) / held


def memory() -> list[Line]:
    """Peak resident memory of a process that makes three steps, less that of one that makes none."""
    peaks = {}
    for how in ("packed", "padded", "none"):
        command = [sys.executable, "-m", "benchmarks.trainer", "--peak", how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[how] = float(done.stdout.strip().splitlines()[-1])
    own, other = (peaks[how] - peaks["none"] for how in ("packed", "padded"))
    note = f"{own:.0f} against {other:.0f} MB above an idle process; micro-batches of {TOKENS} tokens, {COUNT} rows"
    return [Line("peak memory, packed over padded", own / other, note=note)]


def peak(how: str) -> None:
    if how != "none":
        own = stack(how)
        for seed in range(3):
            own.train_track(batch(seed))
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would tell of the parent too
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)


def publishing(rounds: int) -> list[Line]:
    """Publish and load of 200 MB against a plain write and read of the same bytes; and training beside a publisher."""
    folder = Path(tempfile.mkdtemp(dir="build"))
    state = {f"layer{i}": torch.randn(1024, 1280) for i in range(40)}
    times: dict[str, list[float]] = {"store": [], "plain": []}
    store = WeightStore(folder / "weights", "policy")
    [(_, pieces)] = shards(state)
    data = b"".join(pieces)
    for index in range(rounds):
        for name in ("store", "plain") if index % 2 else ("plain", "store"):
            started = time.perf_counter()
            if name == "store":
                store.publish(1, index, shards(state))
                for _, found in store.read(1, index):
                    sum(float(value[0, 0]) for value in decode(found).values())
            else:
                (folder / "plain").write_bytes(data)
                (folder / "plain").read_bytes()
            times[name].append(time.perf_counter() - started)
        store.collect(1, 1)
    ratio = statistics.median(times["store"]) / statistics.median(times["plain"])
    note = f"{statistics.median(times['store']):.2f} s against {statistics.median(times['plain']):.2f} s, checksums included"
    rows = [Line("publish + load of 200 MB over a plain write + read", ratio, 1.3, note=note)]
    shutil.rmtree(folder)
    return [*rows, beside(rounds)]


def beside(rounds: int) -> Line:
    """Steps with a publish after each against steps without, in blocks of four, alternating."""
    own, made = stack("packed"), batch()
    with tempfile.TemporaryDirectory(dir="build") as folder:
        publisher = Publisher(WeightStore(Path(folder), "policy"), 1, 2, False, lambda event: None)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for index in range(2 * rounds + 2):
            on = bool(index % 2)
            started = time.perf_counter()
            for _ in range(4):
                own.train_track(made)
                if on:
                    publisher.publish(own.progress.version, own.backend.weights())
            if index > 1:
                seconds[on].append((time.perf_counter() - started) / 4)
            publisher.flush(own.progress.version if on else -1)
    on_s, off_s = statistics.median(seconds[True]), statistics.median(seconds[False])
    return Line("step time with publishing over without", on_s / off_s, 1.05, note=f"{on_s:.3f} s against {off_s:.3f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    if args.peak:
        peak(args.peak)
        return 0
    with contextlib.suppress(FileExistsError):
        Path("build").mkdir()
    rounds = 5 if args.quick else 13
    return publish("trainer", [*steps(rounds), *memory(), *publishing(rounds)])


if __name__ == "__main__":
    raise SystemExit(main() > 0)
