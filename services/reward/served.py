"""Which scorers an agent and its child serve, by UNIMESH_SCORERS, and how many devices they want."""

from __future__ import annotations

import os

from shared.config import specs
from shared.config.problems import BadInput

VARIABLE = "UNIMESH_SCORERS"


def served() -> tuple[str, ...]:
    """Names of scorers; without the variable all that need no device. SystemExit names what is none, and the nearest."""
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    try:
        return tuple(
            specs.find("scorer", name, VARIABLE).name for name in named or specs.names("scorer") if named or not _device(name)
        )
    except BadInput as error:
        raise SystemExit(str(error)) from error


def devices(names: tuple[str, ...]) -> int:
    """One, if any of them wants one: they share it."""
    return int(any(_device(name) for name in names))


def _device(name: str) -> bool:
    return bool(specs.find("scorer", name, VARIABLE).flags.get("device"))
