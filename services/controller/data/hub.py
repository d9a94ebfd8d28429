"""Data sets by their name on the Hugging Face Hub: read through `datasets`, whole or as a stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.controller.data.files import TableSource, record_of
from services.controller.data.record import Record, Source, fingerprint_of
from shared.config import builtin
from shared.config.problems import BadInput, Problem, bad
from shared.config.settings import Settings

RECENT = 20_000
"""Rows of a stream that are kept: prompts issued again are among them."""


def open_hub(params: builtin.Hub, settings: Settings, at: str) -> Source:
    """BadInput if it cannot be had: no such name, no network, no such split."""
    place = f"{at}.params.name"
    if Path(params.name).exists():  # the library would take it for a folder, wherever that lies
        raise bad(place, params.name, "is also a folder here", "source saved_dataset, jsonl or parquet for files")
    try:
        import datasets
    except ImportError as error:
        raise bad(f"{at}.name", "hub", "needs the package datasets", "pip install unimesh[datasets]") from error
    datasets.utils.logging.disable_progress_bar()
    chosen = {"name": params.config, "split": params.split, "revision": params.revision, "streaming": params.streaming}
    try:
        found = datasets.load_dataset(params.name, cache_dir=str(settings.state / "cache" / "hub"), **chosen)
    except Exception as error:  # whatever the library or its network code raises
        said = f"cannot be loaded: {type(error).__name__}: {str(error)[:300]}"
        legal = "OWNER/NAME on the Hub, its configuration and split; HF_HUB_OFFLINE=0 where the controller may go online"
        raise bad(place, params.name, said, legal) from error
    if params.streaming:
        return StreamSource(params, found, place)
    return TableSource(params, [Path(entry["filename"]) for entry in found.cache_files], place)


class StreamSource:
    """Rows in the order of the stream. After its end it begins again; going back further than RECENT rows does so too."""

    size = None
    shuffle = False

    def __init__(self, params: builtin.Hub, stream: Any, at: str) -> None:
        self.params, self.stream, self.at = params, stream, at
        self.fingerprint = fingerprint_of(params)
        self.rows: Iterator[dict[str, Any]] = iter(stream)
        self.next = 0
        """Number of the row that the iterator yields next."""
        self.length: int | None = None
        self.recent: OrderedDict[int, Record] = OrderedDict()

    def get(self, row: int) -> Record:
        if self.length is not None:
            row %= self.length
        if row in self.recent:
            return self.recent[row]
        if row < self.next:
            self.rows, self.next = iter(self.stream.skip(row)), row
        for value in self.rows:
            self.next += 1
            if self.next > row:
                return self._keep(row, value)
        if not self.next:
            raise bad(self.at, self.params.name, "the data set holds no rows")
        self.length, self.rows, self.next = self.next, iter(self.stream), 0
        return self.get(row)

    def _keep(self, row: int, value: dict[str, Any]) -> Record:
        def complaint(value: Any, message: str, legal: str) -> BadInput:
            return BadInput([Problem(field=f"{self.at} row {row + 1}", value=value, message=message, legal=legal)])

        record = self.recent[row] = record_of(value, self.params, complaint)
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)
        return record
