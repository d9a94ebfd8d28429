"""Reads golden vectors from UNIMESH_GOLDEN (default: the copy beside the tests)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(os.environ.get("UNIMESH_GOLDEN", Path(__file__).parent / "golden"))


@dataclass(frozen=True)
class Case:
    """One case: parameters, input and output arrays, expected JSON values."""

    id: str
    function: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    expect: dict[str, Any]
    raises: str | None
    rtol: float
    atol: float
    check: str

    def close(self, found: Any, wanted: Any, rtol: float | None = None, atol: float | None = None) -> None:
        if self.check == "none":
            return
        found = np.asarray(found, np.float64)
        if self.check == "finite_only":
            assert np.isfinite(found).all()
            return
        np.testing.assert_allclose(found, numbers(wanted), rtol=rtol or self.rtol, atol=atol or self.atol, equal_nan=True)


def numbers(value: Any) -> Any:
    """Expected values with `nan`, `inf` and `-inf` as floats."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return value


def cases(topic: str, *functions: str) -> list[Any]:
    """The topic's cases of these functions as pytest parameters. At least one must exist."""
    document = json.loads((FOLDER / f"{topic}.json").read_text(encoding="utf-8"))
    arrays = np.load(FOLDER / document["arrays"], allow_pickle=False) if document.get("arrays") else {}

    def load(entry: Any) -> Any:
        return None if entry is None else arrays[entry["key"]]

    found = []
    for raw in document["cases"]:
        if raw["function"] not in functions:
            continue
        tolerance = raw.get("tolerance", document["tolerance"])
        case = Case(
            id=raw["id"],
            function=raw["function"],
            params=raw["params"],
            inputs={k: load(v) for k, v in raw["in"].items()},
            outputs={k: load(v) for k, v in raw["out"].items()},
            expect=raw.get("expect", {}),
            raises=raw.get("raises"),
            rtol=float(tolerance.get("rtol", 2e-5)),
            atol=float(tolerance.get("atol", 5e-6)),
            check=tolerance.get("check", raw.get("check", "")),
        )
        found.append(pytest.param(case, id=f"{raw['id']}-{raw['name']}"[:60]))
    assert found, f"no cases of {functions} in {topic}"
    return found


def same_float(found: float, wanted: Any) -> bool:
    value = numbers(wanted)
    return (math.isnan(found) and math.isnan(value)) or math.isclose(found, value, rel_tol=2e-5, abs_tol=5e-6)
