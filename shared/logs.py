"""One line for each event, in one format for all services: time, level, service, event, then who and what it is about.

Modules log through `logging`; `extra={"gid": …}` adds a field. What the whole process is about is told once, by `begin` and
`about`. Nothing that could be a secret gets through: see `redacted`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

FIRST = ("time", "level", "service", "event", "job", "step", "gid", "worker")
MOST_BYTES = 16 << 20
KEPT = 3
SECRET_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)", re.I)
"""Environment variables whose values are never written."""
SECRET_TEXTS = (
    (re.compile(r"(://[^:/@\s]*:)[^@/\s]+@"), r"\1***@"),
    (re.compile(r"(bearer\s+)[\w.~+/=-]{8,}", re.I), r"\1***"),
)
_ABOUT: dict[str, str] = {}

Fields = MutableMapping[str, Any]


def begin(service: str, **more: str) -> None:
    """Everything that this process logs goes to its standard error from now on."""
    _ABOUT.clear()
    about(service=service, **more)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _named,
            redacted,
            structlog.processors.LogfmtRenderer(key_order=FIRST, drop_missing=True),
        ],
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def about(**fields: str) -> None:
    """What this process is about from now on: its job, its worker's name."""
    _ABOUT.update({name: value for name, value in fields.items() if value})


def _named(_logger: Any, _method: str, fields: Fields) -> Fields:
    found: Fields = {**_ABOUT, **{name: value for name, value in fields.items() if value is not None}}
    return {name: str(value) for name, value in found.items()}


def redacted(_logger: Any, _method: str, fields: Fields) -> Fields:
    """The values of secret environment variables, bearer tokens, and passwords in URLs become ***."""
    secrets = [value for name, value in os.environ.items() if SECRET_NAMES.search(name) and len(value) >= 8]
    out: Fields = {}
    for name, value in fields.items():
        text = str(value)
        for secret in secrets:
            text = text.replace(secret, "***")
        for pattern, put in SECRET_TEXTS:
            text = pattern.sub(put, text)
        out[name] = text
    return out


def rotate(folder: Path, most_bytes: int = MOST_BYTES, kept: int = KEPT) -> list[Path]:
    """Copies logs that have grown too large to `NAME.1` (older ones to `.2`, …) and empties them; returns which.

    They are emptied in place: whoever writes to them, also a library that prints, holds them open for appending.
    """
    rotated = []
    for path in sorted(folder.glob("*.log")):
        if path.stat().st_size <= most_bytes:
            continue
        copy = path.with_name(f"{path.name}.new")
        try:
            shutil.copyfile(path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        for number in range(kept - 1, 0, -1):
            older = path.with_name(f"{path.name}.{number}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number + 1}"))
        copy.replace(path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
        rotated.append(path)
    return rotated
