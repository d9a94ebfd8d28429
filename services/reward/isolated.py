"""A scorer in a process of its own: it may hang, print, leak or crash, and only its message is touched.

Frames on the pipes are a 4-byte length and MessagePack. Run as `python -m services.reward.isolated`.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from services.reward.verdict import failed, verdict
from shared.agent.process import PARENT, guard_parent
from shared.types.rewards import RewardRequest, RewardResponse
from shared.wire import codec

START_S = 120.0
"""Longest time for the scorer's imports."""


class ScorerTimeout(Exception):
    """The process did not answer in time, or ended."""


class IsolatedScorer:
    """The near side: starts the process when it is needed, and again after it was killed."""

    def __init__(self, name: str, params: dict[str, Any], timeout_s: float) -> None:
        self.name, self.params, self.timeout_s = name, params, timeout_s
        self.process: subprocess.Popen[bytes] | None = None

    def score(self, rows: Sequence[RewardRequest]) -> RewardResponse:
        """All rows fail if the process hangs beyond the time-out or dies."""
        try:
            if self.process is None:
                self._start()
            answer = self._ask(codec.encode(list(rows)), self.timeout_s)
            return msgspec.msgpack.decode(answer, type=RewardResponse)
        except (ScorerTimeout, OSError, msgspec.DecodeError) as error:
            self.close()
            return failed(len(rows), f"scorer {self.name}: {error}")

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.reward.isolated"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k != "UNIMESH_TOKEN"} | {PARENT: str(os.getpid())},
            start_new_session=True,
        )
        ready = msgspec.msgpack.decode(self._ask(msgspec.msgpack.encode([self.name, self.params]), START_S))
        if ready != "ready":
            raise ScorerTimeout(str(ready))

    def _ask(self, frame: bytes, timeout_s: float) -> bytes:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        _send(self.process.stdin, frame)
        deadline = time.monotonic() + timeout_s
        (size,) = struct.unpack("<I", self._receive(4, deadline, timeout_s))
        return self._receive(size, deadline, timeout_s)

    def _receive(self, size: int, deadline: float, timeout_s: float) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        descriptor, out = self.process.stdout.fileno(), bytearray()
        while len(out) < size:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise ScorerTimeout(f"no answer within {timeout_s:g} s")
            piece = os.read(descriptor, size - len(out))
            if not piece:
                raise ScorerTimeout(f"its process ended with code {self.process.wait()}")
            out += piece
        return bytes(out)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _send(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(struct.pack("<I", len(frame)) + frame)
    pipe.flush()


def main() -> None:
    """The far side: one frame that names the scorer, then one frame of rows at a time."""
    guard_parent()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the scorer prints must not land among the frames
    source = sys.stdin.buffer

    def read() -> bytes | None:
        head = source.read(4)
        return source.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None

    first = read()
    if first is None:
        return
    name, params = msgspec.msgpack.decode(first)
    try:
        from services.reward.scorers import load

        scorer = load(name, params)
    except Exception as error:  # the scorer's module is foreign code; the near side reports it
        _send(out, msgspec.msgpack.encode(f"{type(error).__name__}: {error}"))
        return
    _send(out, msgspec.msgpack.encode("ready"))
    while (frame := read()) is not None:
        rows = codec.decode(frame, list[RewardRequest])
        _send(out, msgspec.msgpack.encode(verdict(scorer.score, rows)))


if __name__ == "__main__":
    main()
