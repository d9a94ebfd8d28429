"""A compose project of the tests' own: the commands of docs/deploy.md, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "deploy.md"
ENGINE = ROOT / "tests" / "compose" / "engine.sh"
TAG = "test"
BASE, REDIS = f"unimesh-base:{TAG}", f"unimesh-redis:{TAG}"
TOKEN = "a-token-of-the-tests-0123456789"


def commands(mark: str = "sh") -> list[str]:
    """The lines of the guide's blocks of one kind."""
    blocks = re.findall(rf"^```{mark}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def engine_environment() -> dict[str, str]:
    """Of an engine that is up: one that answers already, or a private one, which stays for the next run."""
    subprocess.run([str(ENGINE), "start"], check=True)
    said = subprocess.run([str(ENGINE), "env"], check=True, capture_output=True, text=True).stdout
    env = dict(os.environ)
    if said:
        env["DOCKER_HOST"] = said.strip().removeprefix("export DOCKER_HOST=")
    return env


def base_images(env: dict[str, str]) -> dict[str, str]:
    """The images that everything is built from: those that the environment names, or stand-ins."""
    if "BASE_IMAGE" in env and "REDIS_IMAGE" in env:
        return env
    subprocess.run([str(ROOT / "tests/compose/base_images.sh"), BASE, REDIS], env=env, check=True)
    return env | {"BASE_IMAGE": BASE, "REDIS_IMAGE": REDIS}


class Deployment:
    """One project. Its commands run in `folder`, which stands in for a checkout: .env is its own."""

    def __init__(self, folder: Path, name: str, env: dict[str, str]) -> None:
        self.folder, self.name, self.port = folder, name, _free_port()
        self.ran: list[str] = []
        ours = {"COMPOSE_PROJECT_NAME": name, "UNIMESH_TAG": TAG}
        self.env = {k: v for k, v in env.items() if not k.startswith(("UNIMESH_", "COMPOSE_"))} | ours
        for path in ("compose.yaml", ".env.example", "deploy", "build", "Makefile", ".venv"):
            (folder / path).symlink_to(ROOT / path)
        v2 = subprocess.run(["docker", "compose", "version"], env=env, capture_output=True, check=False).returncode == 0
        self.compose = "docker compose" if v2 else "docker-compose"
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=30, headers={"Authorization": f"Bearer {TOKEN}"}
        )

    def run(self, command: str, expect: int = 0, **names: str) -> str:
        """A command of the guide, its `names` (such as JOB) filled in; returns what it printed."""
        assert command in commands(), f"not in {GUIDE.name}: {command}"
        self.ran.append(command)
        for name, value in names.items():
            command = command.replace(name, value)
        if command.startswith("make"):
            done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=self.env, capture_output=True, text=True, check=False)
        else:
            words = command.replace("docker compose", self.compose)
            done = subprocess.run(
                ["bash", "-c", words], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
            )
        assert done.returncode == expect, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def set(self, **values: str) -> None:
        """Edits .env as a person would."""
        path = self.folder / ".env"
        text = path.read_text()
        for name, value in values.items():
            text, count = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
            assert count == 1, name
        path.write_text(text)

    def docker(self, *words: str, errors: bool = False) -> str:
        done = subprocess.run(["docker", *words], env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"docker {words}: {done.stderr}"
        return (done.stdout + done.stderr if errors else done.stdout).strip()

    def containers(self, service: str = "", running: bool = True) -> list[str]:
        filters = [f"label=com.docker.compose.project={self.name}"]
        filters += [f"label=com.docker.compose.service={service}"] if service else []
        words = [word for f in filters for word in ("--filter", f)]
        return self.docker("ps", "--quiet", *([] if running else ["--all"]), *words).split()

    def state(self, container: str) -> dict[str, Any]:
        return dict(json.loads(self.docker("inspect", "--format", "{{json .State}}", container)))

    def left(self) -> list[str]:
        """Containers, networks and volumes of the project that are still there."""
        own = ("--filter", f"label=com.docker.compose.project={self.name}", "--quiet")
        found = [self.docker("ps", "--all", *own), self.docker("network", "ls", *own), self.docker("volume", "ls", *own)]
        return [line for text in found for line in text.split()]

    # the published API ----------------------------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Any:
        """Patient: a container may just have been killed."""
        return until(lambda: self._answer(path, query), 90, path)

    def _answer(self, path: str, query: dict[str, Any]) -> Any:
        try:
            answer = self.http.get(path, params=query)
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code < 500 else None

    def launch(self, recipe: str, *overrides: str) -> str:
        answer = self.http.post("/v1/jobs", json={"recipe": recipe, "overrides": list(overrides)})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/v1/jobs/{job}")
        return found

    def reaches(self, job: str, step: int, patience_s: float = 180) -> dict[str, Any]:
        """The job's view once it has trained so many steps."""

        def there() -> dict[str, Any] | None:
            view = self.job(job)
            assert view["state"] not in ("failed", "cancelled"), (view, self.logs())
            return view if view["step"] >= step or view["state"] == "done" else None

        return dict(until(there, patience_s, f"step {step} of {job}", lambda: f"{self.job(job)}\n{self.logs()}"))

    def done(self, job: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            view = self.job(job)
            assert view["state"] not in ("failed", "cancelled"), (view, self.logs())
            return view if view["state"] == "done" else None

        return dict(until(there, 300, f"the end of {job}", lambda: f"{self.job(job)}\n{self.logs()}"))

    def workers(self, service: str) -> list[dict[str, Any]]:
        return [w for w in self.get("/v1/workers") if w["service"] == service]

    def wait_up(self) -> None:
        """Every service has an agent that works or waits for a job."""
        for service in ("rollout", "reward", "trainer"):
            until(partial(self.workers, service), 120, f"a {service}", self.logs)

    def logs(self) -> str:
        words = [*self.compose.split(), "logs", "--no-color", "--tail", "40"]
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout[-12000:]

    def remove(self) -> None:
        """Whatever happened: nothing of the project stays."""
        words = [*self.compose.split(), "down", "-v", "--remove-orphans", "--timeout", "5"]
        every = self.env | {"COMPOSE_PROFILES": "cpu,gpu,scorers,observe", "UNIMESH_TOKEN": TOKEN}
        subprocess.run(words, cwd=self.folder, env=every, capture_output=True, check=False)


def until(check: Callable[[], Any], patience_s: float, what: str, detail: Callable[[], str] = lambda: "") -> Any:
    """What `check` finds, once it finds something."""
    deadline = time.monotonic() + patience_s
    while not (found := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {patience_s:.0f} s\n{detail()}")
        time.sleep(0.3)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
