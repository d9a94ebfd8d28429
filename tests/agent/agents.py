"""Real agents in threads, with a child that does nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from shared.agent.agent import Agent
from shared.agent.devices import Lister
from shared.config.settings import Settings


def make(settings: Settings, lister: Lister | None = None, service: Any = "rollout", assigned: bool = False) -> Agent:
    return Agent(service, settings, "tests.agent.sleeper", assigned=assigned, lister=lister or (lambda: []))


@contextmanager
def running(*agents: Agent) -> Iterator[None]:
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for agent in agents:
            agent.stopping.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)


def soon(check: Callable[[], Any], patience_s: float = 30) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


def seen(agent: Agent, folder: Path) -> str | None:
    """The devices that its child sees, once that is up."""
    child = agent.child
    path = folder / str(child.pid) if child is not None else None
    return path.read_text() if path is not None and path.exists() else None


def gone(pid: int) -> bool:
    try:  # one question: between two, the process may go
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
