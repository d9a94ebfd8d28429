"""Scorers, and what the service makes of anything that is not a score: a failure, never a 0."""

from __future__ import annotations

import math
import random
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.reward.handler import requests
from services.reward.isolated import IsolatedScorer
from services.reward.scorers import BUILTIN, implementation, load
from services.reward.verdict import verdict
from shared import pictures
from shared.config import specs
from shared.config.problems import BadInput
from shared.pictures import PROMPTS, paint
from shared.types import ARSamplingParams, Media, RewardRequest, Sample, Text, TextSegment


def row(completion: str, tokens: int = 0, **metadata: Any) -> RewardRequest:
    return RewardRequest(sample_id="r/0", prompt="p", completion=completion, tokens=tokens, metadata=metadata)


def scores(name: str, params: dict[str, Any], *rows: RewardRequest) -> list[float | None]:
    return list(load(name, params).score(rows))


def test_exact_match() -> None:
    rows = (row("12", answer="12"), row(" 12", answer=12), row("13", answer="12"), row("12"))
    assert scores("exact_match", {}, *rows) == [1.0, 0.0, 0.0, None]
    assert scores("exact_match", {"strip": True}, *rows)[1] == 1.0
    assert scores("exact_match", {"ignore_case": True, "field": "gold"}, row("ABC", gold="abc")) == [1.0]


def test_regex() -> None:
    assert scores("regex", {"pattern": r"\d+"}, row("12"), row("12a")) == [1.0, 0.0]
    assert scores("regex", {"pattern": r"\d+", "full": False}, row("a12b"), row("ab")) == [1.0, 0.0]
    with pytest.raises(BadInput, match="no regular expression"):
        load("regex", {"pattern": "("})


def picture(pixels: np.ndarray[Any, Any], prompt: str = "red disc") -> RewardRequest:
    """`pixels`: [3, size, size] in 0 … 1, as `shared.pictures.paint` gives them."""
    data = (pixels.transpose(1, 2, 0) * 255).round().astype(np.uint8)
    return RewardRequest(sample_id="r/0", prompt=prompt, completion="", media=Media(mime="image/raw", data=data))


def test_brightness_and_jpeg_size() -> None:
    noise = np.random.default_rng(0).random((3, 16, 16))
    grey = np.full((3, 16, 16), 0.2)
    frames = np.stack([np.zeros((8, 8, 3)), np.full((8, 8, 3), 255)]).astype(np.uint8)
    media = Media(mime="video/raw", data=frames)
    video = RewardRequest(sample_id="r/0", prompt="", completion="", media=media)
    assert scores("brightness", {}, picture(grey), picture(grey * 5), video) == [0.2, 1.0, 0.5]
    calm, wild = scores("jpeg_size", {}, picture(grey), picture(noise))
    assert calm is not None and wild is not None and calm != wild
    for name in ("brightness", "jpeg_size", "shapes"):
        with pytest.raises(ValueError, match="r/0 holds no picture"):
            scores(name, {}, row("text"))


def test_shapes_wants_the_colour_and_the_shape_of_the_prompt() -> None:
    rng, draws = np.random.default_rng(0), random.Random(0)
    wanted = [prompt for prompt in PROMPTS for _ in range(20)]
    right = scores("shapes", {}, *map(picture, paint(wanted, rng), wanted))
    assert min(score or 0 for score in right) > 0.85
    careless = [pictures.careless(prompt, draws) for prompt in wanted]
    found = scores("shapes", {}, *map(picture, paint(careless, rng), wanted))
    for said, done, score in zip(wanted, careless, found, strict=True):
        assert score is not None and (score > 0.85 if said == done else score < 0.3), (said, done, score)
    assert 0.2 < sum(score or 0 for score in found) / len(found) < 0.42
    with pytest.raises(
        ValueError, match=r"'red cat': must be a colour \(red, green, blue, yellow\) and a shape \(disc, square"
    ):
        scores("shapes", {}, picture(np.zeros((3, 24, 24)), "red cat"))


def test_length() -> None:
    rows = [row("", tokens=n) for n in (10, 8, 12, 4, 100)]
    assert scores("length", {"target": 10, "width": 4}, *rows) == [1.0, 0.5, 0.5, 0.0, 0.0]


def test_reasoning_gym_grades_with_the_data_sets_own_grader() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    good = {"dataset": "leg_counting", "entry": entry}
    found = scores("reasoning_gym", {}, row(entry["answer"], **good), row("-1", **good), row("1"))
    assert found[0] == 1.0 and found[1] is not None and found[1] < 1 and found[2] is None
    tagged = scores(
        "reasoning_gym", {"answer_pattern": "<a>(.*?)</a>"}, row(f"<a>{entry['answer']}</a>", **good), row("x", **good)
    )
    assert tagged == [1.0, 0.0]


def test_every_spec_has_an_implementation_and_the_other_way_round() -> None:
    assert set(specs.names("scorer")) == set(BUILTIN)
    for name in BUILTIN:
        module, _, attribute = implementation(name).partition(":")
        __import__(module)
        assert attribute in vars(sys.modules[module])


