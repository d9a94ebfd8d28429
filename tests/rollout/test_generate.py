"""Generation: what it samples, its log-probs, padding, positions, stops, and that nothing depends on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.models.ar.bundle import Bundle, load
from shared.models.ar.generate import generate
from shared.models.ar.philox import philox, sample_seed, uniform
from shared.models.ar.replay import replay
from shared.models.ar.sampling import draw, filtered
from shared.types import ARSamplingParams

PARAMS = ARSamplingParams(max_new_tokens=12, stop_token_ids=(1,))
PROMPTS = [[20, 21, 22], [30], [40, 41, 42, 43, 44, 45, 46], [50, 51]]


@pytest.fixture(scope="module")
def bundle(model_folder: Path) -> Bundle:
    found = load(model_folder, None)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in found.model.parameters():
            parameter.mul_(3)  # sharper than random weights are, so that stops and ties are rare but real
    return found


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [  # known answers of Random123 1.14, philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: Any, key: Any, wanted: Any) -> None:
    words = philox(tuple(np.asarray([c], np.uint64) for c in counter), tuple(np.asarray([k], np.uint64) for k in key))  # type: ignore[arg-type]
    assert tuple(int(w[0]) for w in words) == wanted


def test_draws_are_uniform_and_differ_by_seed_and_token() -> None:
    seeds = np.asarray([sample_seed(7, f"r/{i}") for i in range(20_000)], np.uint64)
    first, second = uniform(seeds, 0), uniform(seeds, 1)
    for draws in (first, second):
        assert abs(draws.mean() - 0.5) < 0.01 and abs(draws.std() - 12**-0.5) < 0.005 and (draws < 1).all()
    assert len(np.unique(first)) == 20_000 and abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_seeds_do_not_depend_on_the_issue_but_on_everything_else() -> None:
    assert len({sample_seed(s, i) for s in (0, 1) for i in ("r/0", "r/1", "q/0", "r/0/0/0")}) == 8


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_follows_the_distribution(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    params = ARSamplingParams(max_new_tokens=1, temperature=temperature)
    n = 40_000
    tokens, log_probs = draw(logits.expand(n, -1), params, uniform(np.arange(n, dtype=np.uint64), 0))
    wanted = (logits[0] / temperature).softmax(-1)
    found = torch.bincount(tokens, minlength=5) / n
    assert torch.allclose(found, wanted, atol=0.01)
    assert torch.allclose(log_probs, wanted.log()[tokens], atol=1e-6) and log_probs.dtype == torch.float32


def test_the_ends_of_the_distribution_are_legal_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    tokens, _ = draw(logits, ARSamplingParams(max_new_tokens=1), np.asarray([0.0, 1 - 2.0**-53]))
    assert tokens.tolist() == [1, 2]


def test_top_k_and_top_p_cut_and_renormalize() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    kept = filtered(logits, ARSamplingParams(max_new_tokens=1, top_k=2)).softmax(-1)
    assert (kept[0, 2:] == 0).all() and abs(float(kept.sum()) - 1) < 1e-6
    nucleus = filtered(logits, ARSamplingParams(max_new_tokens=1, top_p=0.7)).softmax(-1)
    assert (nucleus[0] > 0).tolist() == [True, True, False, False]


def alone(bundle: Bundle, prompt: Any, seed: int, params: ARSamplingParams = PARAMS) -> Any:
    return generate(bundle, [prompt], [0], [seed], params)[0]


def test_a_row_in_a_padded_batch_is_the_row_alone(bundle: Bundle) -> None:
    rows = [0, 0, 1, 2, 3, 2]
    found = generate(bundle, PROMPTS, rows, range(6), PARAMS)
    for place, (row, completion) in enumerate(zip(rows, found, strict=True)):
        single = alone(bundle, PROMPTS[row], place)
        assert completion.tokens == single.tokens and completion.finish == single.finish
        assert np.allclose(completion.log_probs, single.log_probs, atol=2e-5)
    assert found[0].tokens != found[1].tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_plain_forward_pass(bundle: Bundle, temperature: float) -> None:
    params = ARSamplingParams(max_new_tokens=12, temperature=temperature, stop_token_ids=(1,))
    for completion, prompt in zip(generate(bundle, PROMPTS, range(4), range(4), params), PROMPTS, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logits = bundle.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        assert np.allclose(completion.log_probs, wanted.numpy(), atol=1e-4)


def test_replay_scores_what_generation_sampled(bundle: Bundle) -> None:
    found = generate(bundle, PROMPTS, range(4), range(4), PARAMS)
    prompts = [np.asarray(p, np.int32) for p in PROMPTS]
    completions = [np.asarray(c.tokens, np.int32) for c in found]
    with torch.no_grad():
        scored = replay(bundle, prompts, completions).log_probs
    rollout = np.concatenate([c.log_probs for c in found])
    assert np.abs(scored.numpy() - rollout).max() < 1e-4


def test_replay_of_a_row_does_not_depend_on_its_neighbours(bundle: Bundle) -> None:
    prompts = [np.asarray(p, np.int32) for p in PROMPTS]
    completions = [np.asarray(c, np.int32) for c in ([9, 8, 7], [6], [5, 4, 3, 2, 9, 9], [])]
    with torch.no_grad():
        together = replay(bundle, prompts, completions).log_probs
        singles = torch.cat([replay(bundle, [p], [c]).log_probs for p, c in zip(prompts, completions, strict=True) if len(c)])
    assert torch.allclose(together, singles, atol=1e-5) and len(together) == 10


def test_generation_stops_at_the_first_stop_token_and_keeps_it(bundle: Bundle) -> None:
    """Every token is a stop token here: each completion is exactly one token long."""
    every = ARSamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(99)))
    for completion in generate(bundle, PROMPTS, range(4), range(4), every):
        assert len(completion.tokens) == 1 and completion.finish == "stop"


def test_the_limit_is_flagged(bundle: Bundle) -> None:
    never = ARSamplingParams(max_new_tokens=5)
    assert all(len(c.tokens) == 5 and c.finish == "length" for c in generate(bundle, PROMPTS, range(4), range(4), never))


def test_rows_leave_at_different_times(bundle: Bundle) -> None:
    half = ARSamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(0, 99, 5)))
    found = generate(bundle, PROMPTS, [i % 4 for i in range(64)], range(64), half)
    assert len({len(c.tokens) for c in found}) > 3
    for place, completion in enumerate(found):
        assert completion.tokens == alone(bundle, PROMPTS[place % 4], place, half).tokens


def test_greedy_is_the_most_likely_token_whatever_the_seed(bundle: Bundle) -> None:
    greedy = ARSamplingParams(max_new_tokens=6, temperature=0, stop_token_ids=(1,))
    assert alone(bundle, PROMPTS[0], 1, greedy).tokens == alone(bundle, PROMPTS[0], 2, greedy).tokens
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        wanted = int(bundle.model(input_ids=ids).logits[0, -1].argmax())
    assert alone(bundle, PROMPTS[0], 1, greedy).tokens[0] == wanted
