"""What a job trained on, kept for people: an SQLite file that a thread fills from the train log.

The log itself is trimmed and its bodies are swept; this keeps ids, rewards, advantages, versions, workers and times of every
trained sample, and the text of some. Nothing waits for it, and nothing is decided by it.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import redis
import structlog

from services.controller.previews import Previews, media_of
from shared.types.part import Media
from shared.types.sample import Sample
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.client import AWAY
from shared.wire.codec import unpack
from shared.wire.envelope import BodyRef, GroupNote, LogEntry, Span, TrainSlice
from shared.wire.errors import BodyLost, WireError
from shared.wire.keys import JobKeys
from shared.wire.scripts import text

if TYPE_CHECKING:
    from services.controller.telemetry import Telemetry

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS place (incarnation INTEGER, seq INTEGER);
CREATE TABLE IF NOT EXISTS groups (
    gid TEXT PRIMARY KEY, root TEXT, step INTEGER, low REAL, high REAL, status TEXT, data BLOB
);
CREATE INDEX IF NOT EXISTS by_step ON groups (step, root);
CREATE INDEX IF NOT EXISTS by_root ON groups (root);
"""
NICENESS = 10
PICTURES = 4
"""Previews of a group."""
FAULTS = (redis.RedisError, sqlite3.Error, OSError, WireError)
Texts = dict[str, tuple[str, str]]
Shown = tuple[Texts, tuple[str, ...]]
"""Texts by sample, and the samples of which previews were kept."""


class Trained(msgspec.Struct, frozen=True):
    """What is kept of a group, as one value: a row a group costs a tenth of a row a sample."""

    note: GroupNote
    slices: tuple[TrainSlice, ...]
    seq: int
    incarnation: int
    texts: Texts
    """Sample id → (prompt, completion) of those whose text is kept."""
    pictures: tuple[str, ...] = ()
    """Samples of which there is a preview."""

    def samples(self, step: int) -> Iterator[dict[str, Any]]:
        first = 0
        for piece in self.slices:
            count = len(piece.head.parts[-1].ids)
            components = {n: v[first : first + count] for n, v in self.note.components.items()}
            first += count
            yield from self._slice(piece, components, step)

    def _slice(self, piece: TrainSlice, components: Mapping[str, Sequence[float]], step: int) -> Iterator[dict[str, Any]]:
        head = piece.head
        makers = [span.worker for span in head.spans if span.name.startswith("rollout.")]
        for number, (part, rewards, advantages) in enumerate(zip(head.parts, piece.rewards, piece.advantages, strict=True), 1):
            for row, name in enumerate(part.ids):
                prompt, completion = self.texts.get(name, (None, None))
                yield {
                    "step": step,
                    "id": name,
                    "gid": self.note.gid,
                    "part": number,
                    "track": part.track,
                    "reward": _finite(rewards, row),
                    "advantage": _finite(advantages, row),
                    "components": {n: _finite(v, row) for n, v in components.items()} if number == len(head.parts) else {},
                    "status": part.status[row] if part.status else "ok",
                    "tokens": part.lengths[row] if part.lengths else None,
                    "version": part.versions[row] if part.versions else None,
                    "worker": makers[number - 1] if number <= len(makers) else "",
                    "seconds": {span.name: span.seconds for span in head.spans},
                    "prompt": prompt,
                    "completion": completion,
                    "picture": name in self.pictures,
                }


def _finite(values: Sequence[float] | None, row: int) -> float | None:
    """None for what failed: JSON knows no NaN."""
    return None if values is None or not math.isfinite(values[row]) else values[row]


