"""The exactly-once steps as typed calls. Each is one script and one round trip, and is safe to repeat after a lost reply."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from uuid import uuid4

import redis

from shared.wire.keys import GROUP, JobKeys

Value = bytes | str | int | float
NAMES = (
    "commit",
    "gather",
    "commit_state",
    "renew",
    "claim",
    "lost",
    "nack",
    "reap",
    "lease",
    "report",
    "release",
    "fence",
    "seat",
)


@dataclass(frozen=True)
class Write:
    """One write of a script: a Redis command on one key (see prelude.lua for those allowed)."""

    command: str
    key: str
    args: tuple[Value, ...] = ()
    group: str | None = None
    """SEND: the key of the group's hash, where the new entry's place is noted under the first argument."""


def xadd(key: str, fields: dict[str, Any], entry_id: str = "*") -> Write:
    return Write("XADD", key, (entry_id, *_flat(fields)))


def send(keys: JobKeys, stage: str, gid: str, low: int, fields: dict[str, Any]) -> Write:
    """A message to a stage, its place noted in the group's hash."""
    return Write("SEND", keys.stage(stage), (f"e:{stage}:{low}", *_flat(fields)), keys.group(gid))


def hset(key: str, fields: dict[str, Any]) -> Write:
    return Write("HSET", key, _flat(fields))


def _flat(fields: dict[str, Any]) -> tuple[Value, ...]:
    return tuple(part for item in fields.items() for part in item)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry in hand. `previous` is the consumer whose lease on it ran out (claimed entries only)."""

    stream: str
    id: str
    fields: dict[bytes, bytes]
    previous: str | None = None

    @property
    def gid(self) -> str:
        return self.fields[b"g"].decode()

    @property
    def low(self) -> int:
        return int(self.fields[b"s"])


def source(name: str) -> str:
    folder = resources.files("shared.wire") / "lua"
    return (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()


@cache
def sources() -> dict[str, str]:
    return {name: source(name) for name in NAMES}


@cache
def hashes() -> dict[str, str]:
    return {name: hashlib.sha1(script.encode()).hexdigest() for name, script in sources().items()}


class Keys:
    """KEYS of a script call: its own, and those that writes name by their index."""

    def __init__(self, fixed: Sequence[str]) -> None:
        self.names = list(dict.fromkeys(fixed))
        if len(self.names) != len(fixed):
            raise ValueError(f"a script's own keys must differ: {fixed}")
        self.places = {key: i + 1 for i, key in enumerate(self.names)}

    def index(self, key: str) -> int:
        if key not in self.places:
            self.names.append(key)
            self.places[key] = len(self.names)
        return self.places[key]

    def packed(self, writes: Sequence[Write]) -> list[Value]:
        """The writes' part of ARGV."""
        argv: list[Value] = []
        for write in writes:
            args = write.args if write.group is None else (self.index(write.group), *write.args)
            argv += [write.command, self.index(write.key), len(args), *args]
        return argv


def new_revision(revision: str) -> str:
    """A counter for people, a nonce so that no two commits share it, even across a rollback of Redis."""
    return f"{int(revision.partition('.')[0] or 0) + 1}.{uuid4().hex[:12]}"


def no_group(error: redis.ResponseError) -> bool:
    """6.2 wraps the error of a call inside a script ("ERR Error running script … NOGROUP …"), 7.0 does not."""
    return "NOGROUP" in str(error)


def text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)


class Scripts:
    """The script set on one client. Clients do not decode responses."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, name: str, keys: Sequence[str], *argv: Value) -> Any:
        """The script's answer. (Not redis-py's Script objects: they cost a fifth of a hop.)"""
        command = ("EVALSHA", hashes()[name], len(keys), *keys, *argv)
        try:
            return self.client.execute_command(*command)
        except redis.exceptions.NoScriptError:  # a server that started anew, or rewrote its log
            self.load()
            return self.client.execute_command(*command)

    def load(self) -> None:
        for script in sources().values():
            self.client.script_load(script)

    def commit_state(
        self,
        keys: JobKeys,
        token: str,
        revision: str,
        after: str,
        snapshot: bytes,
        taken: Sequence[str],
        writes: Sequence[Write],
    ) -> list[str]:
        """[OK], [FENCED], [STALE] or [GONE, id…]: the controller's compare-and-set with everything that follows from it."""
        named = Keys((keys.lease, keys.state, keys.inbox))
        argv = named.packed(writes)
        answer = self.run("commit_state", named.names, token, revision, after, snapshot, GROUP, len(taken), *taken, *argv)
        return [text(word) for word in answer]

    def claim(self, stream: str, consumer: str, min_idle_ms: int, count: int) -> list[Entry]:
        """Up to about `count` entries whose lease is over; walks the whole pending list if need be."""
        entries: list[Entry] = []
        start = "-"
        while start and len(entries) < count:
            answer = self.run("claim", [stream], GROUP, consumer, min_idle_ms, count, start)
            start = text(answer[0])
            for entry_id, owner, idle, flat in answer[1:]:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                previous = text(owner) if int(idle) < 86_400_000 else None
                entries.append(Entry(stream, text(entry_id), fields, previous))
        return entries

    def lost(self, entry: Entry, consumer: str, group_key: str, slot: str) -> tuple[int, int]:
        """(lost leases of this slice at this stage, consumers that lost it), this one included."""
        answer = self.run("lost", [entry.stream, group_key], GROUP, consumer, entry.id, slot, entry.previous or "?")
        return (int(answer[0]), int(answer[1])) if answer else (0, 0)

    def nack(self, keys: JobKeys, entry: Entry, consumer: str, slot: str, limit: int, error: str, event: bytes) -> str:
        """AGAIN, DEAD, late or LOST. Stop renewing the entry first."""
        names = [entry.stream, keys.group(entry.gid), keys.dead, keys.inbox, keys.counts, keys.open]
        return text(self.run("nack", names, GROUP, consumer, entry.id, entry.gid, slot, limit, error, event))

    def renew(self, stream: str, consumer: str, ids: Sequence[str]) -> list[str]:
        """The ids that this consumer has lost. Pass only ids in hand."""
        return [text(i) for i in self.run("renew", [stream], GROUP, consumer, *ids)]

    def reap(self, stream: str, min_idle_ms: int) -> list[str]:
        return [text(n) for n in self.run("reap", [stream], GROUP, min_idle_ms)]

    def lease(self, key: str, token: str, ttl_ms: int, take: bool) -> str:
        """MINE, HELD or FREE (not extended: it ran out)."""
        return text(self.run("lease", [key], token, ttl_ms, int(take)))

    def report(self, keys: JobKeys, fence: str, events: Sequence[bytes]) -> str:
        """OK or FENCED."""
        return text(self.run("report", [keys.meta, keys.inbox], fence, *events))

    def seat(self, keys: JobKeys, track: str, name: str, ttl_ms: int, share: float) -> bool:
        """Whether the worker has one of the seats for evaluations."""
        names = [keys.present(track), keys.seats(track), keys.stage(f"rollout.{track}")]
        return bool(self.run("seat", names, name, ttl_ms, share))

    def release(self, key: str, value: Value) -> bool:
        return bool(self.run("release", [key], value))


def ensure_group(client: Any, stream: str) -> None:
    """The stream and its consumer group, from its beginning; both may exist."""
    try:
        client.xgroup_create(stream, GROUP, "0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
