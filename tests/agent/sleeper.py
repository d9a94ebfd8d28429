"""A child for tests of agents: says what it sees, then shows progress until it is told to get stuck (SIGUSR1)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from shared.agent.health import show_progress
from shared.agent.process import guard_parent


def main() -> None:
    guard_parent()
    stuck: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: stuck.append(1))
    drains = "SLEEPER_DRAINS" in os.environ
    signal.signal(signal.SIGTERM, lambda *_: None if drains else os._exit(0))
    show_progress(lambda: not stuck)
    folder = Path(os.environ["SLEEPER"])
    (folder / f".{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    (folder / f".{os.getpid()}").rename(folder / str(os.getpid()))
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
