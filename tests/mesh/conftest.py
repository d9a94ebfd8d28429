"""A real mesh on this machine, started by its command, for all tests of a process that need no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import xxhash

from shared.weights.store import WeightStore
from unimesh.home import Home


class Mesh:
    """`unimesh up` in a process of its own."""

    def __init__(self, state: Path, root: Path, *flags: str, lease_s: float = 3.0, **variables: str) -> None:
        self.state = state
        env = os.environ | {"UNIMESH_LEASE_S": str(lease_s)} | variables
        command = [
            sys.executable,
            "-m",
            "unimesh.cli",
            "up",
            "--state",
            str(state),
            "--root",
            str(root),
            "--port",
            "0",
            *flags,
        ]
        self.log = state.with_suffix(".log")
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + 60
        while (home := Home.read(state)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self.log.read_text())
            time.sleep(0.05)
        self.home = home
        self.http = httpx.Client(base_url=home.api, timeout=60)

    def get(self, path: str, **query: Any) -> Any:
        """Patient: the controller may have been killed a moment ago."""
        deadline = time.monotonic() + 40
        while True:
            try:
                answer = self.http.get(path, params=query)
                if answer.status_code < 500:
                    return answer.json()
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"no answer to {path}: {self.log.read_text()}")
            time.sleep(0.1)

    def submit(self, document: dict[str, Any]) -> str:
        answer = self.http.post("/v1/jobs", json={"document": document})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def until(self, job: str, check: Any, patience: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            view: dict[str, Any] = self.get(f"/v1/jobs/{job}")
            if check(view):
                return view
            assert view["state"] not in ("failed", "cancelled"), (view, self.log.read_text())
            time.sleep(0.02)
        self.http.post(f"/v1/jobs/{job}/cancel")  # the next job need not wait for it
        raise AssertionError((view, self.log.read_text()))

    def done(self, job: str) -> dict[str, Any]:
        return self.until(job, lambda view: view["state"] == "done")

    def worker(self, service: str) -> dict[str, Any]:
        """The registration of the live worker of a service that has a child."""
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            for worker in self.get("/v1/workers"):
                if worker["service"] == service and worker["child"] and psutil.pid_exists(worker["child"]):
                    return dict(worker)
            time.sleep(0.1)
        raise AssertionError(f"no live {service}")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def fingerprint(self, job: str, version: int) -> str:
        """Of the parameters, in the history that went on."""
        store = WeightStore(self.state / "jobs" / job / "weights", "policy")
        [shard] = store.open(int(self.get(f"/v1/jobs/{job}")["incarnation"]), version)
        return xxhash.xxh3_64_hexdigest(shard.read_bytes())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(90)


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Mesh]:
    found = Mesh(tmp_path_factory.mktemp("mesh") / "state", model_folder.parent)
    yield found
    assert found.stop() == 0
