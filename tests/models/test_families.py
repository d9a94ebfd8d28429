"""Every family against diffusers' own pipeline: latents and decoded pixels, with guidance; replay scores what was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.config import specs
from shared.models.diffusion import FAMILIES, family
from shared.models.diffusion.family import Conditions, Family, full_mask
from shared.models.diffusion.wan import Wan22
from shared.models.diffusion.z_image import ragged
from shared.sde import loop
from shared.sde.sigmas import Policy, scheduler_sigmas
from tests.models.tiny_pipelines import TINY, B, Tiny

STEPS = 4
FP32, BF16, OWN_BF16 = 1e-5, 0.05, 0.08
"""Largest difference, as a share of the largest value: in float32, of bfloat16 to it, and of bfloat16 to the pipeline's own."""


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    torch.manual_seed(0)
    return TINY[request.param]()


def velocity(tiny: Tiny) -> loop.Velocity:
    """Of a whole batch or some of its rows again and again (steps that are replayed at once)."""
    model = tiny.family.model(tiny.pipe)

    def of(cond: Any, rows: int) -> Any:
        return (
            None if cond is None else {name: value.repeat(rows // B, *[1] * (value.dim() - 1)) for name, value in cond.items()}
        )

    def call(x: Tensor, sigma: Tensor) -> Tensor:
        cond, negative = of(tiny.cond, len(x)), of(tiny.negative, len(x))
        return tiny.family.predict(model, x, sigma, cond, negative, *tiny.scales)

    return call


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_schedulers_own_grid_can_be_pinned(tiny: Tiny, steps: int) -> None:
    """What a pipeline leaves to its scheduler, without diffusers."""
    if tiny.family.grid(steps) is not None:
        return
    shift = tiny.pipe.scheduler.config.shift
    found = scheduler_sigmas(steps, shift)
    assert np.allclose(found, tiny.family.sigmas(tiny.pipe, steps, tiny.shape).numpy(), atol=1e-6)


def euler(tiny: Tiny, x: Tensor, sigmas: Tensor) -> Tensor:
    with torch.no_grad():
        return loop.sample(velocity(tiny), x, sigmas, "flow", 0.0, (), lambda i: x, x.dtype).final


def near(found: Tensor, wanted: Tensor, limit: float) -> None:
    assert found.shape == wanted.shape
    gap = float((found.float() - wanted.float()).abs().max())
    assert gap <= limit * max(1.0, float(wanted.float().abs().max())), gap


def test_every_family_has_a_test() -> None:
    assert TINY.keys() == FAMILIES.keys() == set(specs.names("family"))
    for name in FAMILIES:
        facts, own = specs.find("family", name, "x").flags, family(name)
        assert facts["unguided"] == own.unguided and facts["own_grid"] == (own.grid(4) is None), name
        told = (facts["pipeline"], facts["cell"], facts["video"], facts["pictured"])
        assert told == (own.pipeline, own.cell, own.video, own.pictured)
    with pytest.raises(ValueError, match=r"family 'sd9': legal are sd3"):
        family("sd9")


def test_latents_and_pixels_are_the_pipelines_own(tiny: Tiny) -> None:
    x = torch.randn(B, *tiny.shape)
    found = euler(tiny, x, tiny.family.sigmas(tiny.pipe, STEPS, tiny.shape))
    near(tiny.returned(found), tiny.own(STEPS, x, "latent"), FP32)
    with torch.no_grad():
        pixels = (tiny.family.decode(tiny.pipe, found) / 2 + 0.5).clamp(0, 1)
    if tiny.one_by_one:
        x = x[:1]
        tiny.call = {name: value[:1] for name, value in tiny.call.items()}
        pixels = pixels[:1]
    own = tiny.own(STEPS, x, "pt")
    near(pixels.transpose(1, 2) if tiny.family.video else pixels, own, 2 * FP32)


def halved(held: Conditions) -> Conditions:
    return {n: v.to(torch.bfloat16) if v.is_floating_point() else v for n, v in held.items()}


def half(value: Any) -> Any:
    if isinstance(value, list):
        return [half(one) for one in value]
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


def test_half_precision_stays_near(tiny: Tiny) -> None:
    """The transformer in bfloat16 against itself in float32, from the same noise, and against the pipeline in bfloat16."""
    x = torch.randn(B, *tiny.shape)
    sigmas = tiny.family.sigmas(tiny.pipe, STEPS, tiny.shape)
    wanted = euler(tiny, x, sigmas)
    tiny.pipe.to(torch.bfloat16)
    tiny.cond = halved(tiny.cond)
    tiny.negative = None if tiny.negative is None else halved(tiny.negative)
    found = euler(tiny, x.to(torch.bfloat16), sigmas)
    near(found, wanted, BF16)
    tiny.call = {name: half(value) for name, value in tiny.call.items()}
    near(tiny.returned(found), tiny.own(STEPS, x.to(torch.bfloat16), "latent"), OWN_BF16)


def test_texts_of_different_lengths_meet_in_a_batch() -> None:
    """As prompts do that were encoded one by one: each row is what it is alone, whatever it is padded to."""
    for tiny in (TINY["qwen_image"](), TINY["z_image"]()):
        model = tiny.family.model(tiny.pipe)
        alone = [encoded(tiny.family, torch.randn(1, length, 16)) for length in (5, 9)]
        both = tiny.family.stacked(alone, torch.device("cpu"))
        x, sigma = torch.randn(2, *tiny.shape), torch.tensor([0.7, 0.7])
        with torch.no_grad():
            found = tiny.family.velocity(model, x, sigma, both)
            wanted = [tiny.family.velocity(model, x[i : i + 1], sigma[i : i + 1], cond) for i, cond in enumerate(alone)]
        assert (found - torch.cat(wanted)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="SD3 has texts of one length"):
        family("sd3").stacked([{"text": torch.zeros(1, n, 4)} for n in (3, 4)], torch.device("cpu"))


def encoded(own: Family, text: torch.Tensor) -> Conditions:
    """What `encode` gives for one text."""
    if own.pipeline == "ZImagePipeline":
        return ragged([text[0]])
    return {"text": text, "mask": full_mask(text, None)}


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
def test_replay_scores_what_was_sampled(tiny: Tiny, kernel: Any) -> None:
    """The same batch: to the bit. Steps replayed at once: to rounding. And there is a gradient."""
    sigmas = torch.from_numpy(Policy(shift=3.0).sigmas(STEPS, 64, 64))
    x = loop.initial_noise(7, ["a/0", "a/1"], tiny.shape)
    at_once = not isinstance(tiny.family, Wan22)  # whose rows must all be on one side of the boundary
    with torch.no_grad():
        found = loop.sample(
            velocity(tiny), x, sigmas, kernel, 0.7, (0, 1), lambda i: loop.step_noise(7, i, ["a/0", "a/1"], tiny.shape)
        )
    assert found.positions == (0, 1, 2, 4) and found.log_probs is not None
    again = loop.replay(velocity(tiny), found.latents, found.positions, sigmas, kernel, 0.7, (0, 1))
    assert torch.equal(again.log_probs.detach(), found.log_probs), "ratio exactly 1"
    model = tiny.family.model(tiny.pipe)
    again.log_probs.sum().backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(bool(torch.isfinite(g).all()) for g in grads) and any(float(g.abs().max()) > 0 for g in grads)
    if at_once:
        with torch.no_grad():
            both = loop.replay(velocity(tiny), found.latents, found.positions, sigmas, kernel, 0.7, (1, 0), batched=True)
        assert torch.allclose(both.log_probs, found.log_probs[:, [1, 0]], atol=1e-4)


def test_noise_belongs_to_the_sample_and_not_to_its_batch() -> None:
    both = loop.initial_noise(3, ["p/0", "p/1"], (4, 2, 2))
    assert torch.equal(loop.initial_noise(3, ["p/1"], (4, 2, 2))[0], both[1])
    steps = loop.step_noise(3, 2, ["p/0", "p/1"], (4, 2, 2))
    assert torch.equal(loop.step_noise(3, 2, ["p/1"], (4, 2, 2))[0], steps[1])


def test_guidance_without_its_conditions_is_refused() -> None:
    tiny = TINY["sd3"]()
    with pytest.raises(ValueError, match=r"guidance_scale 4.0.*negative"):
        tiny.family.predict(tiny.pipe.transformer, torch.randn(B, *tiny.shape), torch.ones(B), tiny.cond, None, 4.0)


def test_experts_are_not_mixed_in_a_batch() -> None:
    tiny = TINY["wan22"]()
    with pytest.raises(ValueError, match="both sides"):
        tiny.family.velocity(tiny.family.model(tiny.pipe), torch.randn(B, *tiny.shape), torch.tensor([0.9, 0.5]), tiny.cond)


@pytest.mark.parametrize("name", TINY)
def test_pictures_become_latents_and_again_pictures(name: str) -> None:
    """`clean` is the inverse of what decode does around the VAE: through both, pixels are those of the VAE alone."""
    torch.manual_seed(0)
    tiny = TINY[name]()
    pipe, kind = tiny.pipe, tiny.family
    height, width, _ = tiny.size
    pixels = torch.rand(2, 3, height, width) * 2 - 1
    with torch.no_grad():
        latents = kind.clean(pipe, pixels)
        assert latents.shape[1:] == kind.latent_shape(pipe, height, width, 1)
        found = kind.decode(pipe, latents)
        inside = pixels if not hasattr(pipe.vae, "temperal_downsample") and not kind.video else pixels.unsqueeze(2)
        alone = [pipe.vae.decode(pipe.vae.encode(one[None]).latent_dist.mode(), return_dict=False)[0] for one in inside]
        wanted = torch.cat(alone).reshape(found.shape)
    assert torch.allclose(found, wanted, atol=1e-4)