class Records:
    """The file of one job. Opened for each use: readers and the writer are different threads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def connect(self) -> sqlite3.Connection:
        """The file and its tables are made if they are not there. For several threads that take turns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=10, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 250")
        connection.executescript(SCHEMA)
        return connection

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A transaction on a connection of its own."""
        connection = self.connect()
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    @staticmethod
    def place(connection: sqlite3.Connection) -> tuple[int, int]:
        """(incarnation, seq) of the last record taken in."""
        row = connection.execute("SELECT incarnation, seq FROM place").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    @staticmethod
    def add(connection: sqlite3.Connection, entries: Sequence[tuple[LogEntry, Shown]], keep_steps: int) -> None:
        """Records of the log, in order. What an older history had written of the same or later steps is taken back."""
        with connection:
            for entry, shown in entries:
                if entry.kind == "train":
                    connection.execute("DELETE FROM groups WHERE step >= ? OR step <= ?", (entry.step, entry.step - keep_steps))
                    connection.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", _rows(entry, *shown))
            last = entries[-1][0]
            connection.execute("DELETE FROM place")
            connection.execute("INSERT INTO place VALUES (?, ?)", (last.incarnation, last.seq))

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
        wanted = [("step = ?", step), ("gid = ?", gid), ("high >= ?", least), ("low <= ?", most)]
        clauses = [text for text, value in wanted if value is not None]
        values: list[Any] = [value for _, value in wanted if value is not None]
        if status is not None:
            clauses.append("status LIKE ?")
            values.append(f"%{status}%")
        if after is not None:
            clauses.append("(step < ? OR (step = ? AND root >= ?))")
            values += [after[0], after[0], after[1].partition("/")[0]]
        step_before, id_before = after or (None, "")
        root_before, passed = id_before.partition("/")[0], after is None
        query = f"SELECT step, data FROM groups WHERE {' AND '.join(clauses) or '1'} ORDER BY step DESC, root"
        found: list[dict[str, Any]] = []
        with self.open() as connection:
            for number, data in connection.execute(query, values):
                for sample in unpack(data, Trained).samples(number):
                    reward = sample["reward"]
                    if not passed and number == step_before and sample["id"].partition("/")[0] == root_before:
                        passed = sample["id"] == id_before
                        continue
                    if status not in (None, sample["status"]):
                        continue
                    if (least is not None or most is not None) and reward is None:
                        continue
                    if (least is None or reward >= least) and (most is None or reward <= most):
                        found.append(sample)
                if len(found) >= limit:
                    break
        return found[:limit]

    def step(self, step: int) -> list[tuple[GroupNote, tuple[TrainSlice, ...]]]:
        """The groups that the step was trained on."""
        with self.open() as connection:
            rows = connection.execute("SELECT data FROM groups WHERE step = ? ORDER BY root", (step,)).fetchall()
        return [(kept.note, kept.slices) for kept in (unpack(data, Trained) for (data,) in rows)]

    def place_of(self, gid: str, name: str) -> tuple[int, BodyRef | None] | None:
        """A sample's step, and where the message of its slice lies (or lay); None for one that is not known."""
        with self.open() as connection:
            row = connection.execute("SELECT step, data FROM groups WHERE gid = ?", (gid,)).fetchone()
        slices = unpack(row[1], Trained).slices if row is not None else ()
        return next(((row[0], s.head.body) for s in slices if any(name in part.ids for part in s.head.parts)), None)

    def lineage(self, name: str) -> list[dict[str, Any]]:
        """Every trained issue of a root, group or sample, with its samples."""
        root = name.partition("#")[0].partition("/")[0]
        with self.open() as connection:
            rows = connection.execute("SELECT gid, step, data FROM groups WHERE root = ?", (root,)).fetchall()
        found = []
        for gid, step, data in rows:
            kept = unpack(data, Trained)
            samples = list(kept.samples(step))
            if "#" in name and gid != name:
                continue
            if "/" in name:
                samples = [s for s in samples if name == s["id"] or name.startswith(f"{s['id']}/")]
            if samples:
                note = kept.note
                group = {"gid": gid, "root": root, "issue": int(gid.rpartition("#")[2]), "step": step, "seq": kept.seq}
                scored_by = {span.name.partition(".")[2]: span.worker for span in reversed(note.scored)}
                times = {"issued_at": note.issued_at, "ready_at": note.ready_at, "scored_by": scored_by}
                found.append({**group, "incarnation": kept.incarnation, **times, "samples": samples})
        return sorted(found, key=lambda group: group["issue"])


