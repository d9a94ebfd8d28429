"""Rollouts that are interrupted between two tokens: they go on here with other weights, or elsewhere, and no token changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.config.builtin import Engine as EngineParams
from shared.engines.base import Outcome
from shared.engines.transformers_engine import TransformersEngine
from shared.models.ar.bundle import load
from shared.models.ar.generate import PAUSED, Completion, generate
from shared.types import ARSamplingParams, Sample
from tests.conftest import own_tensors

LONG = ARSamplingParams(max_new_tokens=40, temperature=1.0, stop_token_ids=(1,))
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def bundle(model_folder: Path) -> Any:
    torch.set_num_threads(1)
    return load(model_folder, None, "float32")


@pytest.fixture
def engines(model_folder: Path) -> Iterator[Callable[[], TransformersEngine]]:
    made: list[TransformersEngine] = []

    def make() -> TransformersEngine:
        made.append(TransformersEngine(load(model_folder, None, "float32"), EngineParams(), keep=True))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("every", [1, 3, 7])
def test_what_is_continued_is_what_would_have_been(bundle: Any, every: int) -> None:
    rows, seeds = [0, 0, 1, 2, 2, 1], range(6)
    whole = generate(bundle, PROMPTS, rows, seeds, LONG)
    found = [Completion() for _ in rows]
    todo, rounds = list(range(len(rows))), 0
    while todo:
        count, rounds = iter(range(every - 1, -1, -1)), rounds + 1
        some = [found[row] for row in todo]
        generate(
            bundle,
            PROMPTS,
            [rows[row] for row in todo],
            [seeds[row] for row in todo],
            LONG,
            begun=some,
            pause=lambda: next(count) == 0,  # noqa: B023
        )
        todo = [row for row in todo if found[row].finish == PAUSED]
    assert [c.tokens for c in found] == [c.tokens for c in whole] and [c.finish for c in found] == [c.finish for c in whole]
    assert rounds > 40 // every - 1
    for one, other in zip(found, whole, strict=True):
        assert np.allclose(one.log_probs, other.log_probs, atol=1e-4)


def request(root: str) -> list[Sample]:
    return [Sample.request([root], LONG, n=3, track="policy", texts=["x"], tokens=[[5, 6, 7]])]


class Slow:
    """Engines whose tokens wait for a permit, so that a test knows when it interrupts."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.permits, self.drawn = engine, threading.Semaphore(0), 0
        forward = engine.bundle.model.forward

        def waits(*args: Any, **more: Any) -> Any:
            assert self.permits.acquire(timeout=30)
            self.drawn += 1
            return forward(*args, **more)

        engine.bundle.model.forward = waits

    def go(self, tokens: int) -> None:
        """So many forward passes, and no more."""
        wanted = self.drawn + tokens
        self.permits.release(tokens)
        deadline = time.monotonic() + 30
        while self.drawn < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def free(self) -> None:
        self.permits.release(10_000)


def submit(engine: TransformersEngine, slices: list[list[Sample]], pinned: bool = False) -> Callable[[], list[Outcome]]:
    found: dict[int, Outcome] = {}
    over = threading.Event()

    def done(outcomes: Any) -> None:
        found.update(outcomes)
        if len(found) == len(slices):
            over.set()

    engine.submit(slices, done, pinned=pinned)

    def result() -> list[Outcome]:
        assert over.wait(60)
        return [found[place] for place in range(len(slices))]

    return result


def scaled(engine: TransformersEngine, scale: float) -> dict[str, Any]:
    return {name: value * scale for name, value in own_tensors(engine.bundle).items()}


def frontier(outcome: Outcome) -> Any:
    assert not isinstance(outcome, Exception)
    [sample] = outcome
    return sample.frontier


