"""Seeds of initial noise and of denoising steps: by id alone, so that any worker makes the same picture. Golden topic 8."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

PROMPT = "prompt:"
"""Ids that begin so are keyed by the prompt's content: evaluations compare across steps, whatever ids they have."""


def group_seed(base: int, group: str) -> int:
    """For an ordinary id BLAKE2b of `{base}::{id}`, modulo 2^63; for one of a prompt `base + SHA-256(prompt) + sample`, modulo
    2^31. ValueError for an id of a prompt that is JSON of another shape."""
    if not group.startswith(PROMPT):
        return _blake(f"{base}::{group}") % (1 << 63)
    prompt, sample = _prompt(group.removeprefix(PROMPT))
    digest = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")
    return (base + digest + sample) % (1 << 31)


def _prompt(text: str) -> tuple[str, int]:
    try:
        found = json.loads(text)
    except ValueError:
        return text, 0
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise ValueError(f"noise id {PROMPT}{text}: must be a text, or an object with a prompt")
    sample = found.get("sample", 0)
    if not isinstance(sample, int) or isinstance(sample, bool) or sample < 0:
        raise ValueError(f"noise id {PROMPT}{text}: sample must be a whole number, 0 or more")
    return found["prompt"], sample


def prompt_group(prompt: str, sample: int = 0) -> str:
    """The id whose noise belongs to a prompt's content and a sample's number."""
    if sample < 0:
        raise ValueError(f"sample {sample}: must be 0 or more")
    return PROMPT + json.dumps({"prompt": prompt, "sample": sample}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def step_seed(base: int, step: int, sample_id: str) -> int:
    """Of the noise that a stochastic step draws for a sample; modulo 2^63 - 1."""
    return _blake(f"{base}::step::{step}::sample::{sample_id}") % ((1 << 63) - 1)


def noise_groups(
    sample_ids: Sequence[str], shared: bool = False, explicit: Sequence[str] | None = None, salt: str = ""
) -> tuple[str, ...]:
    """The ids that decide each sample's initial noise: given ones; with `shared` their parents' (a group begins alike); else
    their own. `salt` makes another noise of the same ids. ValueError unless there is one for each sample."""
    if explicit is not None and len(explicit) != len(sample_ids):
        raise ValueError(f"{len(explicit)} noise ids for {len(sample_ids)} samples: there must be one each")
    own = [i.rpartition("/")[0] or i for i in sample_ids] if shared else sample_ids
    return tuple(f"{i}::{salt}" if salt else i for i in (own if explicit is None else explicit))


def _blake(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
