"""What agents' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sleepers say what they see."""
    found = tmp_path / "sleepers"
    found.mkdir()
    monkeypatch.setenv("SLEEPER", str(found))
    return found
