"""The components that UniMesh brings: one row each. Adding one is a parameter model, a row here, and its implementation."""

from __future__ import annotations

from typing import Any, Literal

import pydantic


class Params(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Grpo(Params):
    clip_range: float = pydantic.Field(1e-4, gt=0)
    clip_range_high: float | None = pydantic.Field(None, gt=0)
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    horizon: int = pydantic.Field(8192, ge=1)
    """Divisor of seq-mean-token-sum-norm, in tokens."""


class CrossEntropy(Params):
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    horizon: int = pydantic.Field(8192, ge=1)


class ExactMatch(Params):
    field: str = "answer"
    """Metadata field that holds the answer."""
    strip: bool = False
    ignore_case: bool = False


class RegexFormat(Params):
    pattern: str
    full: bool = True
    """The whole completion must match, not a part of it."""


class Length(Params):
    target: int = pydantic.Field(..., ge=0)
    """Tokens at which the score is 1; it falls linearly to 0 over `width` on both sides."""
    width: int = pydantic.Field(..., ge=1)


class ReasoningGym(Params):
    """Reads task name and entry from the metadata that the reasoning_gym source wrote."""

    answer_pattern: str | None = None
    """Group 1 of its last match in the completion is graded; None grades the whole completion."""


class Engine(Params):
    max_batch_rows: int = pydantic.Field(1024, ge=1)
    """Most sequences generated at once."""
    batch_wait_ms: float = pydantic.Field(0.0, ge=0)
    length_bucket: float = pydantic.Field(1.5, ge=1)
    """Prompts of one forward pass differ in length by at most this factor."""


class Jsonl(Params):
    path: str
    prompt: str = "prompt"
    """Field that holds the prompt: a text, or a list of messages for a chat template."""
    target: str | None = None
    """Field that holds the text to imitate (sft)."""
    id: str | None = None
    """Field of unique ids, checked; None: the line number."""
    shuffle: bool = True


class Sorting(Params):
    """Six digits and `>`; the answer is the digits sorted. A tenth of the prompts (CRC-32 divisible by 10) is held out."""

    digits: int = pydantic.Field(6, ge=1, le=18)
    split: Literal["train", "held_out"] = "train"
    seed: int = 0
    size: int | None = pydantic.Field(None, ge=1)
    """Distinct draws before the source repeats; None: it never does."""
    right: float = pydantic.Field(0.30, ge=0, le=1)
    """Share of right demonstrations of the careless teacher (sft)."""
    rotated: float = pydantic.Field(0.45, ge=0, le=1)
    """Share in which the smallest digit stands last; the rest copies the prompt."""


class ReasoningGymSource(Params):
    dataset: str
    """Name of a reasoning-gym data set."""
    config: dict[str, Any] = {}
    size: int = pydantic.Field(1000, ge=1)
    seed: int = 0


_AR: dict[str, Any] = {"requires_advantages": True, "supports_multi_update": True, "recomputes_anchor": True}

TABLE: tuple[tuple[Any, str, type[Params], str, dict[str, Any]], ...] = (
    ("algorithm", "grpo", Grpo, "group-relative policy optimization", _AR),
    ("algorithm", "cross_entropy", CrossEntropy, "supervised fine-tuning", {"requires_advantages": False}),
    ("scorer", "exact_match", ExactMatch, "1 if the completion equals the answer, else 0", {}),
    ("scorer", "regex", RegexFormat, "1 if the completion matches a pattern, else 0", {"isolated": True}),
    ("scorer", "length", Length, "1 at a target length, falling on both sides", {}),
    ("scorer", "reasoning_gym", ReasoningGym, "the data set's own grader", {"isolated": True}),
    ("engine", "transformers", Engine, "Hugging Face transformers, batched, with a KV cache", {"torch": True}),
    ("source", "jsonl", Jsonl, "one JSON object a line", {"files": ("path",)}),
    ("source", "sorting", Sorting, "sort the digits", {}),
    ("source", "reasoning_gym", ReasoningGymSource, "procedural reasoning tasks", {}),
)
