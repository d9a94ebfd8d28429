"""A controller with a crowd: 1,000 registered workers, 10 jobs. CPU a group, memory over 100,000 groups, and answers meanwhile.

The controller is the real process with its API. Workers are simulated in other processes: a thousand registrations that beat,
and for each job and stage one consumer that answers in bulk, as a hundred workers would. The limits of the machine: two shared
cores, of which the simulation takes more than one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import Row
from shared.agent.registry import Worker
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.codec import pack
from shared.wire.keys import WORKERS, worker
from shared.wire.server import RedisServer
from tests.conftest import recipe
from tests.simulated import Simulated

JOBS, CROWD, BATCH = 10, 1000, 64
PROCESSES = 2


def rows(model: Path, groups: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="crowd-") as name:
        server = RedisServer(Path(name) / "redis")
        server.start()
        settings = Settings(server.url, Path(name), (model.parent,), f"dir:{name}/b", 1, None)
        port = free_port()
        controller = subprocess.Popen(
            [sys.executable, "-m", "services.controller", "--port", str(port)],
            env=os.environ | {"UNIMESH_REDIS_URL": server.url, "UNIMESH_STATE": name, "UNIMESH_ROOTS": str(model.parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                return drive(settings, http, psutil.Process(controller.pid), model, groups)
        finally:
            controller.terminate()
            controller.wait(20)
            server.kill()


def drive(settings: Settings, http: httpx.Client, controller: psutil.Process, model: Path, groups: int) -> list[Row]:
    ready(http)
    stop = threading.Event()
    crowd = threading.Thread(target=beat, args=(settings, stop))
    crowd.start()
    changes: dict[str, Any] = {"steps": groups // JOBS // BATCH, "data__batch_size": BATCH, "train__checkpoint_every": 50}
    changes |= {"domain": "async_ar", "schedule": {"max_staleness": 1}, "logging": {"texts": 0}}
    document = recipe(model, **changes)
    jobs = [http.post("/v1/jobs", json={"document": document}).raise_for_status().json()["id"] for _ in range(JOBS)]
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=simulate, args=(settings, jobs[k::PROCESSES])) for k in range(PROCESSES)]
    before, began = sum(controller.cpu_times()[:2]), time.monotonic()
    for process in workers:
        process.start()
    waits: list[float] = []
    sizes: list[int] = []
    left = list(jobs)
    while left:
        for job in list(left):
            asked = time.monotonic()
            view = http.get(f"/v1/jobs/{job}").raise_for_status().json()
            waits.append(time.monotonic() - asked)
            if view["state"] == "done":
                left.remove(job)
            elif view["state"] in ("failed", "cancelled"):
                raise RuntimeError(view["reason"])
            time.sleep(0.05)
        sizes.append(controller.memory_info().rss)
    cpu, wall = sum(controller.cpu_times()[:2]) - before, time.monotonic() - began
    stop.set()
    crowd.join()
    for process in workers:
        process.terminate()
        process.join()
    done = JOBS * (groups // JOBS // BATCH) * BATCH
    settled = sizes[len(sizes) // 5 :]
    slow = statistics.quantiles(waits, n=100)[98] * 1000
    about = f"{CROWD} workers, {JOBS} jobs, {done} groups in {wall:.0f} s"
    return [
        Row("a crowd: controller CPU a group, ms", cpu / done * 1000, 1.0, note=f"{about}; with its API and registry"),
        Row("a crowd: controller memory growth, MB", (settled[-1] - settled[0]) / 2**20, 32.0, note="after the first fifth"),
        Row(
            "a crowd: p99 of GET /v1/jobs/{id}, ms",
            slow,
            100.0,
            note=f"{len(waits)} requests, one after the other; median {statistics.median(waits) * 1000:.0f} ms",
        ),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the controller does not answer")


def beat(settings: Settings, stop: threading.Event) -> None:
    """Registrations as agents keep them."""
    client = connect(settings.redis_url)
    names = [f"rollout-{k}" for k in range(CROWD - 2 * JOBS)] + [f"trainer-{k}" for k in range(JOBS)]
    names += [f"reward-{k}" for k in range(JOBS)]
    components = ("transformers", "grpo", "exact_match", "length")
    while not stop.is_set():
        with client.pipeline(transaction=False) as pipe:
            pipe.sadd(WORKERS, *names)
            for name in names:
                service: Any = name.partition("-")[0]
                found = Worker(name=name, service=service, host="h", pid=1, since=0.0, components=components, beat=time.time())
                pipe.set(worker(name), pack(found), px=30_000)
            pipe.execute()
        stop.wait(5)


def simulate(settings: Settings, jobs: list[str]) -> None:
    with ExitStack() as stack:
        for worlds in [stack.enter_context(Simulated(settings, job)) for job in jobs]:
            worlds.stopping.wait()
        time.sleep(1)
    os._exit(0)
