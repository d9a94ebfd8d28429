"""Sigma schedules of flow matching, from 1 down to 0. Numpy: the controller pins them in the request. Golden topic 6."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

Array = np.ndarray[Any, np.dtype[np.float32]]
Shift = Literal["exponential", "linear"]


class Policy(pydantic.BaseModel):
    """What decides a model's schedule. Defaults are those of a static shift."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    shift: float = pydantic.Field(3.0, gt=0)
    """Static: `s = shift t / (1 + (shift - 1) t)`."""
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    time_shift_type: Shift = "exponential"
    shift_terminal: float | None = None
    """The last sigma before 0."""
    vae_scale_factor: int = pydantic.Field(8, ge=1)
    patch_size: int = pydantic.Field(2, ge=1)
    mu: Literal["linear", "flux2_klein"] | float = "linear"
    """Dynamic: how mu follows from the image's size, or mu itself."""

    def sigmas(self, steps: int, height: int, width: int) -> Array:
        """[steps + 1]; static ones do not depend on the image's size. ValueError if the policy makes no schedule."""
        if not self.use_dynamic_shifting:
            return static_sigmas(steps, self.shift, self.shift_terminal)
        return dynamic_sigmas(steps, self._mu(self.tokens(height, width), steps), self.time_shift_type, self.shift_terminal)

    def tokens(self, height: int, width: int) -> int:
        """Patches of an image."""
        cell = (self.vae_scale_factor, self.patch_size)
        return (height // cell[0] // cell[1]) * (width // cell[0] // cell[1])

    def _mu(self, tokens: int, steps: int) -> float:
        if isinstance(self.mu, float):
            return self.mu
        if self.mu == "flux2_klein":
            return flux2_klein_mu(tokens, steps)
        return dynamic_mu(tokens, self.base_image_seq_len, self.max_image_seq_len, self.base_shift, self.max_shift)


def static_sigmas(steps: int, shift: float, terminal: float | None = None) -> Array:
    """`t = linspace(1, 0, steps + 1)`, shifted. ValueError for a terminal stretch, which only dynamic schedules have."""
    if steps < 1:
        raise ValueError(f"steps {steps}: must be at least 1")
    if terminal:
        raise ValueError(f"shift_terminal {terminal}: only dynamic schedules have one")
    t = np.linspace(1, 0, steps + 1)
    return np.asarray(shift * t / (1 + (shift - 1) * t), np.float32)


def scheduler_sigmas(steps: int, shift: float, timesteps: int = 1000) -> Array:
    """The grid that diffusers' scheduler makes where its pipeline gives none (SD3, Wan): even between its shifted ends, and
    shifted once more; then 0."""
    if steps < 1:
        raise ValueError(f"steps {steps}: must be at least 1")

    def shifted(t: Any) -> Any:
        return shift * t / (1 + (shift - 1) * t)

    grid = np.linspace(shifted(1.0), shifted(1 / timesteps), steps)
    return np.append(shifted(grid), 0.0).astype(np.float32)


def dynamic_sigmas(steps: int, mu: float, kind: Shift = "exponential", terminal: float | None = None) -> Array:
    """`u = linspace(1, 1/steps, steps)`; `s = e / (e + 1/u - 1)` with `e = exp(mu)` or mu; then 0.

    With `terminal`: `s <- 1 - (1 - s)(1 - terminal) / (1 - s_last)`, so that the last sigma before 0 is it.
    """
    if steps < 1:
        raise ValueError(f"steps {steps}: must be at least 1")
    if kind not in ("exponential", "linear"):
        raise ValueError(f"time_shift_type {kind!r}: legal are exponential, linear")
    u = np.linspace(1, 1 / steps, steps)
    e = math.exp(mu) if kind == "exponential" else mu
    s = e / (e + 1 / u - 1)
    if terminal and s[-1] < 1:  # a single step stays at 1
        s = 1 - (1 - s) * (1 - terminal) / (1 - s[-1])
    return np.append(s, 0.0).astype(np.float32)


def dynamic_mu(tokens: int, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float) -> float:
    """On the line through (base_tokens, base_shift) and (max_tokens, max_shift), also outside of it."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (tokens - base_tokens)


def flux2_klein_mu(tokens: int, steps: int) -> float:
    """FLUX.2's empirical mu: a line in the number of steps between those of 10 and of 200."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return slope * steps + at_200 - 200 * slope


def policy_of(
    folder: Path | None, shift: float = 3.0, require_dynamic: bool = False, constants: Mapping[str, Any] | None = None
) -> Policy:
    """From a checkpoint's own configs; its static `shift` is left aside for the caller's. Without a folder from `constants`
    (of a dynamic schedule) alone; ValueError if it is to be dynamic and neither is there."""
    if folder is None:
        if require_dynamic and not constants:
            raise ValueError("a dynamic schedule needs the checkpoint's configs, or its constants")
        own = dict(constants or {})
        if "patch_size" in own:
            own["patch_size"] = _patch(own["patch_size"])
        return Policy.model_validate({"shift": shift, "use_dynamic_shifting": require_dynamic} | own)
    scheduler, transformer, vae = (
        _config(folder / part) for part in ("scheduler/scheduler_config.json", "transformer/config.json", "vae/config.json")
    )
    channels = vae.get("block_out_channels") or ()
    found: dict[str, Any] = {
        "shift": shift,
        "patch_size": _patch(transformer.get("patch_size")),
        "vae_scale_factor": 2 ** (len(channels) - 1) if channels else 8,
        "shift_terminal": scheduler.get("shift_terminal") or None,
    }
    names = ("use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type")
    return Policy.model_validate(found | {n: scheduler[n] for n in names if scheduler.get(n) is not None})


def static_shift(folder: Path) -> float | None:
    """That of the checkpoint's scheduler (some call it flow_shift); None if it names none."""
    scheduler = _config(folder / "scheduler/scheduler_config.json")
    found = scheduler.get("shift", scheduler.get("flow_shift"))
    return None if found is None else float(found)


def _patch(size: Any) -> Any:
    """Of a list (frames, height, width) the last."""
    return (size[-1] if isinstance(size, list) else size) if size else 2


def _config(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}
