"""The embedded mesh: Redis and the four services as children of one process, started again when they die.

Children die with this process, also when it is killed: the kernel signals them, and each watches its parent.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import httpx

from shared.agent.backoff import Backoff
from shared.agent.devices import list_devices
from shared.agent.process import LABEL, Child, StopFlag
from shared.logs import rotate
from shared.wire.server import RedisServer
from unimesh.home import SCALABLE, Home, hold, read_scale, scale_file


@dataclass(frozen=True)
class Shape:
    """How many agents of each service; `port` 0 takes a free one."""

    rollout: int = 1
    reward: int = 1
    trainer: int = 1
    port: int = 0
    threads: int = 0
    """CPU threads of a child that computes; 0: planned from the cores."""
    score_port: int = 0
    """Of `POST /score`, which the first reward agent answers."""


class PortTaken(RuntimeError):
    """The API's port cannot be used; the message says which and what to do."""


class StateBusy(RuntimeError):
    """Another mesh is up in the state folder."""


MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""For children that compute: glibc keeps the pages of freed tensors. Given back and faulted in again at every step, they cost a
fifth of the demo's training time."""


def plan_threads(cores: int, shape: Shape, overlap: bool = False) -> int:
    """Synchronous phases take all cores in turn; services that overlap share them."""
    workers = shape.rollout + shape.trainer if overlap else max(shape.rollout, shape.trainer)
    return max(1, cores // max(1, workers))


class Part:
    """One supervised child."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], log: Path, service: str = "") -> None:
        """`service`: of an agent."""
        self.name, self.argv, self.env, self.log, self.service = name, argv, env, log, service
        self.backoff, self.restarts = Backoff(), 0
        self.child = Child(argv, env, log)

    def tend(self, say: Callable[[str], None]) -> None:
        """Starts it again after its delay if it has ended."""
        code = self.child.poll()
        if code is None:
            return
        if self.backoff.until < self.child.started:
            delay = self.backoff.failed(time.monotonic() - self.child.started)
            self.child.kill()
            say(f"{self.name} ended with code {code}; starting it again in {delay:.1f} s (see {self.log})")
        if self.backoff.ready:
            self.restarts += 1
            self.child = Child(self.argv, self.env, self.log)


class EmbeddedMesh:
    def __init__(self, state: Path, shape: Shape, roots: tuple[Path, ...] = (), say: Callable[[str], None] = print) -> None:
        self.state, self.shape, self.say = state.resolve(), shape, say
        self.logs = self.state / "logs"
        self.redis = RedisServer(_socket_folder(self.state))
        self.roots = roots
        self.port = 0
        self.score = ""
        self.parts: list[Part] = []
        self.leaving: list[Part] = []
        """Agents that drain, since fewer are wanted."""
        self.stopping = StopFlag()
        self._lock: IO[str] | None = None

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Redis, controller, agents; returns when the API is ready. StateBusy or PortTaken if it cannot be."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock = hold(self.state)
        if self._lock is None:
            raise StateBusy(f"a mesh is already up in {self.state}: `unimesh down` ends it")
        self.port, score_port = _usable_port(self.shape.port), _usable_port(self.shape.score_port)
        self.score = f"127.0.0.1:{score_port}"
        self.redis.start()
        self.say(f"redis      up  {self.redis.url}")
        scale_file(self.state).unlink(missing_ok=True)
        self._add("controller", ["services.controller", "--port", str(self.port)], self._env())
        for service in (*SCALABLE, "trainer"):
            for number in range(getattr(self.shape, service)):
                self._agent(service, number)
        self._wait_ready()
        Home(api=self.api, pid=os.getpid(), redis=self.redis.url, state=str(self.state), score=f"http://{self.score}").write()

    def _env(self) -> dict[str, str]:
        threads = self.shape.threads or plan_threads(os.cpu_count() or 1, self.shape)
        ours = {
            "UNIMESH_REDIS_URL": self.redis.url,
            "UNIMESH_STATE": str(self.state),
            "UNIMESH_ROOTS": os.pathsep.join(map(str, self.roots)),
            "UNIMESH_LOGS": str(self.logs),
            "UNIMESH_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        given = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "UNIMESH_DEVICE_SHARE": str(self._share())}
        return given | dict(os.environ) | ours

    def _share(self) -> int:
        """Agents on one device: where there are fewer devices than agents that want one, these take turns."""
        devices = len(list_devices(os.environ.get("UNIMESH_DEVICES") or "auto"))
        each = os.environ.get("UNIMESH_DEVICE_COUNT", "")
        wanted = (self.shape.rollout + self.shape.trainer) * (int(each) if each.isdigit() else 1)
        return max(1, -(-wanted // devices)) if devices else 1

    def _scale(self) -> None:
        """Starts the agents that are lacking; those that are too many drain beside the work that goes on."""
        self.shape = replace(self.shape, **read_scale(self.state))
        for service in SCALABLE:
            own = [part for part in self.parts if part.service == service]
            wanted = getattr(self.shape, service)
            for number in range(len(own), wanted):
                self._agent(service, number)
                self.say(f"{service}-{number} starts")
            for part in own[wanted:]:
                part.child.terminate()
                self.parts.remove(part)
                self.leaving.append(part)
                self.say(f"{part.name} drains")
        gone = [part for part in self.leaving if part.child.poll() is not None]
        for part in gone:
            part.child.kill()  # what it may have left behind
            self.leaving.remove(part)

    def _agent(self, service: str, number: int) -> None:
        env = self._env()
        own = env if service == "reward" else MALLOC | env
        if service == "reward" and number == 0:
            own = own | {"UNIMESH_SCORE": self.score}
        self._add(service if number == 0 else f"{service}-{number}", [f"services.{service}"], own, service)

    def _add(self, name: str, module: list[str], env: Mapping[str, str], service: str = "") -> None:
        own = dict(env) | {LABEL: name}
        self.parts.append(Part(name, [sys.executable, "-m", *module], own, self.logs / f"{name}.log", service))

    def _wait_ready(self, patience_s: float = 60) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if httpx.get(f"{self.api}/readyz", timeout=2).status_code == 200:
                    self.say(f"controller up  {self.api}")
                    self.say(f"scorers    up  http://{self.score}/score")
                    return
            except httpx.HTTPError:
                pass
            controller = self.parts[0]
            if controller.child.poll() is not None or time.monotonic() > deadline:
                tail = controller.log.read_text(errors="replace")[-800:]
                self.stop()
                raise RuntimeError(f"the controller did not come up:\n{tail}")
            time.sleep(0.05)

    def run(self) -> None:
        """Tends the children until stop is asked for."""
        while not self.stopping.wait(0.5):
            self.tend()

    def tend(self) -> None:
        process = self.redis.process
        if process is not None and process.poll() is not None:
            self.say("redis ended; starting it again")
            self.redis.start()
        for part in self.parts:
            if not self.stopping.is_set():
                part.tend(self.say)
        if not self.stopping.is_set():
            self._scale()
        try:
            rotate(self.logs)
        except OSError as error:  # a full disk: the logs wait
            self.say(f"logs are not rotated: {error}")

    def stop(self) -> None:
        """Everything drains, then ends: agents first, then the controller, Redis last."""
        self.stopping.set()
        if self._lock is None:
            return
        Home.path(self.state).unlink(missing_ok=True)
        agents = [*self.parts[1:], *self.leaving]
        for part in agents:
            part.child.terminate()
        for part in agents:
            part.child.end(grace_s=30)
        for part in self.parts[:1]:
            part.child.end(grace_s=15)
        self.parts.clear()
        self.leaving.clear()
        self.redis.stop()
        if self._lock is not None:
            self._lock.close()

    def kill(self) -> None:
        """At once: a second Ctrl-C."""
        for part in (*self.parts, *self.leaving):
            part.child.kill()
        self.redis.kill()


def install_signals(mesh: EmbeddedMesh) -> None:
    """The first SIGINT or SIGTERM drains, the second ends at once."""

    def handle(*_: object) -> None:
        if mesh.stopping.is_set():
            mesh.say("ending at once")
            mesh.kill()
            os._exit(130)
        mesh.stopping.set()
        mesh.say("draining (again to end at once)")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def _usable_port(wanted: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise PortTaken(f"port {wanted} on 127.0.0.1 is taken: choose another with --port, or 0 for a free one") from error
        port: int = probe.getsockname()[1]
        return port


def _socket_folder(state: Path) -> Path:
    """Redis's folder. Unix sockets have short paths (107 bytes), so a deep state folder is reached through a link."""
    folder = state / "redis"
    if len(str(folder / "redis.sock")) < 100:
        return folder
    import hashlib
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    link = Path(tempfile.gettempdir()) / f"unimesh-{os.getuid()}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if not link.is_symlink() or link.resolve() != folder:
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    return link
