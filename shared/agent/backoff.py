"""When to start a failed child again."""

from __future__ import annotations

import time


class Backoff:
    """Doubling delays from `first` to `most` seconds; a run of `healthy` seconds starts over."""

    def __init__(self, first: float = 0.5, most: float = 30.0, healthy: float = 60.0) -> None:
        self.first, self.most, self.healthy = first, most, healthy
        self.failures = 0
        self.until = 0.0

    def failed(self, ran_s: float) -> float:
        """Notes a failure; returns the delay until the next start in seconds."""
        if ran_s >= self.healthy:
            self.failures = 0
        delay = float(min(self.most, self.first * 2**self.failures))
        self.failures += 1
        self.until = time.monotonic() + delay
        return delay

    @property
    def ready(self) -> bool:
        return time.monotonic() >= self.until
