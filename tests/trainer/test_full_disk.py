"""A disk that is full for a while: everybody says so and waits; nothing is lost, and it goes on by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shared import files
from shared.config.settings import Settings
from shared.files import no_space
from tests.trainer.full_disk import train
from tests.trainer.test_crash import Held


@pytest.mark.parametrize(("who", "words"), [("trainer", "goes on by itself"), ("rollout.policy", "does not fit below")])
def test_a_job_goes_on_when_there_is_space_again(
    redis_url: str, model_folder: Path, tmp_path: Path, who: str, words: str
) -> None:
    """On a real file system of 4 MiB, in a mount namespace of its own."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel gives no mount namespaces to users")
    program = f'mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec "$@"'
    command = [sys.executable, "-m", "tests.trainer.full_disk", redis_url, str(tmp_path), str(model_folder), who]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", program, "sh", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert words in dict(found["said"])[who]
    assert found["stalled"][0] == found["stalled"][1] < found["ended"] == 12


def test_the_controller_waits_and_makes_its_step_again(
    settings: Settings, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PAUSE_S", 0.1)
    job = Held(settings, model_folder, every=4)
    plain, calls = job.runner.writer.writes, count()

    def writes(*args: Any) -> Any:
        if next(calls) in (5, 6, 11):
            raise OSError(28, "No space left on device")
        return plain(*args)

    monkeypatch.setattr(job.runner.writer, "writes", writes)
    trainer = threading.Thread(target=train, args=(settings, job.name), daemon=True)
    with job:
        trainer.start()
        job.check()
        trainer.join(10)
    notes = [fields[b"text"].decode() for _, fields in job.runner.client.xrange(job.runner.keys.events)]
    assert len([n for n in notes if n.startswith("controller: no space left")]) == 1


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(122, "Disk quota exceeded"), True),
        (RuntimeError("IoError(Os { code: 28, kind: StorageFull, message: ... })"), True),
        (OSError(2, "No such file"), False),
        (ValueError("full"), False),
    ],
)
def test_what_a_full_disk_looks_like(error: Exception, full: bool) -> None:
    assert no_space(error) is full
