"""Records in files: JSON lines (also compressed), parquet, and data sets that Hugging Face's library saved to disk."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import zstandard

from services.controller.data.record import Record, check_text, fingerprint_of
from shared.config import builtin
from shared.config.problems import BadInput, Problem, bad, nearest
from shared.files import checksum

Columns = builtin.Columns


def record_of(
    value: dict[str, Any], columns: Columns, error: Callable[[Any, str, str], BadInput], folder: Path | None = None
) -> Record:
    """One row as a record; `error(value, message, legal)` makes the complaint about it. `folder`: where its file lies."""
    talk = columns.messages
    field = columns.prompt if talk is None else talk
    for name in (field, columns.target, columns.id, columns.picture, columns.reference):
        if name is not None and name not in value:
            near = nearest(name, value)
            raise error(None, f"field {name!r} is missing" + (f"; did you mean {near!r}?" if near else ""), ", ".join(value))
    prompt = value[field]
    if not isinstance(prompt, str | list) or not prompt or (talk is not None and isinstance(prompt, str)):
        what, legal = ("prompt", "text or messages, not empty") if talk is None else ("conversation", "messages, not empty")
        raise error(repr(prompt)[:80], f"field {field!r} holds no {what}", legal)
    if isinstance(prompt, list):
        prompt = _messages(prompt, field, error)
    target = value[columns.target] if columns.target else None
    if columns.target and not isinstance(target, str):
        raise error(target, f"field {columns.target!r} holds no target text", "text")
    picture, reference = (_path(value, name, folder, error) for name in (columns.picture, columns.reference))
    rest = {k: v for k, v in value.items() if k not in (field, columns.target, columns.picture, columns.reference)}
    if columns.id:
        rest["id"] = value[columns.id]
    check_text([prompt, target, rest], lambda what: error(None, what, "valid Unicode text"))
    conversation = talk is not None
    return Record(prompt=prompt, target=target, conversation=conversation, picture=picture, reference=reference, metadata=rest)


def _path(value: dict[str, Any], field: str | None, folder: Path | None, error: Callable[..., BadInput]) -> str | None:
    if field is None:
        return None
    if not isinstance(found := value[field], str):
        raise error(found, f"field {field!r} holds no path", "text")
    return found if folder is None else str(folder / found)


def _messages(messages: list[Any], field: str, error: Callable[[Any, str, str], BadInput]) -> list[dict[str, Any]]:
    """Without the keys that a table fills with nulls where other rows have them."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            what = f"message {number} in field {field!r} has no role"
            raise error(repr(message)[:80], what, "objects with role and content")
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]


def plain(path: Path, cache: Path, digest: str) -> Path:
    """The file itself, or its decompressed copy: rows are read by their place."""
    if path.suffix not in (".gz", ".zst", ".zstd"):
        return path
    target = cache / f"{digest}.jsonl"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = cache / f".{uuid4().hex}"
        try:
            unpacked: Any = (gzip if path.suffix == ".gz" else zstandard).open(path)
            with unpacked as source, temporary.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 22)
            temporary.rename(target)
        except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise bad("data.source.params.path", str(path), f"cannot be decompressed: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return target


class JsonlSource:
    """One JSON object a line. Opening reads every line once: a broken one is named before anything starts."""

    def __init__(self, params: builtin.Jsonl, path: Path, cache: Path) -> None:
        self.params, self.name, self.shuffle = params, path.name, params.shuffle
        digest = checksum(path)
        self.fingerprint = fingerprint_of(params, digest)
        self.path, self.folder = plain(path, cache, digest), path.parent
        self.offsets = self._checked()
        self.file = self.path.open("rb")

    @property
    def size(self) -> int:
        return len(self.offsets)

    def get(self, row: int) -> Record:
        self.file.seek(int(self.offsets[row]))
        return self._record(self.file.readline(), row + 1)

    def _checked(self) -> np.ndarray[Any, Any]:
        offsets, seen, position = [], set(), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    record = self._record(line, number)
                    if (name := record.metadata.get("id")) in seen and self.params.id:
                        raise self._bad(number, name, f"the id in field {self.params.id!r} stands twice", "unique ids")
                    seen.add(name if self.params.id else number)
                    offsets.append(position)
                position += len(line)
        if not offsets:
            raise bad("data.source.params.path", str(self.path), "the file holds no records")
        return np.asarray(offsets, np.int64)

    def _record(self, line: bytes, number: int) -> Record:
        try:
            value = json.loads(line)  # the standard reader keeps lone surrogates, so that they can be named
        except ValueError as error:
            raise self._bad(number, line[:80].decode(errors="replace"), f"not valid JSON: {error}", "one object") from error
        if not isinstance(value, dict):
            raise self._bad(number, type(value).__name__, "not an object", "one JSON object a line")
        return record_of(value, self.params, lambda *what: self._bad(number, *what), self.folder)

    def _bad(self, number: int, value: Any, message: str, legal: str) -> BadInput:
        return BadInput([Problem(field=f"{self.name} line {number}", value=value, message=message, legal=legal)])


class TableSource:
    """Rows of an Arrow table: parquet, or a data set saved to disk. Read through memory maps, row by row."""

    def __init__(self, params: Columns, files: Sequence[Path], at: str) -> None:
        self.params, self.at, self.shuffle, self.folder = params, at, params.shuffle, files[0].parent
        self.fingerprint = fingerprint_of(params, *map(checksum, files))
        try:
            tables = [_table(path) for path in files]
            self.table = pa.concat_tables(tables)
        except (pa.ArrowInvalid, OSError) as error:
            raise bad(at, ", ".join(p.name for p in files), f"cannot be read: {error}") from error
        if not self.table.num_rows:
            raise bad(at, ", ".join(p.name for p in files), "the table holds no rows")
        if params.id is not None:
            self._unique(params.id)

    @property
    def size(self) -> int:
        return int(self.table.num_rows)

    def get(self, row: int) -> Record:
        [value] = self.table.slice(row, 1).to_pylist()
        return record_of(value, self.params, lambda *what: self._bad(row, *what), self.folder)

    def _unique(self, name: str) -> None:
        if name not in self.table.column_names:
            raise self._bad(0, None, f"field {name!r} is missing", ", ".join(self.table.column_names))
        counts = self.table.column(name).value_counts().to_pylist()
        twice = next((c["values"] for c in counts if c["counts"] > 1), None)
        if twice is not None:
            raise bad(self.at, twice, f"the id in field {name!r} stands twice", "unique ids")

    def _bad(self, row: int, value: Any, message: str, legal: str) -> BadInput:
        return BadInput([Problem(field=f"{self.at} row {row + 1}", value=value, message=message, legal=legal)])


def _table(path: Path) -> pa.Table:
    if path.suffix == ".arrow":
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all()
    return pyarrow.parquet.read_table(path, memory_map=True)


def saved_files(folder: Path, at: str) -> list[Path]:
    """The Arrow files of a data set that `save_to_disk` wrote, in the order of its own state file."""
    state = folder / "state.json"
    if not state.exists():
        legal = "a folder that `datasets.Dataset.save_to_disk` wrote (one split)"
        raise bad(at, str(folder), "no saved data set", legal)
    names = [Path(entry["filename"]).name for entry in json.loads(state.read_text())["_data_files"]]
    return [folder / name for name in names]
