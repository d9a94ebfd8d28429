"""The controller alone: CPU a group, memory over 100,000 groups, and what importing it costs.

Workers are simulated in another process and answer in bulk, so that commits carry up to 64 events.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Row, publish
from services.controller.jobs import create, load_doc, open_job, prepare
from services.controller.runner import Runner
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.server import RedisServer
from tests.conftest import recipe
from tests.simulated import Simulated

BATCH = 64


def rows(model: Path, groups: int = 100_000) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="controller-") as name:
        server = RedisServer(Path(name) / "redis")
        server.start()
        try:
            return [
                *drive(Settings(server.url, Path(name), (model.parent,), f"dir:{name}/b", 1, None), model, groups),
                *imports(),
            ]
        finally:
            server.kill()


def drive(settings: Settings, model: Path, groups: int) -> list[Row]:
    changes: dict[str, Any] = {"steps": groups // BATCH, "data__batch_size": BATCH, "train__checkpoint_every": 50}
    client = connect(settings.redis_url)
    job = create(client, prepare(recipe(model, **changes), settings))
    process = multiprocessing.get_context("fork").Process(target=simulate, args=(settings, job))
    process.start()
    doc = load_doc(client, job)
    assert doc is not None
    runner = Runner(lambda: connect(settings.redis_url), open_job(doc, settings), settings)
    sizes: list[int] = []
    done = threading.Event()
    threading.Thread(target=watch, args=(sizes, done), daemon=True).start()
    began, cpu = time.monotonic(), time.process_time()
    runner.run()
    cpu, wall = time.process_time() - cpu, time.monotonic() - began
    done.set()
    process.terminate()
    process.join()
    settled = sizes[len(sizes) // 5 :]
    growth = (settled[-1] - settled[0]) / 2**20
    note = f"{groups} groups of 2 in {wall:.0f} s"
    return [
        Row("controller: CPU a group in batches of 64, ms", cpu / groups * 1000, 1.0, note=note),
        Row(f"controller: memory growth over {groups} groups, MB", growth, 16.0, note="after the first fifth"),
    ]


def watch(sizes: list[int], done: threading.Event) -> None:
    process = psutil.Process()
    while not done.wait(0.5):
        sizes.append(process.memory_info().rss)


def simulate(settings: Settings, job: str) -> None:
    with Simulated(settings, job) as workers:
        while not workers.stopping.is_set():
            time.sleep(0.1)
        time.sleep(1)
    os._exit(0)


def imports() -> list[Row]:
    code = (
        "import time; t=time.perf_counter();"
        "import services.controller.api.app, services.controller.mesh, uvicorn;"
        "s=time.perf_counter()-t;"  # the peak of this program: ru_maxrss would count what it was forked from
        "print(s, int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])/1024)"
    )
    found = [
        tuple(
            map(float, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
        )
        for _ in range(5)
    ]
    seconds, size = sorted(f[0] for f in found)[2], max(f[1] for f in found)
    return [
        Row("controller: importing every module, s", seconds, 2.0),
        Row("controller: resident after the imports, MB", size, 160.0),
    ]


if __name__ == "__main__":
    raise SystemExit(publish("controller", rows(Path(sys.argv[1]).resolve())) > 0)
