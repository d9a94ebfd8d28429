"""Leases on the versions that evaluations and cohorts are pinned to: the store keeps them, however far training goes on."""

from __future__ import annotations

import math
import time

from services.controller.lifecycles.state import Gone, Root
from shared.config.settings import Settings
from shared.weights.store import LEASE_S, WeightStore

Pin = tuple[str, int, int]
"""Track, incarnation, version."""


class Pins:
    """Of one job. The leases run out by themselves if this controller dies; the next one takes its own."""

    def __init__(self, settings: Settings, job: str, holder: str, live: bool) -> None:
        """`live`: versions are not read from the store, so there is nothing to hold."""
        self.live = live
        self.folder, self.holder = settings.weights(job), f"evaluation-{holder}"
        self.held: dict[Pin, float] = {}
        """When each was taken or renewed."""

    def hold(self, root: Root) -> list[Gone]:
        """Holds what evaluations and cohorts under way need: call it before they are issued, and now and then. Returns those
        versions that had been published and are not there any more."""
        gone = []
        for pin in () if self.live else _wanted(root):
            if time.monotonic() - self.held.get(pin, -math.inf) < LEASE_S / 4:
                continue
            track, incarnation, version = pin
            self._store(pin).hold(incarnation, version, self.holder)
            self.held[pin] = time.monotonic()
            if version <= root.published.get(track, -1) and not self._store(pin).has(incarnation, version):
                gone.append(Gone(track, version))
        return gone

    def release(self, root: Root) -> None:
        """Lets go of all else: call it once `root` is durable."""
        for pin in self.held.keys() - _wanted(root):
            self._store(pin).release(*pin[1:], self.holder)
            del self.held[pin]

    def forget(self) -> None:
        """What is held is looked at anew: time may have passed."""
        self.held.clear()

    def _store(self, pin: Pin) -> WeightStore:
        return WeightStore(self.folder, pin[0])


def _wanted(root: Root) -> set[Pin]:
    needed = [*(run.versions for run in root.evals), *root.cohorts.values()]
    return {(track, root.incarnation, version) for versions in needed for track, version in versions.items()}
