"""Leases on the versions that evaluations and cohorts are pinned to: the store keeps them, however far training goes on."""

from __future__ import annotations

import time

from services.controller.lifecycles.state import Root
from shared.config.settings import Settings
from shared.weights.store import LEASE_S, WeightStore

Pin = tuple[str, int, int]
"""Track, incarnation, version."""


class Pins:
    """Of one job. The leases run out by themselves if this controller dies; the next one takes its own."""

    def __init__(self, settings: Settings, job: str, holder: str) -> None:
        self.folder, self.holder = settings.weights(job), f"evaluation-{holder}"
        self.held: dict[Pin, float] = {}
        """When each was taken or renewed."""

    def follow(self, root: Root) -> None:
        """Holds what evaluations and cohorts under way need, and nothing else. Call it before they are issued, and now and
        then."""
        needed = [*(run.versions for run in root.evals), *root.cohorts.values()]
        wanted = {(track, root.incarnation, version) for versions in needed for track, version in versions.items()}
        for pin in self.held.keys() - wanted:
            self._store(pin).release(*pin[1:], self.holder)
            del self.held[pin]
        for pin in wanted:
            if time.monotonic() - self.held.get(pin, -LEASE_S) > LEASE_S / 4:
                self._store(pin).hold(*pin[1:], self.holder)
                self.held[pin] = time.monotonic()

    def _store(self, pin: Pin) -> WeightStore:
        return WeightStore(self.folder, pin[0])
