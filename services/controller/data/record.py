"""Where prompts come from. A source answers any row by its number, so a saved cursor is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import xxhash


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    prompt: str | list[dict[str, Any]]
    """Text, or messages for a chat template."""
    target: str | None = None
    """What to imitate (sft); None where there is nothing to imitate."""
    conversation: bool = False
    """The prompt is a whole conversation, whose assistant is to be imitated (sft)."""
    picture: str | None = None
    """Path of a picture to imitate (sft of a model that makes pictures)."""
    reference: str | None = None
    """Path of the picture that the prompt is about (image to image, image to video)."""
    metadata: dict[str, Any] = {}


class Source(Protocol):
    @property
    def size(self) -> int | None:
        """Records in an epoch; None: it never ends."""
        ...

    @property
    def shuffle(self) -> bool: ...

    @property
    def fingerprint(self) -> str:
        """Of everything that decides what the rows are: another one is other data."""
        ...

    def get(self, row: int) -> Record: ...


def fingerprint_of(params: Any, *more: str) -> str:
    """Of a source that its parameters decide, and `more` (digests of files)."""
    text = "|".join([type(params).__name__, params.model_dump_json(), *more])
    return xxhash.xxh3_64_hexdigest(text.encode())


def check_text(values: list[Any], error: Callable[[str], Exception]) -> None:
    """Lone surrogates (half of a cut emoji) cannot be encoded by any tokenizer."""
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as problem:
                raise error(f"text with a lone surrogate at character {problem.start}") from problem
        elif isinstance(value, dict):
            check_text([*value.keys(), *value.values()], error)
        elif isinstance(value, list):
            check_text(value, error)
