"""The diffusers engine on a tiny SD3: what it makes belongs to the request alone, and training scores it the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shared.config.builtin import Diffusers
from shared.engines.base import fill
from shared.engines.diffusers_engine import DiffusersEngine
from shared.models.diffusion.family import Conditions
from shared.models.diffusion.sd3 import SD3
from shared.sde import loop
from shared.sde.sigmas import static_sigmas
from shared.types import DiffusionSamplingParams, LatentSegment, Sample
from shared.wire import codec
from tests.models.tiny_pipelines import sd3

STEPS = 5
PARAMS = DiffusionSamplingParams(
    num_inference_steps=STEPS,
    height=64,
    width=64,
    eta=0.7,
    sigmas=tuple(static_sigmas(STEPS, 3.0).tolist()),
    sde_indices=(0, 1),
    seed=11,
)


class Worded(SD3):
    """SD3 without encoders: a prompt's embedding is drawn by its text."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def encode(self, pipe: Any, prompts: list[str], pictures: Any = (), frames: int = 1) -> Conditions:
        self.asked.append(list(prompts))
        rows = []
        for prompt in prompts:
            seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")
            generator = torch.Generator().manual_seed(seed)
            rows.append((torch.randn(7, 32, generator=generator), torch.randn(64, generator=generator)))
        return {"text": torch.stack([r[0] for r in rows]), "pooled": torch.stack([r[1] for r in rows])}


@pytest.fixture
def engine() -> Iterator[DiffusersEngine]:
    torch.manual_seed(0)
    found = DiffusersEngine(Worded(), sd3().pipe, Diffusers(forward_batch_size=4, batch_wait_ms=20))
    yield found
    found.close()


def request(root: str, prompt: str = "a cat", n: int = 3, params: DiffusionSamplingParams = PARAMS) -> list[Sample]:
    return [Sample.request([root], params, n=n, texts=[prompt])]


def pixels(media: Any) -> np.ndarray[Any, Any]:
    return np.asarray(media.data)


def latents(samples: list[Sample]) -> LatentSegment:
    segment = samples[0].frontier.segment
    assert isinstance(segment, LatentSegment)
    return segment


def test_a_filled_slice_has_what_later_stages_need(engine: DiffusersEngine) -> None:
    [[sample]] = fill(engine, [request("a:0:0")])
    segment, part = latents([sample]), sample.frontier
    assert segment.positions == (0, 1, 2, 5) and segment.latents.shape == (3, 4, 4, 8, 8)
    assert segment.log_probs is not None and segment.log_probs.shape == (3, 2) and segment.log_probs.dtype == np.float32
    [first, *_] = part.primitives["image"]
    assert pixels(first).dtype == np.uint8 and pixels(first).shape == (64, 64, 3)
    assert part.status == ("ok",) * 3 and set(sample.parts[0].conditions) == {"text", "pooled"}
    assert len(sample.parts[0].conditions["text"]) == 1, "a prompt's encoding travels once for all its samples"
    [again] = codec.decode(codec.encode([sample]), list[Sample])
    assert np.array_equal(latents([again]).latents, segment.latents)


def test_a_picture_belongs_to_its_id_and_not_to_its_batch(engine: DiffusersEngine) -> None:
    slices = [request("a:0:0"), request("a:0:1", "a dog", n=6), request("a:0:2", n=1)]
    together = fill(engine, slices)
    alone = [fill(engine, [one], alone=True)[0] for one in slices]
    for some, single in zip(together, alone, strict=True):
        assert np.allclose(latents(some).latents, latents(single).latents, atol=1e-5)
    whole, part = fill(engine, [request("a:0:1", "a dog", n=6)])[0], request("a:0:1", "a dog", n=6)[0].select([4, 5])
    [two] = fill(engine, [[part]])
    assert np.allclose(latents(two).latents, latents(whole).latents[4:], atol=1e-5)
    same = fill(engine, [request("b:0:0", n=2, params=msgspec.structs.replace(PARAMS, shared_noise=True, sde_indices=()))])[0]
    first, second = same[0].frontier.primitives["image"]
    assert pixels(first).tobytes() == pixels(second).tobytes()


def test_prompts_are_encoded_once(engine: DiffusersEngine) -> None:
    family: Any = engine.family
    for root in ("a:0:0", "a:0:1"):
        fill(engine, [request(root, "a cat"), request(root, "a dog", n=2)])
    assert sorted(p for asked in family.asked for p in asked) == ["a cat", "a dog"]
    fill(engine, [request("a:0:2", params=msgspec.structs.replace(PARAMS, guidance_scale=3.0, negative_prompt="ugly"))])
    assert family.asked[-1] == ["ugly"]


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_training_scores_what_was_sampled(engine: DiffusersEngine, guidance: float) -> None:
    """From the body alone, with another batch size: within 1e-4, and within the same batch to the bit."""
    params = msgspec.structs.replace(PARAMS, guidance_scale=guidance, negative_prompt="ugly")
    [[sample]] = fill(engine, [request("a:0:0", n=4, params=params)])
    [sample] = codec.decode(codec.encode([sample]), list[Sample])
    segment = latents([sample])
    own = {name: torch.tensor(np.array(value)) for name, value in sample.parts[0].conditions.items()}
    against = engine.family.encode(None, ["ugly"])

    def scores(rows: slice) -> torch.Tensor:
        points = torch.tensor(np.array(segment.latents))[rows]

        def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            cond, negative = ({n: v.expand(len(x), *v.shape[1:]) for n, v in c.items()} for c in (own, against))
            return engine.family.predict(engine.model, x, sigma, cond, negative, guidance)

        sigmas = torch.tensor(np.array(segment.sigmas))
        return loop.replay(velocity, points, segment.positions, sigmas, "flow", 0.7, segment.sde_indices).log_probs.detach()

    assert segment.log_probs is not None
    wanted = torch.tensor(np.array(segment.log_probs))
    assert torch.equal(scores(slice(0, 4)), wanted)
    assert all(float((scores(slice(i, i + 1)) - wanted[i : i + 1]).abs().max()) <= 1e-4 for i in range(4))


def test_versions_are_adopted_whole(engine: DiffusersEngine) -> None:
    before = fill(engine, [request("a:0:0")])[0]
    probe = engine.probe()
    state = {name: value * 0.5 for name, value in engine.model.state_dict().items()}
    engine.adopt("policy", 3, state)
    after = fill(engine, [request("a:0:0")])[0]
    assert after[0].frontier.output_version.tolist() == [3] * 3  # type: ignore[union-attr]
    assert not np.array_equal(latents(after).latents, latents(before).latents)
    assert probe is not None and engine.probe() not in (None, probe)
    with pytest.raises(ValueError, match="the version lacks"):
        engine.adopt("policy", 4, dict(list(state.items())[1:]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"height": 100}, "height 100: must be a multiple of 8, such as 96"),
        ({"width": 4}, "width 4: must be a multiple of 8, such as 8"),
        ({"num_frames": 5}, "num_frames 5: the family makes images"),
        ({"sigmas": None}, "sigmas: the request must pin them"),
        ({"sigmas": (1.0, 0.5, 0.6, 0.3, 0.2, 0.0)}, "must fall"),
        ({"eta": 0.0}, "eta 0.0: steps that draw"),
        ({"sde_indices": (1, 5)}, r"sde_indices \[5\]: must be 0 to 4"),
    ],
)
def test_requests_that_cannot_be(engine: DiffusersEngine, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fill(engine, [request("a:0:0", params=msgspec.structs.replace(PARAMS, **changes))])
    assert fill(engine, [request("a:0:0")])[0]  # and it goes on
