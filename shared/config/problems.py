"""Errors about input: the field, the value, what is legal, and the nearest legal name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import pydantic

M = TypeVar("M", bound=pydantic.BaseModel)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    field: str
    """Dotted path, or a place such as `data.jsonl line 7`."""
    value: Any = None
    message: str = ""
    legal: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}"
        if self.value is not None:
            text += f" (got {self.value!r})"
        if self.legal:
            text += f"; legal: {self.legal}"
        return text + (f"; did you mean {self.nearest!r}?" if self.nearest else "")


class BadInput(ValueError):
    """Something that a person wrote cannot be used. Nothing was started or lost."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, problems)))


def bad(field: str, value: Any, message: str, legal: str = "") -> BadInput:
    return BadInput([Problem(field=field, value=value, message=message, legal=legal)])


def nearest(word: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(names), 1, 0.5)
    return found[0] if found else ""


def unknown(field: str, value: str, names: Iterable[str], what: str = "unknown name") -> BadInput:
    legal = sorted(names)
    problem = Problem(field=field, value=value, message=what, legal=", ".join(legal), nearest=nearest(value, legal))
    return BadInput([problem])


def validated(model: type[M], value: Any, at: str = "") -> M:
    """The value as the model; BadInput lists every problem with its path."""
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise BadInput([_problem(model, e, at) for e in error.errors()]) from error


def _problem(model: type[pydantic.BaseModel], error: Any, at: str) -> Problem:
    path = [str(p) for p in error["loc"]]
    field = ".".join(([at] if at else []) + path) or "document"
    if error["type"] == "extra_forbidden":
        names = _fields_at(model, path[:-1])
        return Problem(field=field, message="unknown key", legal=", ".join(sorted(names)), nearest=nearest(path[-1], names))
    value = error.get("input")
    shown = None if error["type"] == "missing" or isinstance(value, dict | list) else value
    return Problem(field=field, value=shown, message=error["msg"].removeprefix("Value error, "))


def _fields_at(model: type[pydantic.BaseModel], path: Sequence[str]) -> list[str]:
    current: Any = model
    for name in path:
        info = None if current is None else current.model_fields.get(name)
        if info is None:
            return []
        kinds = [info.annotation, *(getattr(info.annotation, "__args__", None) or ())]
        current = next((k for k in kinds if isinstance(k, type) and issubclass(k, pydantic.BaseModel)), None)
    return list(current.model_fields) if current is not None else []
