"""One line for each event, with what it is about; secrets never; files that do not grow for ever."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.logs import rotate

PROGRAM = """
import logging, structlog
from shared import logs
logs.begin("rollout", worker="w-1")
logs.about(job="j1")
log = logging.getLogger("x")
log.warning("it failed: %s", "two words", extra={"gid": "sorting:0:3#0"})
structlog.contextvars.bind_contextvars(step=7)
try:
    raise ValueError("line one\\nline two")
except ValueError:
    log.exception("broken")
log.info("redis://:hunter2-pass@host:6379 and Authorization: Bearer abcdefghijkl and KEYKEYKEY123")
"""


def test_lines_have_one_format_and_hold_no_secrets() -> None:
    env = os.environ | {"UNIMESH_KEY_JUDGE": "KEYKEYKEY123"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    first, second, third = done.stderr.splitlines()
    for line in (first, second, third):
        assert line.startswith("time=2") and "service=rollout" in line and "job=j1" in line and "worker=w-1" in line
    assert 'level=warning service=rollout event="it failed: two words" job=j1 gid=sorting:0:3#0' in first
    assert "step=7" in second and "ValueError: line one\\nline two" in second
    assert not any(secret in third for secret in ("hunter2", "abcdefghijkl", "KEYKEYKEY123")), third
    assert third.count("***") == 3 and "redis://:***@host:6379" in third


def test_a_full_disk_does_not_hurt_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_text("x" * 100)
    (tmp_path / "a.log.1").write_text("older")

    def full(_: Path, copy: Path) -> None:
        copy.write_text("part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        rotate(tmp_path, most_bytes=50)
    assert {p.name: len(p.read_text()) for p in tmp_path.iterdir()} == {"a.log": 100, "a.log.1": 5}


def test_rotation_keeps_what_writers_write_on(tmp_path: Path) -> None:
    path = tmp_path / "rollout.log"
    with path.open("ab", buffering=0) as writer:
        for number in range(5):
            writer.write(f"{number}".encode() * 100)
            assert rotate(tmp_path, most_bytes=50, kept=3) == [path]
        writer.write(b"new")
    assert path.read_bytes() == b"new" and rotate(tmp_path, most_bytes=50) == []
    kept = {p.name: p.read_bytes()[:1] for p in tmp_path.iterdir() if p != path}
    assert kept == {"rollout.log.1": b"4", "rollout.log.2": b"3", "rollout.log.3": b"2"}
