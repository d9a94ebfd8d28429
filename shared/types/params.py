"""How a generated Part is sampled. Their presence on a Part marks it as generated."""

from __future__ import annotations

from typing import Literal

import msgspec


class ARSamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ar"):
    """Autoregressive sampling. Log-probs are those of the distribution after temperature, top-k and top-p."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy: the log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int = 0
    """The job's seed; a sample's own seed derives from it, its root, its sibling number and its turn."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with the first of them, which is part of the completion."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (all) or more")


class DiffusionSamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="diffusion"):
    """Flow-matching sampling. Sigmas are pinned by the request; an engine never makes its own."""

    num_inference_steps: int
    height: int
    width: int
    num_frames: int = 1
    guidance_scale: float = 1.0
    guidance_scale_2: float | None = None
    """Of the second expert, where a family has two; None: the same."""
    eta: float = 0.7
    sigmas: tuple[float, ...] | None = None
    """`num_inference_steps + 1` values, descending; None only before the controller has pinned them."""
    sde_indices: tuple[int, ...] | None = None
    """Steps that draw noise; None is every step, an empty tuple is none. The engine refuses those outside of the schedule."""
    kernel: Literal["flow", "dance", "cps"] = "flow"
    """Of the steps that draw."""
    solver: Literal["euler", "dpm2", "unipc"] = "euler"
    """Of schedules in which no step draws."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    shared_noise: bool = False
    """The samples of a prompt begin with the same noise."""
    noise_by_prompt: bool = False
    """The initial noise belongs to the prompt's text and the sample's number, whatever ids they have: panels compare across
    steps, jobs and data sets."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_inference_steps < 1:
            raise ValueError(f"num_inference_steps {self.num_inference_steps}: must be at least 1")
        if self.sigmas is not None and len(self.sigmas) != self.num_inference_steps + 1:
            raise ValueError(f"sigmas: {len(self.sigmas)} values, must be {self.num_inference_steps + 1}")

    @property
    def guidance_scales(self) -> tuple[float, float | None]:
        return self.guidance_scale, self.guidance_scale_2

    def resolve_sde_indices(self) -> tuple[int, ...]:
        """The stochastic steps: the pinned list in its order, else every step."""
        return tuple(range(self.num_inference_steps)) if self.sde_indices is None else self.sde_indices


SamplingParams = ARSamplingParams | DiffusionSamplingParams
