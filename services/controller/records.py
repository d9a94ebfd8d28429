"""What a job trained on, kept for people: an SQLite file that a thread fills from the train log.

The log itself is trimmed and its bodies are swept; this keeps ids, rewards, advantages, versions, workers and times of every
trained sample, and the text of some. Nothing waits for it, and nothing is decided by it.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from shared.types.sample import Sample
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.client import AWAY
from shared.wire.codec import unpack
from shared.wire.envelope import BodyRef, LogEntry, SliceHead, TrainSlice
from shared.wire.errors import BodyLost, WireError
from shared.wire.keys import JobKeys
from shared.wire.scripts import text

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS place (incarnation INTEGER, seq INTEGER);
CREATE TABLE IF NOT EXISTS groups (
    gid TEXT PRIMARY KEY, root TEXT, issue INTEGER, step INTEGER, seq INTEGER, incarnation INTEGER,
    issued_at REAL, ready_at REAL, scored_by TEXT
);
CREATE TABLE IF NOT EXISTS samples (
    id TEXT, gid TEXT, step INTEGER, part INTEGER, track TEXT, reward REAL, advantage REAL, components TEXT, status TEXT,
    tokens INTEGER, version INTEGER, worker TEXT, seconds TEXT, body TEXT, row INTEGER, prompt TEXT, completion TEXT,
    PRIMARY KEY (gid, id)
);
CREATE INDEX IF NOT EXISTS by_step ON samples (step);
CREATE INDEX IF NOT EXISTS groups_by_root ON groups (root);
"""
COLUMNS = (
    "id", "gid", "step", "part", "track", "reward", "advantage", "components", "status", "tokens", "version", "worker",
    "seconds", "body", "row", "prompt", "completion",
)  # fmt: skip
NICENESS = 10
FAULTS = (redis.RedisError, sqlite3.Error, OSError, WireError)


class Records:
    """The file of one job. Opened for each use: readers and the writer are different threads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A transaction; the file and its tables are made if they are not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=10)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(SCHEMA)
            with connection:
                yield connection
        finally:
            connection.close()

    def place(self) -> tuple[int, int]:
        """(incarnation, seq) of the last record taken in."""
        with self.open() as connection:
            row = connection.execute("SELECT incarnation, seq FROM place").fetchone()
        return (row["incarnation"], row["seq"]) if row else (0, 0)

    def add(self, entry: LogEntry, texts: Mapping[str, tuple[str, str]], keep_steps: int) -> None:
        """One record of the log. What an older history had written of the same or later steps is taken back."""
        with self.open() as connection:
            if entry.kind == "train":
                _drop(connection, "step >= ?", entry.step)
                _drop(connection, "step <= ?", entry.step - keep_steps)
                _insert(connection, entry, texts)
            connection.execute("DELETE FROM place")
            connection.execute("INSERT INTO place VALUES (?, ?)", (entry.incarnation, entry.seq))

    def samples(
        self,
        step: int | None = None,
        status: str | None = None,
        least: float | None = None,
        most: float | None = None,
        gid: str | None = None,
        after: tuple[int, str] | None = None,
        limit: int = 50,
    ) -> list[dict[str, Any]]:
        """Newest step first, within a step by id. `after`: (step, id) of the last one of the page before."""
        wanted = [("step = ?", step), ("status = ?", status), ("reward >= ?", least), ("reward <= ?", most), ("gid = ?", gid)]
        where = [(text, value) for text, value in wanted if value is not None]
        clauses, values = [t for t, _ in where], [v for _, v in where]
        if after is not None:
            clauses.append("(step < ? OR (step = ? AND id > ?))")
            values += [after[0], after[0], after[1]]
        condition = " AND ".join(clauses) or "1"
        with self.open() as connection:
            query = f"SELECT * FROM samples WHERE {condition} ORDER BY step DESC, id LIMIT ?"
            rows = connection.execute(query, (*values, limit)).fetchall()
        return [_shown(row) for row in rows]

    def body(self, gid: str, name: str) -> BodyRef | None:
        """Where the message of a sample's slice lies (or lay)."""
        with self.open() as connection:
            row = connection.execute("SELECT body FROM samples WHERE gid = ? AND id = ?", (gid, name)).fetchone()
        return None if row is None or row["body"] is None else unpack(bytes.fromhex(row["body"]), BodyRef)

    def lineage(self, name: str) -> list[dict[str, Any]]:
        """Every issue of a root, group or sample that was trained, with its samples."""
        root = name.partition("#")[0].partition("/")[0]
        with self.open() as connection:
            groups = [dict(g) for g in connection.execute("SELECT * FROM groups WHERE root = ? ORDER BY issue", (root,))]
            for group in groups:
                found = connection.execute("SELECT * FROM samples WHERE gid = ? ORDER BY part, id", (group["gid"],))
                group["samples"] = [_shown(row) for row in found]
        for group in groups:
            group["scored_by"] = json.loads(group["scored_by"])
        if "#" in name:
            return [g for g in groups if g["gid"] == name]
        if "/" in name:
            for group in groups:
                group["samples"] = [s for s in group["samples"] if name == s["id"] or name.startswith(f"{s['id']}/")]
        return [g for g in groups if g["samples"]]


