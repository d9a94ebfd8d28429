"""Child processes that never outlive their parent, and that are ended as whole groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl
LABEL = "UNIMESH_LABEL"
"""Environment: what an agent is called among those of its host; its child's log bears the name."""
PARENT = "UNIMESH_PARENT"
"""Environment: the pid of the process that started this one."""


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends. For a child, before its program starts."""
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def guard_parent() -> None:
    """In a service's main: as die_with_parent, also if the parent was gone before, and also if it is only re-parented.

    The kernel's signal follows the parent's *thread*, so a watch on the parent's pid stands beside it.
    """
    wanted = os.environ.get(PARENT)
    if wanted is None:
        return
    die_with_parent()

    def watch() -> None:
        while os.getppid() == int(wanted):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


SWITCH_S = 0.0005


def take_turns() -> None:
    """Threads of this process that compute take turns often: what is waited for is not held up by what is not."""
    sys.setswitchinterval(SWITCH_S)


class StopFlag:
    """What a signal handler may set. A threading.Event may not be: the thread that the signal interrupts may be inside wait()
    and hold the lock that set() needs, and then both wait for ever.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set, after at most `timeout_s` seconds; notices within a tenth of a second."""
        deadline = time.monotonic() + timeout_s
        while not self._set and (rest := deadline - time.monotonic()) > 0:
            time.sleep(min(0.1, rest))
        return self._set


class Child:
    """One child process in a process group of its own; `end` ends the group."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path | None, pipe: bool = False) -> None:
        self.argv = list(argv)
        out = log.open("ab") if log is not None else None
        self.process = subprocess.Popen(
            self.argv,
            env=dict(env) | {PARENT: str(os.getpid())},
            stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            start_new_session=True,
        )
        if out is not None:
            out.close()
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def send(self, line: bytes) -> bool:
        """Writes to its standard input; False if it is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def terminate(self) -> None:
        """SIGTERM to the child itself, which drains."""
        if self.process.poll() is None:
            self.process.terminate()

    def end(self, grace_s: float) -> int:
        """SIGTERM, then after the grace period SIGKILL to its whole group. Returns the exit code."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()
        return self.process.wait()

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.poll()
