"""Sources by name, and mixtures of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from services.controller.data.files import JsonlSource, TableSource, saved_files
from services.controller.data.hub import open_hub
from services.controller.data.order import DataOrder
from services.controller.data.procedural import ReasoningGymSource, SortingSource
from services.controller.data.record import Record, Source, fingerprint_of
from shared.config import builtin, specs
from shared.config.problems import bad
from shared.config.sections import Component
from shared.config.settings import Settings

Array = np.ndarray[Any, Any]
CYCLE = 1000
"""Draws after which a mixture's schedule repeats: weights are met to a thousandth."""


class MixtureSource:
    """Draws from several sources by weight, evenly spread; each goes through its own epochs. It never ends."""

    shuffle = False
    size = None

    def __init__(self, params: builtin.Mixture, sources: Mapping[str, Source]) -> None:
        self.names = list(sources)
        self.sources = list(sources.values())
        weights = np.asarray([params.parts[name].weight for name in self.names], np.float64)
        self.cycle, self.before = _schedule(weights / weights.sum())
        self.counts = np.bincount(self.cycle, minlength=len(self.names))
        self.orders = [DataOrder(n, s.size, s.shuffle, params.seed) for n, s in zip(self.names, self.sources, strict=True)]
        self.fingerprint = fingerprint_of(params, *(s.fingerprint for s in self.sources))

    def get(self, row: int) -> Record:
        turn, place = divmod(row, CYCLE)
        which = int(self.cycle[place])
        draw = turn * int(self.counts[which]) + int(self.before[place])
        record = self.sources[which].get(self.orders[which].place(draw)[1])
        return msgspec.structs.replace(record, metadata=record.metadata | {"source": self.names[which]})


def _schedule(shares: Array) -> tuple[Array, Array]:
    """For each place of a cycle the source whose share is furthest behind, and how often it came before."""
    cycle, before = np.zeros(CYCLE, np.int64), np.zeros(CYCLE, np.int64)
    taken = np.zeros(len(shares), np.int64)
    for place in range(CYCLE):
        which = int(np.argmax(shares * (place + 1) - taken))
        cycle[place], before[place] = which, taken[which]
        taken[which] += 1
    return cycle, before


def open_source(component: Component, settings: Settings, at: str) -> Source:
    """BadInput names the field, or the line of the file."""
    params = specs.check("source", component.name, component.params, at)
    match params:
        case builtin.Jsonl():
            return JsonlSource(params, settings.allowed(params.path, f"{at}.params.path"), settings.state / "cache")
        case builtin.Parquet():
            return TableSource(params, [settings.allowed(params.path, f"{at}.params.path")], f"{at}.params.path")
        case builtin.SavedDataset():
            place = f"{at}.params.path"
            return TableSource(params, saved_files(settings.allowed(params.path, place), place), place)
        case builtin.Hub():
            return open_hub(params, settings, at)
        case builtin.Mixture():
            return _mixture(params, settings, at)
        case builtin.ReasoningGymSource():
            source = ReasoningGymSource(params)
            source.dataset  # noqa: B018  (a wrong name or config is an error now, not in the middle of a run)
            return source
    return SortingSource(params)


def _mixture(params: builtin.Mixture, settings: Settings, at: str) -> MixtureSource:
    found = {}
    for name, part in params.parts.items():
        place = f"{at}.params.parts.{name}"
        if part.name == "mixture":
            raise bad(f"{place}.name", part.name, "a mixture of mixtures is one mixture: give the parts their weights")
        found[name] = open_source(Component(name=part.name, params=part.params), settings, place)
    return MixtureSource(params, found)
