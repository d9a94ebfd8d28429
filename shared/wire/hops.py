"""From a handler's result to the writes of its commit: on to the next stage, or into a slot of the group."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple, Protocol
from uuid import uuid4

import msgspec

from shared.wire.bodies import BodyStore
from shared.wire.codec import Buffer, pack, unpack
from shared.wire.envelope import BodyRef, Envelope, ScoreHead, SliceHead, Span, envelope_fields
from shared.wire.errors import BodyLost
from shared.wire.keys import GROUP, JobKeys
from shared.wire.scripts import Entry, Keys, Scripts, Value, Write, hset, send, text

INLINE_LIMIT = 4096
"""Bytes up to which a body also travels in the messages of the next stage, which then need not ask for it."""


@dataclass(slots=True)
class Work:
    """One message in a handler's hands."""

    entry: Entry
    envelope: Envelope
    inline: bytes | None
    since: float
    """time.monotonic() when it was taken."""
    cancelled: Event = field(default_factory=Event)
    """Set when the lease is lost or the group was dropped: its result can no longer count."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A rollout's result: what the next stage gets."""

    head: SliceHead
    parts: Sequence[Buffer]
    """The filled Samples as a body."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """A rollout that goes on later, wherever: its message comes back to its own stage. Nobody has failed."""

    spans: tuple[Span, ...]
    parts: Sequence[Buffer]
    """The Samples as far as they are filled."""


Result = Filled | Suspended | ScoreHead


class Handler(Protocol):
    """What a service does with messages. It never sees a stream, a lease or a commit."""

    def capacity(self) -> int:
        """Most messages that it wants in hand."""
        ...

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]: ...

    def progressed(self) -> float:
        """time.monotonic() of its last sign of progress (a token, a step, a row)."""
        ...


def read_work(entry: Entry, now: float) -> Work:
    """WireError if the entry is no valid message."""
    return Work(entry, unpack(entry.fields[b"h"], Envelope), entry.fields.get(b"b"), now)


def ref_of(work: Work) -> BodyRef:
    """BodyLost if the message names no body."""
    if work.envelope.head.body is None:
        raise BodyLost("the message names no body")
    return work.envelope.head.body


def hop_writes(keys: JobKeys, work: Work, filled: Filled, store: BodyStore) -> list[Write]:
    """The body's field in its shelf (if it is small), the head in the group's hash, and the messages of the next stage."""
    envelope = work.envelope
    low = envelope.slice[0]
    name = f"{envelope.gid}.{low}.{uuid4().hex[:8]}"
    ref, small = store.place(envelope.shelf, name, filled.parts)
    head = msgspec.structs.replace(filled.head, body=ref)
    out = [] if small is None else [hset(keys.shelf(envelope.shelf), {name: small})]
    out.append(hset(keys.group(envelope.gid), {f"h:{low}": pack(head)}))
    position = envelope.position + 1
    onward = msgspec.structs.replace(envelope, head=head, position=position)
    after = envelope.route[position]
    stages = [f"reward.{scorer}" for scorer in envelope.scorers] if after == "reward" else [after]
    fields = envelope_fields(onward, small if small is not None and len(small) <= INLINE_LIMIT else None)
    return out + [send(keys, stage, envelope.gid, low, fields) for stage in stages]


def back_writes(keys: JobKeys, stage: str, work: Work, suspended: Suspended, store: BodyStore) -> list[Write]:
    """The message again, with what there is of its Samples."""
    envelope = work.envelope
    low = envelope.slice[0]
    ref, body = store.enclose(envelope.shelf, f"{envelope.gid}.{low}.{uuid4().hex[:8]}", suspended.parts)
    head = msgspec.structs.replace(envelope.head, body=ref, spans=suspended.spans)
    again = msgspec.structs.replace(envelope, head=head)
    return [send(keys, stage, envelope.gid, low, envelope_fields(again, body)), Write("HINCRBY", keys.counts, ("suspended", 1))]


def eval_stage(stage: str) -> str:
    """Where evaluations go instead: rollouts keep them apart, since not every worker is to take them."""
    return f"{stage}.eval" if stage.startswith("rollout.") else stage


def phase(kind: str, position: int, stage: str) -> str:
    """The field of meta that allows results of this stage at this position."""
    return f"phase:{kind} {position} {stage}"


def meta_fields(
    incarnation: int, route: Sequence[str], scorers: Sequence[str], eval_scorers: Sequence[str] | None = None
) -> dict[str, int]:
    """What meta holds of an incarnation: every phase that a message may be in. `eval_scorers`: None means the same ones."""
    fields = {"incarnation": incarnation}
    for kind, names in (("train", scorers), ("eval", scorers if eval_scorers is None else eval_scorers)):
        for position, stage in enumerate(route if kind == "train" else map(eval_stage, route)):
            stages = [f"reward.{scorer}" for scorer in names] if stage == "reward" else [stage]
            fields |= {phase(kind, position, on): incarnation for on in stages}
    return fields


class Commit(NamedTuple):
    """What the result for one message writes. Its bodies are written: it may be sent as often as need be."""

    entry: Entry
    words: tuple[Value, ...]
    """Phase, incarnation, gid: whether it may still count."""
    writes: Sequence[Write]
    slot: str = ""
    score: bytes = b""
    """Of a fan-in: what fills which slot of the group."""


def commit(
    keys: JobKeys, stage: str, work: Work, result: Result, store: BodyStore | None, extra: Sequence[Write] = ()
) -> Commit:
    """The commit of a result. Writes a large body now; OSError if it cannot be written."""
    envelope = work.envelope
    words = (phase(envelope.kind, envelope.position, stage), envelope.incarnation, envelope.gid)
    if isinstance(result, ScoreHead):
        slot = f"s:{stage.removeprefix('reward.')}:{envelope.slice[0]}"
        return Commit(work.entry, words, extra, slot, pack(result))
    assert store is not None
    if isinstance(result, Suspended):
        onward = back_writes(keys, stage, work, result, store)
    else:
        onward = hop_writes(keys, work, result, store)
    return Commit(work.entry, words, [*onward, *extra])


def send_all(scripts: Scripts, keys: JobKeys, consumer: str, commits: Sequence[Commit]) -> list[str]:
    """Commits of one stage, in one script: its answer for each. One that Redis refuses (ResponseError) refuses all of them."""
    gathers, stream = bool(commits[0].slot), commits[0].entry.stream
    fixed = [stream, keys.meta, keys.open, keys.counts]
    named = Keys([*fixed, keys.inbox] if gathers else fixed)
    argv: list[Value] = []
    for made in commits:
        filling: tuple[Value, ...] = (named.index(keys.group(made.entry.gid)), made.slot, made.score) if gathers else ()
        body = [*filling, *named.packed(made.writes)]
        argv += [made.entry.id, *made.words, len(body), *body]
    answers = scripts.run("gather" if gathers else "commit", named.names, GROUP, consumer, *argv)
    return [text(answer) for answer in answers]
