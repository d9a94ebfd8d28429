"""Data sets by name: the library itself, in a process of its own, against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controller.hub import Hub

ROWS = [{"question": f"{i}>", "answer": str(i)} for i in range(7)]
PROGRAM = """
import json, sys
from pathlib import Path
from services.controller.data.sources import open_source
from shared.config.problems import BadInput
from shared.config.sections import Component
from shared.config.settings import Settings

state = Path(sys.argv[1])
settings = Settings("redis://unused", state, (state,), f"dir:{state}", 1, None)
params = json.loads(sys.argv[2])
try:
    source = open_source(Component(name="hub", params=params), settings, "data.source")
    rows = [source.get(i) for i in json.loads(sys.argv[3])]
except BadInput as error:
    print(json.dumps({"error": str(error)}))
else:
    found = [[r.prompt, r.metadata] for r in rows]
    print(json.dumps({"rows": found, "size": source.size, "fingerprint": source.fingerprint}))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    found = Hub("owner/sums", ROWS)
    yield found
    found.close()


def load(hub: Hub, folder: Path, rows: list[int], **params: Any) -> dict[str, Any]:
    env = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder / "home"),
        "HF_DATASETS_OFFLINE": "0",
    }
    wanted = json.dumps({"name": "owner/sums", "prompt": "question"} | params)
    command = [sys.executable, "-c", PROGRAM, str(folder), wanted, json.dumps(rows)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_by_their_number(hub: Hub, tmp_path: Path, streaming: bool) -> None:
    """A stream is read forwards; what was drawn lately, and what lies behind its end, can be had as well."""
    wanted = [0, 3, 6, 2, 9] if streaming else [0, 3, 6, 2]
    found = load(hub, tmp_path, wanted, streaming=streaming)
    assert found["size"] == (None if streaming else 7)
    assert found["rows"] == [[ROWS[i % 7]["question"], {"answer": ROWS[i % 7]["answer"]}] for i in wanted]
    again = load(hub, tmp_path, wanted, streaming=streaming)
    assert again == found


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"name": "owner/none"}, ["data.source.params.name", "owner/none", "cannot be loaded"]),
        ({"split": "test"}, ["cannot be loaded", "test"]),
        ({"prompt": "qestion"}, ["row 1", "did you mean 'question'"]),
        ({"name": "tests/controller"}, ["also a folder here"]),
        ({"name": "../etc"}, ["data.source.params.name"]),
    ],
    ids=["name", "split", "column", "folder", "path"],
)
def test_what_cannot_be_had_is_said(hub: Hub, tmp_path: Path, params: dict[str, Any], words: list[str]) -> None:
    error = load(hub, tmp_path, [0], **params)["error"]
    assert all(word in error for word in words), error