@pytest.mark.parametrize(
    ("returned", "failed"),
    [
        ([1.0, None], [1]),
        ([math.nan, 0.5], [0]),
        ([math.inf, -math.inf], [0, 1]),
        ([True, 1], [0]),
        (["1", 1], [0]),
        ([1.0], [0, 1]),
        ([1.0, 2.0, 3.0], [0, 1]),
        (7, [0, 1]),
        (None, [0, 1]),
        (np.asarray([0.5, np.nan], np.float32), [1]),
        ((0, 1), []),
    ],
)
def test_whatever_is_no_finite_number_failed(returned: Any, failed: list[int]) -> None:
    found = verdict(lambda _: returned, [row("a"), row("b")])
    assert sorted(found.errors) == failed
    assert [math.isnan(s) for s in found.scores] == [i in failed for i in range(2)]


def test_an_exception_fails_its_own_row_only() -> None:
    def score(rows: Sequence[RewardRequest]) -> list[float]:
        return [1 / len(r.completion) for r in rows]

    found = verdict(score, [row("ab"), row(""), row("a")])
    assert found.scores[0] == 0.5 and math.isnan(found.scores[1]) and found.scores[2] == 1.0
    assert "ZeroDivisionError" in found.errors[1]


# in a process of its own -----------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a scorer of its own, found by the entry-point group."""
    (tmp_path / "outsider.py").write_text(
        textwrap.dedent(
            """
            import os, time, pydantic
            from shared.config.specs import Spec
            class P(pydantic.BaseModel):
                pass
            def specs():
                return [Spec("scorer", "outside", P, "from outside", entry_point="outsider:Scorer")]
            class Scorer:
                def __init__(self, params): print("noise on standard output")
                def score(self, rows):
                    word = rows[0].completion
                    if word == "hang": time.sleep(60)
                    if word == "spin":
                        while True: pass
                    if word == "die": os._exit(7)
                    return [float(len(r.completion)) for r in rows]
            """
        )
    )
    info = tmp_path / "outsider-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[unimesh.specs]\noutsider = outsider:specs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    specs.registry.cache_clear()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(("word", "reason"), [("hang", "within 1 s"), ("spin", "within 1 s"), ("die", "ended with code 7")])
def test_a_scorer_from_outside_may_hang_or_die_and_only_its_message_fails(word: str, reason: str) -> None:
    scorer = IsolatedScorer("outside", {}, timeout_s=1)
    try:
        assert scorer.score([row("abc"), row("")]).scores == (3.0, 0.0)
        started = time.monotonic()
        found = scorer.score([row(word), row("x")])
        assert all(map(math.isnan, found.scores)) and reason in found.errors[0] and time.monotonic() - started < 10
        assert scorer.score([row("abcd")]).scores == (4.0,), "it is started again"
    finally:
        scorer.close()
        specs.registry.cache_clear()


def test_a_pattern_that_explodes_is_stopped_by_the_time_out() -> None:
    scorer = IsolatedScorer("regex", {"pattern": "(a+)+$"}, timeout_s=1)
    try:
        found = scorer.score([row("a" * 40 + "b")])
        assert math.isnan(found.scores[0]) or found.scores == (0.0,)
        assert scorer.score([row("aaa")]).scores == (1.0,)
    finally:
        scorer.close()


def test_an_import_that_fails_is_named() -> None:
    scorer = IsolatedScorer("no_such", {}, timeout_s=1)
    found = scorer.score([row("a")])
    assert math.isnan(found.scores[0]) and "unknown scorer" in found.errors[0]


def test_a_scorer_sees_prompt_text_metadata_and_truncation() -> None:
    params = ARSamplingParams(max_new_tokens=2)
    sample = Sample.request(["r", "q"], params, n=2, texts=["P", "Q"], tokens=[[1], [2]], metadata=[{"answer": 1}, {}])
    sample = sample.fill(
        TextSegment.of([[1], [1, 2], [3], [4, 4]]),
        primitives={"text": tuple(map(Text, "abcd"))},
        status=("ok", "truncated", "ok", "truncated"),
    )
    found = requests(sample)
    assert [(r.prompt, r.completion, r.truncated, r.tokens) for r in found] == [
        ("P", "a", False, 1),
        ("P", "b", True, 2),
        ("Q", "c", False, 1),
        ("Q", "d", True, 2),
    ]
    assert found[0].metadata == {"answer": 1} and found[2].metadata == {}


def test_contains() -> None:
    rows = (row("it is 12.", answer="12"), row("ABC", answer="b"), row("x"))
    assert scores("contains", {}, *rows) == [1.0, 0.0, None]
    assert scores("contains", {"ignore_case": True}, *rows)[1] == 1.0
    assert scores("contains", {"text": "x"}, *rows) == [0.0, 0.0, 1.0]


def test_json_schema() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    fenced = 'Here:\n```json\n{"a": "x"}\n```\nbetter:\n```\n{"a": 2}\n```'
    rows = (row('{"a": 1}'), row('{"a": 1.5}'), row("{"), row(fenced), row("null"))
    assert scores("json_schema", {"json_schema": schema}, *rows) == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert scores("json_schema", {"json_schema": schema, "fenced": False}, row(fenced)) == [0.0]
    with pytest.raises(BadInput, match="no JSON schema"):
        load("json_schema", {"json_schema": {"type": "nonsense"}})