def test_a_new_version_is_adopted_between_two_tokens(engines: Callable[[], TransformersEngine]) -> None:
    engine, other = engines(), engines()
    engine.adopt("policy", 3, scaled(engine, 1.0))
    before = frontier(submit(engine, [request("a:0:0")])()[0]).text_segment
    weights = scaled(engine, 1.3)
    slow = Slow(engine)
    result = submit(engine, [request("a:0:0")])
    slow.go(6)
    adopting = threading.Thread(target=engine.adopt, args=("policy", 4, weights))
    adopting.start()
    slow.free()
    adopting.join(30)
    part = frontier(result()[0])
    segment = part.text_segment
    assert set(part.output_version.tolist()) == {3} and engine.version == 4 and part.filled
    changed = [row for row in range(3) if segment.version_spans[row] != ((0, 3),)]
    assert changed and all(segment.version_spans[row][0] == (0, 3) for row in range(3))
    other.adopt("policy", 4, weights)
    offsets = segment.offsets()
    for row in range(3):
        spans, own = segment.version_spans[row], segment.row(row)
        switch = spans[1][0] if len(spans) > 1 else len(own)
        assert np.array_equal(own[:switch], before.row(row)[:switch]), "what was drawn before is not drawn again"
        scored = score(other, [5, 6, 7], own)
        low = int(offsets[row]) + switch
        assert np.allclose(segment.log_probs[low : offsets[row + 1]], scored[switch:], atol=1e-4), "of the new weights"


def score(engine: TransformersEngine, prompt: list[int], tokens: Any) -> Any:
    """Log-probs of the tokens behind the prompt."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        found = engine.bundle.model(ids).logits[0].log_softmax(-1)
    return found[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_what_is_pinned_keeps_its_version(engines: Callable[[], TransformersEngine]) -> None:
    engine = engines()
    engine.adopt("policy", 3, scaled(engine, 1.0))
    weights = scaled(engine, 1.3)
    slow = Slow(engine)
    result = submit(engine, [request("a:0:0")], pinned=True)
    slow.go(6)
    adopting = threading.Thread(target=engine.adopt, args=("policy", 4, weights))
    adopting.start()
    slow.free()
    adopting.join(30)
    part = frontier(result()[0])
    assert part.text_segment.version_spans is None and set(part.output_version.tolist()) == {3} and engine.version == 4


def test_a_suspended_rollout_goes_on_elsewhere(engines: Callable[[], TransformersEngine]) -> None:
    """Also one that had not begun. Nothing is drawn twice, and nothing changes."""
    engine, other, third = engines(), engines(), engines()
    requests = [request("a:0:0"), request("a:0:1")]
    for one in (engine, other, third):
        one.adopt("policy", 7, scaled(one, 1.0))
    wanted = [frontier(outcome) for outcome in submit(third, requests)()]
    slow = Slow(engine)
    result = submit(engine, requests)
    slow.go(9)
    engine.suspend()
    slow.free()
    handed = result()
    assert all(not frontier(outcome).filled for outcome in handed)
    partial = frontier(handed[0]).text_segment
    assert 0 < partial.lengths.max() <= 11 and "partial" in frontier(handed[0]).status
    again = submit(engine, requests)()
    assert all(frontier(outcome).segment is None for outcome in again), "it begins nothing any more"
    slices: list[list[Sample]] = [outcome for outcome in handed if not isinstance(outcome, Exception)]
    found = [frontier(outcome) for outcome in submit(other, slices)()]
    for one, own in zip(found, wanted, strict=True):
        assert one.filled and one.status == own.status and one.text == own.text
        assert np.array_equal(one.text_segment.tokens, own.text_segment.tokens)
        assert np.allclose(one.text_segment.log_probs, own.text_segment.log_probs, atol=1e-4)


def test_weights_that_do_not_fit_fail_what_is_interrupted(engines: Callable[[], TransformersEngine]) -> None:
    engine = engines()
    engine.adopt("policy", 3, scaled(engine, 1.0))
    good = scaled(engine, 1.0)
    slow = Slow(engine)
    result = submit(engine, [request("a:0:0")])
    slow.go(4)
    raised: list[BaseException] = []

    def adopt() -> None:
        try:
            engine.adopt("policy", 4, {"no.such.weight": torch.zeros(1)})
        except ValueError as error:
            raised.append(error)

    adopting = threading.Thread(target=adopt)
    adopting.start()
    slow.free()
    adopting.join(30)
    assert raised and isinstance(result()[0], ValueError)
    engine.adopt("policy", 5, good)
    assert frontier(submit(engine, [request("a:0:0")])()[0]).filled