def _rows(entry: LogEntry, texts: Texts, pictures: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    slices = iter(entry.slices)
    for note in entry.groups:
        own = tuple(next(slices) for _ in range(note.slices))
        rewards = [r for s in own for column in s.rewards for r in column or () if math.isfinite(r)]
        status = " ".join(sorted({word for s in own for part in s.head.parts for word in part.status or ("ok",)}))
        names = {i for s in own for part in s.head.parts for i in part.ids} if texts else set()
        said, seen = {i: t for i, t in texts.items() if i in names}, tuple(i for i in pictures if i in names)
        kept = Trained(note, own, entry.seq, entry.incarnation, said, seen)
        low, high = (min(rewards), max(rewards)) if rewards else (None, None)
        yield note.gid, note.gid.partition("#")[0], entry.step, low, high, status, codec.pack(kept)


def shown_of(body: codec.Buffer) -> tuple[Texts, dict[str, Media]]:
    """Of the generated rows of a slice, by sample id: (prompt, completion), and pictures."""
    texts: Texts = {}
    pictures: dict[str, Media] = {}
    for sample in codec.decode(body, list[Sample]):
        prompts = dict(zip(sample.parts[0].sample_ids, sample.parts[0].text, strict=False))
        for part in sample.gen_parts:
            said = part.text if "text" in part.primitives else ("",) * len(part)
            texts |= {i: (prompts.get(i.partition("/")[0], ""), t) for i, t in zip(part.sample_ids, said, strict=True)}
            pictures |= media_of(part)
    return texts, pictures


class Recorder:
    """Follows a job's log while this controller holds the job. Waits for: log records. Unblocked by: the runner's commits."""

    def __init__(
        self,
        client: Any,
        keys: JobKeys,
        store: BodyStore,
        records: Records,
        previews: Previews,
        texts: int,
        keep_steps: int,
        otlp: str | None = None,
    ) -> None:
        """`texts`: groups of each step whose text is kept. `otlp`: a collector that gets spans of what is recorded."""
        self.client, self.keys, self.store, self.records = client, keys, store, records
        self.previews, self.texts, self.keep_steps, self.otlp = previews, texts, keep_steps, otlp
        self.connection: sqlite3.Connection | None = None
        self.telemetry: Telemetry | None = None
        self.told = "0"
        """Place in the stream of spans."""
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
        if self.otlp is not None:
            from services.controller.telemetry import Telemetry

            newest = self.client.xrevrange(self.keys.spans, count=1)
            self.told = text(newest[0][0]) if newest else "0"
            self.telemetry = Telemetry(self.otlp, self.keys.job)
        thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            thread.join(5)
            self.flush()
            with self.lock:
                if self.connection is not None:
                    self.connection.close()
                    self.connection = None
            if self.telemetry is not None:
                self.telemetry.close()
                self.telemetry = None

    def _run(self) -> None:
        structlog.contextvars.bind_contextvars(job=self.keys.job)
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
            self.connection = self.connection or self.records.connect()
            incarnation, seq = self.records.place(self.connection)
            current = int(self.client.hget(self.keys.meta, "incarnation") or 0)
            start = f"({seq}-0" if incarnation == current else "-"
            rows = self.client.xrange(self.keys.log, start, "+", count=count)
            entries = [unpack(fields[b"e"], LogEntry) for _, fields in rows]
            if entries:
                self.records.add(self.connection, list(zip(entries, self._shown(entries), strict=True)), self.keep_steps)
            if self.telemetry is not None:
                self._tell(self.telemetry, entries)
            return len(entries)

    def _tell(self, telemetry: Telemetry, entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            if entry.kind == "train":
                telemetry.batch(entry)
        answer = self.client.xread({self.keys.spans: self.told})
        for entry_id, fields in answer[0][1] if answer else ():
            self.told = text(entry_id)
            telemetry.step(int(fields[b"step"]), unpack(fields[b"t"], tuple[Span, ...]))

    def _shown(self, entries: Sequence[LogEntry]) -> list[Shown]:
        """Of the first groups of each record, in one round trip; previews of their pictures are kept."""
        counts = [sum(note.slices for note in entry.groups[: self.texts]) for entry in entries]
        heads = [
            [p.head for p in entry.slices[:n] if p.head.body is not None] for entry, n in zip(entries, counts, strict=True)
        ]
        bodies = self._bodies([head.body for own in heads for head in own if head.body is not None])
        found: list[Shown] = []
        for entry, own in zip(entries, heads, strict=True):
            texts: Texts = {}
            kept: list[str] = []
            if entry.kind == "train":
                self.previews.forget(entry.step - self.keep_steps + 1, entry.step)
            for head in own:
                try:
                    if head.body is not None and head.body.uri in bodies:
                        said, pictures = shown_of(bodies[head.body.uri])
                        texts |= said
                        for name, media in pictures.items():
                            few = sum(k.partition("/")[0] == name.partition("/")[0] for k in kept) < PICTURES
                            if few and self.previews.keep("steps", entry.step, name, media):
                                kept.append(name)
                except (WireError, ValueError) as error:
                    log.info("no text of this group: %s", error, extra={"gid": head.parts[0].ids[0]})
            found.append((texts, tuple(kept)))
        return found

    def _bodies(self, refs: Sequence[BodyRef]) -> dict[str, codec.Buffer]:
        """Those that can still be had, by their uri."""
        try:
            small = [ref for ref in refs if self.store.in_redis(ref)]
            found = dict(zip((ref.uri for ref in small), self.store.load_many(small), strict=True))
            return found | {ref.uri: self.store.glance(ref) for ref in refs if ref.uri not in found}
        except (BodyLost, WireError) as error:
            if len(refs) <= 1:
                log.info("a text is gone: %s", error)
                return {}
            middle = len(refs) // 2
            return self._bodies(refs[:middle]) | self._bodies(refs[middle:])
