"""Where prompts come from. A source answers any row by its number, so a saved cursor is exact."""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from shared.config import builtin, specs
from shared.config.problems import BadInput, Problem, bad
from shared.config.sections import Component
from shared.config.settings import Settings


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    prompt: str | list[dict[str, Any]]
    """Text, or messages for a chat template."""
    target: str | None = None
    """What to imitate (sft); None where there is nothing to imitate."""
    metadata: dict[str, Any] = {}


class Source(Protocol):
    @property
    def size(self) -> int | None:
        """Records in an epoch; None: it never ends."""
        ...

    @property
    def shuffle(self) -> bool: ...

    def get(self, row: int) -> Record: ...


class JsonlSource:
    """One JSON object a line. Opening reads every line once: a broken one is named before anything starts."""

    def __init__(self, params: builtin.Jsonl, path: Path) -> None:
        self.params, self.path, self.shuffle = params, path, params.shuffle
        self.offsets = self._checked()
        self.file = path.open("rb")

    @property
    def size(self) -> int:
        return len(self.offsets)

    def get(self, row: int) -> Record:
        self.file.seek(int(self.offsets[row]))
        return self._record(self.file.readline(), row + 1)

    def _checked(self) -> np.ndarray[Any, Any]:
        offsets, seen, position = [], set(), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    record = self._record(line, number)
                    if (name := record.metadata.get("id")) in seen and self.params.id:
                        raise self._bad(number, name, f"the id in field {self.params.id!r} stands twice", "unique ids")
                    seen.add(name if self.params.id else number)
                    offsets.append(position)
                position += len(line)
        if not offsets:
            raise bad("data.source.params.path", str(self.path), "the file holds no records")
        return np.asarray(offsets, np.int64)

    def _record(self, line: bytes, number: int) -> Record:
        try:
            value = json.loads(line)  # the standard reader keeps lone surrogates, so that they can be named
        except ValueError as error:
            raise self._bad(number, line[:80].decode(errors="replace"), f"not valid JSON: {error}", "one object") from error
        if not isinstance(value, dict):
            raise self._bad(number, type(value).__name__, "not an object", "one JSON object a line")
        prompt = value.get(self.params.prompt)
        if not isinstance(prompt, str | list) or not prompt:
            shown = None if prompt is None else repr(prompt)[:80]
            raise self._bad(number, shown, f"field {self.params.prompt!r} holds no prompt", "text or messages, not empty")
        target = value.get(self.params.target) if self.params.target else None
        if self.params.target and not isinstance(target, str):
            raise self._bad(number, target, f"field {self.params.target!r} holds no target text", "text")
        rest = {k: v for k, v in value.items() if k not in (self.params.prompt, self.params.target)}
        if self.params.id:
            if self.params.id not in value:
                raise self._bad(number, None, f"field {self.params.id!r} is missing", "a unique id")
            rest["id"] = value[self.params.id]
        _check_text([prompt, target, rest], lambda what: self._bad(number, None, what, "valid Unicode text"))
        return Record(prompt=prompt, target=target, metadata=rest)

    def _bad(self, number: int, value: Any, message: str, legal: str) -> BadInput:
        return BadInput([Problem(field=f"{self.path.name} line {number}", value=value, message=message, legal=legal)])


class SortingSource:
    """The demo's task: `582013>` → `012358`. Row k is drawn by a generator of its own."""

    shuffle = False

    def __init__(self, params: builtin.Sorting) -> None:
        self.params = params

    @property
    def size(self) -> int | None:
        return self.params.size

    def get(self, row: int) -> Record:
        p = self.params
        rng = random.Random(f"{p.seed}:{p.split}:{row}")
        while True:
            digits = "".join(rng.choice(string.digits) for _ in range(p.digits))
            prompt = f"{digits}>"
            if (zlib.crc32(prompt.encode()) % 10 == 0) == (p.split == "held_out"):
                break
        answer = "".join(sorted(digits))
        return Record(prompt=prompt, target=self._demonstration(digits, answer, rng), metadata={"answer": answer})

    def _demonstration(self, digits: str, right: str, rng: random.Random) -> str:
        draw = rng.random()
        if draw < self.params.right:
            return right
        return right[1:] + right[0] if draw < self.params.right + self.params.rotated else digits


class ReasoningGymSource:
    """A procedural data set of reasoning-gym; the entry travels in the metadata so that its own grader can score."""

    shuffle = False

    def __init__(self, params: builtin.ReasoningGymSource) -> None:
        self.params = params

    @property
    def size(self) -> int:
        return self.params.size

    @cached_property
    def dataset(self) -> Any:
        import reasoning_gym

        p = self.params
        try:
            return reasoning_gym.create_dataset(p.dataset, size=p.size, seed=p.seed, **p.config)
        except (ValueError, TypeError, AssertionError) as error:
            raise bad("data.source.params", p.dataset, f"reasoning-gym refused it: {error}") from error

    def get(self, row: int) -> Record:
        entry = self.dataset[row]
        plain = msgspec.json.decode(msgspec.json.encode(entry, enc_hook=str))
        return Record(
            prompt=entry["question"],
            target=str(entry["answer"]),
            metadata={"answer": str(entry["answer"]), "dataset": self.params.dataset, "entry": plain},
        )


def open_source(component: Component, settings: Settings, at: str) -> Source:
    """BadInput names the field, or the line of the file."""
    params = specs.check("source", component.name, component.params, at)
    if isinstance(params, builtin.Jsonl):
        return JsonlSource(params, settings.allowed(params.path, f"{at}.params.path"))
    if isinstance(params, builtin.ReasoningGymSource):
        source = ReasoningGymSource(params)
        source.dataset  # noqa: B018  (a wrong name or config is an error now, not in the middle of a run)
        return source
    return SortingSource(params)


def _check_text(values: list[Any], error: Callable[[str], BadInput]) -> None:
    """Lone surrogates (half of a cut emoji) cannot be encoded by any tokenizer."""
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as problem:
                raise error(f"text with a lone surrogate at character {problem.start}") from problem
        elif isinstance(value, dict):
            _check_text([*value.keys(), *value.values()], error)
        elif isinstance(value, list):
            _check_text(value, error)
