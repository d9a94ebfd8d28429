"""Children, stop flags and delays."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil

from shared.agent.backoff import Backoff
from shared.agent.process import Child, StopFlag


def test_a_signal_may_set_the_flag_at_any_moment() -> None:
    """A threading.Event deadlocks here within moments: the interrupted thread is inside wait()."""
    flags = [StopFlag() for _ in range(40)]
    current = [flags[0]]
    previous = signal.signal(signal.SIGALRM, lambda *_: current[0].set())
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for flag in flags:
            current[0] = flag
            assert flag.wait(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_wait_ends_by_itself() -> None:
    started = time.monotonic()
    assert not StopFlag().wait(0.25) and 0.2 < time.monotonic() - started < 2


def test_a_child_ends_with_its_whole_group(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); time.sleep(99)"
    )
    child = Child([sys.executable, "-c", code], os.environ, tmp_path / "log")
    deadline = time.monotonic() + 20
    while not (below := psutil.Process(child.pid).children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert below and child.end(grace_s=0.5) != 0
    assert not psutil.wait_procs(below, timeout=5)[1]


def test_delays_double_and_a_healthy_run_starts_over() -> None:
    backoff = Backoff(first=1, most=5, healthy=60)
    assert [backoff.failed(0) for _ in range(4)] == [1, 2, 4, 5] and not backoff.ready
    assert backoff.failed(100) == 1
