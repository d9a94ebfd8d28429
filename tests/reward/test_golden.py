"""Golden topic 9: the text scorers."""

from __future__ import annotations

import pytest

from services.reward.scorers import load
from services.reward.scorers.multiple_choice import WAYS, extract, normalized
from shared.config import specs
from shared.config.problems import BadInput
from shared.types import RewardRequest
from tests.vectors import Case, cases

TOPIC = "09_rewards"
MODES = {"plain": "plain", "phrase": "phrase_required", "tag": "tag_required"}


def row(completion: str, gold: object) -> RewardRequest:
    metadata = {} if gold is None else {"answer": gold}
    return RewardRequest(sample_id="r/0", prompt="", completion=completion, metadata=metadata)


@pytest.mark.parametrize("case", cases(TOPIC, "mc_extract"))
def test_the_letter_is_found(case: Case) -> None:
    text = case.params["text"]
    for mode, name in MODES.items():
        assert extract(text, mode)[0] == case.expect[name]
    assert extract(text, "graded") == (case.expect["graded_letter"], case.expect["graded_weight"])


@pytest.mark.parametrize("case", cases(TOPIC, "mc_normalize_gold"))
def test_the_answer_is_normalized(case: Case) -> None:
    assert normalized(case.params["gold"]) == case.expect["value"]


@pytest.mark.parametrize("case", cases(TOPIC, "mc_score"))
def test_multiple_choice(case: Case) -> None:
    """The vectors give 0 where there is no answer; here that is a failure, which is never a 0."""
    if case.raises:
        assert case.params["mode"] not in WAYS
        with pytest.raises(BadInput, match="mode"):
            load("multiple_choice", {"mode": case.params["mode"]})
        return
    rows = [row(text, gold) for text, gold in zip(case.params["texts"], case.params["gold"], strict=True)]
    found = load("multiple_choice", {"mode": case.params["mode"]}).score(rows)
    assert [0.0 if score is None else score for score in found] == case.expect["rewards"]
    assert [score is None for score in found] == [gold is None for gold in case.params["gold"]]


@pytest.mark.parametrize("case", cases(TOPIC, "math_verify"))
def test_math_verify(case: Case) -> None:
    [found] = load("math_verify", {}).score([row(case.params["prediction"], case.params["gold"])])
    assert (found or 0.0) == case.expect["reward"] and (found is None) == (case.params["gold"] is None)


REMOTE = {
    "base_url": "url",
    "max_retries": "attempts",
    "request_batch_size": "rows_per_request",
}
"""Parameters of the vectors that stand here under other names."""


@pytest.mark.parametrize("case", cases(TOPIC, "remote_config"))
def test_a_remote_scorer_refuses_what_cannot_be(case: Case) -> None:
    """Method and reduction are the recipe's aggregation here, one scorer asks for one reward, and text is the only input."""
    given = {REMOTE[name]: value for name, value in case.params.items() if name in REMOTE}
    if given:
        with pytest.raises(BadInput):
            specs.check("scorer", "remote_http", {"url": "http://127.0.0.1:1/score"} | given, "scorer")
        return
    unknown = {name: value for name, value in case.params.items() if name not in ("required_rewards",)}
    with pytest.raises(BadInput):
        specs.check("scorer", "remote_http", unknown, "scorer")
