"""Which stages a rollout worker serves now: training always, evaluations while it has a seat for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.wire.hops import eval_stage
from shared.wire.keys import JobKeys
from shared.wire.scripts import Scripts

TTL_MS = 10_000
ASK_S = 1.0
"""Asked again after so long, if the consumer comes by; a blocked read may take two seconds."""


class Seat:
    """Asked by the consumer before each read.

    While evaluations are in hand nothing is taken for training: their version is not left before they are done.
    """

    def __init__(self, keys: JobKeys, track: str, name: str, share: float, held: Callable[[str], int]) -> None:
        """`share`: of the track's workers, those that may evaluate at once. `held`: messages of a stage in hand."""
        self.keys, self.track, self.name, self.share, self.held = keys, track, name, share, held
        self.training, self.evaluating = f"rollout.{track}", eval_stage(f"rollout.{track}")
        self.seated = share >= 1
        self.asked = -ASK_S

    def wanted(self, scripts: Scripts, stage: str) -> bool:
        """RedisError if there is no answer."""
        if stage == self.training:
            return not self.held(self.evaluating)
        if self.share < 1 and time.monotonic() - self.asked >= ASK_S:
            self.seated = scripts.seat(self.keys, self.track, self.name, TTL_MS, self.share)
            self.asked = time.monotonic()
        return self.seated