def _drop(connection: sqlite3.Connection, condition: str, value: int) -> None:
    for table in ("samples", "groups"):
        connection.execute(f"DELETE FROM {table} WHERE {condition}", (value,))


def _insert(connection: sqlite3.Connection, entry: LogEntry, texts: Mapping[str, tuple[str, str]]) -> None:
    slices = iter(entry.slices)
    for note in entry.groups:
        root, _, issue = note.gid.partition("#")
        connection.execute(
            "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (note.gid, root, int(issue), entry.step, entry.seq, entry.incarnation, note.issued_at, note.ready_at,
             json.dumps(note.scored_by)),
        )  # fmt: skip
        rows: list[tuple[Any, ...]] = []
        first = 0
        for piece in (next(slices) for _ in range(note.slices)):
            count = len(piece.head.parts[-1].ids)
            components = {n: v[first : first + count] for n, v in note.components.items()}
            rows += _rows(entry, note.gid, piece, components, texts)
            first += count
        marks = ", ".join("?" * len(COLUMNS))
        connection.executemany(f"INSERT OR REPLACE INTO samples VALUES ({marks})", rows)


def _rows(
    entry: LogEntry,
    gid: str,
    piece: TrainSlice,
    components: Mapping[str, Sequence[float]],
    texts: Mapping[str, tuple[str, str]],
) -> Iterator[tuple[Any, ...]]:
    head = piece.head
    body = None if head.body is None else codec.pack(head.body).hex()
    for number, (part, rewards, advantages) in enumerate(zip(head.parts, piece.rewards, piece.advantages, strict=True), 1):
        last = number == len(head.parts)
        for row, name in enumerate(part.ids):
            own = {n: v[row] for n, v in components.items()} if last else {}
            prompt, completion = texts.get(name, (None, None))
            yield (
                name, gid, entry.step, number, part.track,
                None if rewards is None else rewards[row],
                None if advantages is None else advantages[row],
                json.dumps(own), part.status[row] if part.status else "ok",
                part.lengths[row] if part.lengths else None,
                part.versions[row] if part.versions else None,
                head.worker, json.dumps(head.seconds), body, row, prompt, completion,
            )  # fmt: skip


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    found["components"], found["seconds"] = json.loads(found["components"]), json.loads(found["seconds"])
    del found["body"], found["row"]
    return found


def texts_of(head: SliceHead, body: codec.Buffer) -> dict[str, tuple[str, str]]:
    """Sample id → (prompt, completion) of the generated rows of a slice that hold text."""
    found: dict[str, tuple[str, str]] = {}
    for sample in codec.decode(body, list[Sample]):
        prompts = dict(zip(sample.parts[0].sample_ids, sample.parts[0].text, strict=False))
        for part in sample.gen_parts:
            if "text" in part.primitives:
                found |= {i: (prompts.get(i.partition("/")[0], ""), t) for i, t in zip(part.sample_ids, part.text, strict=True)}
    return found


class Recorder:
    """Follows a job's log while this controller holds the job. Waits for: log records. Unblocked by: the runner's commits."""

    def __init__(self, client: Any, keys: JobKeys, store: BodyStore, records: Records, texts: int, keep_steps: int) -> None:
        """`texts`: groups of each step whose text is kept."""
        self.client, self.keys, self.store, self.records = client, keys, store, records
        self.texts, self.keep_steps = texts, keep_steps
        self.lock = threading.Lock()
        self.stopping = threading.Event()

    def flush(self) -> None:
        """Takes in the whole log: the runner is about to trim it."""
        try:
            while self.catch_up():
                pass
        except (*AWAY, *FAULTS) as error:
            log.warning("samples are not recorded: %s", error)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.stopping.clear()
        thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            thread.join(5)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self.stopping.is_set():
            try:
                if not self.catch_up():
                    self.stopping.wait(0.5)
            except AWAY:
                self.stopping.wait(0.5)
            except FAULTS as error:
                log.warning("samples are not recorded: %s", error)
                self.stopping.wait(5)

    def catch_up(self, count: int = 8) -> int:
        """Takes in what the log holds beyond the last record; returns how many."""
        with self.lock:
            incarnation, seq = self.records.place()
            current = int(self.client.hget(self.keys.meta, "incarnation") or 0)
            start = f"({seq}-0" if incarnation == current else "-"
            rows = self.client.xrange(self.keys.log, start, "+", count=count)
            entries = [unpack(fields[b"e"], LogEntry) for _, fields in rows]
            for entry in entries:
                self.records.add(entry, self._texts(entry), self.keep_steps)
            return len(entries)

    def _texts(self, entry: LogEntry) -> dict[str, tuple[str, str]]:
        count = sum(note.slices for note in entry.groups[: self.texts])
        heads = [piece.head for piece in entry.slices[:count] if piece.head.body is not None]
        found: dict[str, tuple[str, str]] = {}
        for head in heads:
            assert head.body is not None
            try:
                found |= texts_of(head, self.store.load(head.body))
            except (BodyLost, WireError, ValueError) as error:
                log.info("no text of %s: %s", text(head.parts[0].ids[0]), error)
        return found
