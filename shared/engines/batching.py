"""What engines share: a thread that gathers what was submitted in batches that the engine chooses, and tells what has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from shared.engines.base import Done, Outcome, Slice

HAND_OVER_S = 0.02
"""Slices that end within so long are handed over together: handing over takes CPU time from the rows that go on."""


class Item(NamedTuple):
    samples: Slice
    alone: bool
    place: int
    """Among those submitted with it."""
    done: Done
    pinned: bool = True
    """To the version that it begins with."""


class BatchingEngine:
    """Subclasses say which waiting slices make the next batch, and compute it.

    Waits for: submits. Unblocked by: submit(), close().
    """

    version: int
    """Of the weights that it computes with."""

    def __init__(self, max_rows: int, wait_ms: float, threaded: bool = True) -> None:
        """Not `threaded`: it works when it is asked to, by `now`, and nothing is submitted."""
        self.max_rows, self.wait_ms = max_rows, wait_ms
        self.queue: SimpleQueue[list[Item] | None] = SimpleQueue()
        self.waiting: list[Item] = []
        self.progress = time.monotonic()
        self.quiet = threading.Condition()
        self.running = self.pinned = 0
        """Slices in hand, and those of them that are pinned."""
        self.suspending = False
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True) if threaded else None
        if self.thread is not None:
            self.thread.start()

    def choose(self) -> list[Item]:
        """The next batch, taken out of `waiting`, which is not empty."""
        raise NotImplementedError

    def generate(self, batch: list[Item], held: Held) -> None:
        """Fills the batch's slices; `held.ended` takes each of them as soon as it is done."""
        raise NotImplementedError

    def submit(self, slices: Sequence[Slice], done: Done, alone: bool = False, pinned: bool = True) -> None:
        with self.quiet:
            self.running += len(slices)
            self.pinned += pinned * len(slices)
        self.queue.put([Item(samples, alone, place, done, pinned) for place, samples in enumerate(slices)])

    def now(self, slices: Sequence[Slice], alone: bool = False) -> list[Outcome]:
        """Fills the slices in the caller's thread; in their order."""
        assert self.thread is None
        found: dict[int, Outcome] = {}
        self.running = self.pinned = len(slices)
        self.waiting = [Item(samples, alone, place, found.update) for place, samples in enumerate(slices)]
        while self.waiting:
            self._compute(self.choose())
        return [found[place] for place in range(len(slices))]

    def capacity(self) -> int:
        return self.max_rows

    def wait_until_idle(self) -> None:
        """Until what has been submitted is filled."""
        with self.quiet:
            self.quiet.wait_for(lambda: self.running == 0)

    def progressed(self) -> float:
        return self.progress

    def suspend(self) -> None:
        """What engines cannot interrupt, they finish."""

    def close(self) -> None:
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join(5)

    def _run(self) -> None:
        """Waits for a submit, then `wait_ms` for more like it."""
        while (batch := self._gather()) is not None:
            self._compute(batch)

    def _compute(self, batch: list[Item]) -> None:
        self.progress = time.monotonic()
        held = Held(batch)
        try:
            if self.suspending:
                held.rest(lambda place: batch[place].samples)
            else:
                self.generate(batch, held)
            held.hand_over()
        except Exception as error:  # whatever a model raises belongs to these slices
            held.failed(error)
        with self.quiet:
            self.running -= len(batch)
            self.pinned -= sum(item.pinned for item in batch)
            self.quiet.notify_all()

    def _gather(self) -> list[Item] | None:
        if not self.waiting:
            first = self.queue.get()
            if first is None:
                return None
            self.waiting += first
        deadline = time.monotonic() + self.wait_ms / 1000
        while sum(rows(item.samples) for item in self.waiting) < self.max_rows:
            try:
                items = self.queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if items is None:
                self.queue.put(None)
                break
            self.waiting += items
        return self.choose()

    def taken(self, chosen: list[Item]) -> list[Item]:
        """The chosen ones, which no longer wait."""
        gone = {id(item) for item in chosen}
        self.waiting = [item for item in self.waiting if id(item) not in gone]
        return chosen


class Held:
    """The slices of a batch that have ended, and those that are still open."""

    def __init__(self, batch: Sequence[Item]) -> None:
        self.open = dict(enumerate(batch))
        self.done: list[tuple[Item, Outcome]] = []
        self.since = 0.0

    def ended(self, place: int, samples: Slice) -> None:
        self.since = self.since if self.done else time.monotonic()
        self.done.append((self.open.pop(place), samples))

    def rest(self, made: Callable[[int], Slice]) -> None:
        """All that is still open, as it is: by the places in the batch."""
        for place in list(self.open):
            self.ended(place, made(place))

    def maybe(self, now: float) -> None:
        """Hands over what has waited long enough."""
        if self.done and now - self.since > HAND_OVER_S:
            self.hand_over()

    def hand_over(self) -> None:
        tell(self.done)
        self.done.clear()

    def failed(self, error: Exception) -> None:
        """What has ended is good; the rest has this error."""
        tell([*self.done, *((item, error) for item in self.open.values())])
        self.done.clear()


def tell(outcomes: Sequence[tuple[Item, Outcome]]) -> None:
    """Those that were submitted together hear of their slices together."""
    by_call: dict[int, tuple[Done, list[tuple[int, Outcome]]]] = {}
    for item, outcome in outcomes:
        by_call.setdefault(id(item.done), (item.done, []))[1].append((item.place, outcome))
    for done, found in by_call.values():
        done(found)


def rows(samples: Slice) -> int:
    return sum(len(s.frontier) for s in samples)
