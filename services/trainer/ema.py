"""Exponential moving averages of what is trained. Golden topic 11."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.config.sections import Ema as Section


def decay(section: Section, t: int) -> float:
    """How much of the shadow stays at update number t.

    full: `min((1 + t) / (10 + t), decay)`. constant: `decay`. linear: `min(t uprate, uphold)`. warmup: 0 for t < flat_steps,
    then `min((t - flat_steps) uprate, uphold)`.
    """
    if section.schedule == "full":
        return min((1 + t) / (10 + t), section.decay)
    if section.schedule == "linear":
        return min(t * section.uprate, section.uphold)
    if section.schedule == "warmup":
        return 0.0 if t < section.flat_steps else min((t - section.flat_steps) * section.uprate, section.uphold)
    return section.decay


class Ema:
    """Shadows of parameters, shard by shard: `shadow <- d shadow + (1 - d) live`; `d <= 0` copies."""

    def __init__(self, section: Section, live: Mapping[str, Tensor]) -> None:
        self.section, self.live = section, live
        self.shadow = {name: value.detach().clone() for name, value in live.items()}

    def stepped(self, before: int) -> None:
        """After an optimizer step; `before`: steps that were committed before it."""
        if self.section.timing == "optimizer_step":
            self._update(decay(self.section, before))

    def batch_done(self, committed: int) -> None:
        """After the last update of a batch."""
        if self.section.timing == "rollout_end":
            self._update(decay(self.section, committed))

    @torch.no_grad()
    def _update(self, d: float) -> None:
        for name, shadow in self.shadow.items():
            if d <= 0:
                shadow.copy_(self.live[name])
            else:
                shadow.lerp_(self.live[name].to(shadow.dtype), 1 - d)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges live weights and shadows, in place; a second call exchanges them back."""
        for name, shadow in self.shadow.items():
            held = self.live[name].clone()
            self.live[name].copy_(shadow)
            shadow.copy_(held)
