"""Components by name: what can be said of a component without importing it.

A spec holds a component's pydantic parameters and declared flags, and no torch; the implementation of the same name lives in
its service. Packages add their own through the entry-point group `unimesh.specs`: each entry point is a callable that returns
a list of specs, and a spec of one's own scorer, engine or algorithm names its implementation by `entry_point`: what is called
as the built-in ones are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from typing import Any, Literal, TypeVar

import pydantic

from shared.config import builtin
from shared.config.problems import unknown, validated

T = TypeVar("T")
Kind = Literal["algorithm", "scorer", "engine", "source", "tracker", "family"]


@dataclass(frozen=True)
class Spec:
    kind: Kind
    name: str
    params: type[pydantic.BaseModel]
    summary: str
    flags: dict[str, Any] = field(default_factory=dict)
    """Declared facts: an algorithm's contract, a scorer's needs."""
    entry_point: str | None = None
    """`package.module:object` of the implementation of a component from outside; only installed packages declare it."""


ENTRY_POINTS = "unimesh.specs"


@cache
def registry() -> dict[tuple[str, str], Spec]:
    """Every known spec. ValueError if a name stands twice."""
    found: dict[tuple[str, str], Spec] = {}
    for spec in _all():
        if (spec.kind, spec.name) in found:
            raise ValueError(f"two specs are named {spec.kind} {spec.name}")
        found[spec.kind, spec.name] = spec
    return found


def _all() -> Iterable[Spec]:
    for kind, name, params, summary, flags in builtin.TABLE:
        yield Spec(kind, name, params, summary, flags)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        yield from point.load()()


def find(kind: Kind, name: str, at: str) -> Spec:
    """BadInput names the field and the nearest legal name."""
    spec = registry().get((kind, name))
    if spec is None:
        raise unknown(at, name, names(kind), f"unknown {kind}")
    return spec


def implementation(kind: Kind, name: str, known: Mapping[str, T]) -> T:
    """What stands under the name among the known ones, or what the spec of an installed package points to, imported.

    LookupError for a spec without either.
    """
    spec = find(kind, name, kind)
    if spec.entry_point is None:
        if name not in known:
            raise LookupError(f"{kind} {name!r} has a spec but no implementation")
        return known[name]
    module, _, attribute = spec.entry_point.partition(":")
    found: T = vars(import_module(module))[attribute]
    return found


def names(kind: Kind) -> list[str]:
    return sorted(n for k, n in registry() if k == kind)


def check(kind: Kind, name: str, params: Any, at: str) -> Any:
    """The component's validated parameters."""
    return validated(find(kind, name, f"{at}.name").params, params or {}, f"{at}.params")
