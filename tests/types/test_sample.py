"""Properties of the Sample's operations, and what its construction refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.types import ARSamplingParams, Part, Sample, Text, TextSegment
from shared.wire import codec

PARAMS = ARSamplingParams(max_new_tokens=8)


@st.composite
def filled_samples(draw: Any) -> Sample:
    roots = [f"s:0:{i}" for i in range(draw(st.integers(1, 3)))]
    n = draw(st.integers(1, 4))
    tokens = [draw(st.lists(st.integers(0, 99), min_size=1, max_size=5)) for _ in roots]
    sample = Sample.request(
        roots, PARAMS, n=n, texts=[f"prompt {r}" for r in roots], tokens=tokens, metadata=[{"row": r} for r in roots]
    )
    for again in range(draw(st.integers(1, 2))):
        rows = len(sample.frontier)
        lists = [draw(st.lists(st.integers(0, 99), max_size=4)) for _ in range(rows)]
        segment = TextSegment.of(lists)
        segment = msgspec.structs.replace(
            segment,
            log_probs=np.linspace(-1, 0, len(segment.tokens), dtype=np.float32),
            finish_reasons=("stop",) * rows,
            version_spans=(((0, 3),),) * rows,
        )
        sample = sample.fill(
            segment,
            primitives={"text": tuple(Text(str(row)) for row in lists)},
            rewards=np.arange(rows, dtype=np.float32),
            component_rewards={"a": np.arange(rows, dtype=np.float32)},
            status=("ok",) * rows,
            output_version=np.full(rows, 3, np.int64),
        )
        if again == 0 and draw(st.booleans()):
            sample = sample.observe("tool", tokens=[[7, 8]] * rows).fork(1, PARAMS)
        else:
            break
    return sample


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, arrays included."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(filled_samples())
@settings(max_examples=60, deadline=None)
def test_split_then_concat_is_the_sample(sample: Sample) -> None:
    pieces = sample.split()
    assert [p.roots for p in pieces] == [(r,) for r in sample.roots]
    assert same(Sample.concat(pieces), sample)


@given(filled_samples(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_select_keeps_each_rows_lineage_and_content(sample: Sample, rng: Any) -> None:
    rows = rng.sample(range(len(sample)), rng.randint(1, len(sample)))
    chosen = sample.select(rows)
    for new, old in enumerate(rows):
        assert chosen.parts[-1].sample_ids[new] == sample.parts[-1].sample_ids[old]
        assert np.array_equal(chosen.conditioning(new), sample.conditioning(old))
        assert [t.role for t in chosen.turns(new)] == [t.role for t in sample.turns(old)]


@given(filled_samples())
@settings(max_examples=60, deadline=None)
def test_the_wire_returns_the_sample_bit_for_bit(sample: Sample) -> None:
    [found] = codec.decode(codec.encode([sample]), list[Sample])
    assert same(found, sample)


def test_conditioning_is_prompt_then_turns() -> None:
    sample = Sample.request(["r"], PARAMS, n=2, tokens=[[1, 2]])
    sample = sample.fill(TextSegment.of([[3], [4, 5]])).observe("tool", tokens=[[6], [7]]).fork(1, PARAMS)
    assert sample.conditioning(0).tolist() == [1, 2, 3, 6]
    assert sample.conditioning(1).tolist() == [1, 2, 4, 5, 7]


def test_a_filled_frontier_is_not_filled_again() -> None:
    sample = Sample.request(["r"], PARAMS, tokens=[[1]]).fill(TextSegment.of([[3]]))
    with pytest.raises(ValueError, match="filled already"):
        sample.fill(TextSegment.of([[4]]))


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"sample_ids": ("a", "a")}, "twice"),
        ({"sample_ids": ("a",), "rewards": np.zeros(2, np.float32)}, "rewards has 2 rows"),
        ({"sample_ids": ("a",), "segment": TextSegment.of([[1], [2]])}, "segment has 2 rows"),
    ],
)
def test_a_part_refuses_columns_that_do_not_fit(columns: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Part(**columns)


def test_a_segment_refuses_log_probs_that_are_not_float32() -> None:
    with pytest.raises(ValueError, match="float32"):
        TextSegment(tokens=np.zeros(1, np.int32), lengths=np.ones(1, np.int32), log_probs=np.zeros(1))
