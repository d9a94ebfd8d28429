"""The typed structures that travel: requests and slices between services, entries of the train log, events for the inbox."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.wire.codec import pack, unpack
from shared.wire.errors import WireError

MAX_HEAD = 16 * 1024
"""Bytes of a slice's head."""


class Need(msgspec.Struct, frozen=True, array_like=True):
    """The weights version that a message needs of one track."""

    how: Literal["exactly", "at_least"]
    version: int


class BodyRef(msgspec.Struct, frozen=True, kw_only=True):
    """A body in the store. `xxh3` (hex) is absent for bodies inside Redis, which checks its own memory."""

    uri: str
    nbytes: int
    xxh3: str | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Who did what, and when."""

    name: str
    """A stage (`rollout.policy`, `reward.exact`), or an act of the trainer (`train`, `publish` …)."""
    worker: str
    start: float
    """Seconds since the epoch, by the clock of the worker's host."""
    seconds: float


class PartHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows of one generated Part of a slice."""

    ids: tuple[str, ...]
    track: str
    lengths: tuple[int, ...] = ()
    """Tokens of each row; empty for media."""
    versions: tuple[int, ...] = ()
    """Oldest version in each row; empty until filled."""
    status: tuple[str, ...] = ()
    max_new_tokens: int = 0
    """0: no limit applies (media)."""


class SliceHead(msgspec.Struct, frozen=True, kw_only=True):
    """Travels in place of the body."""

    parts: tuple[PartHead, ...]
    body: BodyRef | None = None
    """None: the body is inline, in the entry's field `b`."""
    spans: tuple[Span, ...] = ()
    """One of each stage that it has passed, the last one last; others (weights adopted) may stand between."""


class ScoreHead(msgspec.Struct, frozen=True, kw_only=True):
    """One scorer's verdict on one slice."""

    scores: tuple[float, ...]
    """Per row of the last generated Part; NaN = failed."""
    errors: dict[int, str] = {}
    span: Span | None = None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The head field `h` of a stage stream's entry."""

    id: str
    job: str
    incarnation: int
    kind: Literal["train", "eval"]
    route: tuple[str, ...]
    """Names of the stages; the last is `reward`, which stands for one stream per scorer."""
    position: int
    scorers: tuple[str, ...]
    gid: str
    shelf: int
    slice: tuple[int, int]
    needs: dict[str, Need]
    head: SliceHead
    deterministic: bool = False
    schema: int = 1
    trace: str | None = None

    @property
    def stage(self) -> str:
        return self.route[self.position]


class TrainSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of a batch with what the controller computed: per generated Part its rewards and advantages."""

    head: SliceHead
    rewards: tuple[tuple[float, ...] | None, ...]
    advantages: tuple[tuple[float, ...] | None, ...]
    """None for Parts of domains without advantages."""


class GroupNote(msgspec.Struct, frozen=True, kw_only=True):
    """What people want to know of a trained group besides its slices."""

    gid: str
    slices: int
    """How many of the record's slices are its own, in order."""
    issued_at: float = 0.0
    ready_at: float = 0.0
    components: dict[str, tuple[float, ...]] = {}
    """By scorer, per row of the last generated Part."""
    scored: tuple[Span, ...] = ()
    """One of each scorer and slice."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the train log: a batch, or a control word."""

    seq: int
    id: str
    """Random: two histories that reach one seq differ in it."""
    previous: str
    """The id of the record before; empty for the first of an incarnation's log."""
    incarnation: int
    kind: Literal["train", "evaluate", "checkpoint", "publish", "stop"]
    slices: tuple[TrainSlice, ...] = ()
    step: int = 0
    """Number of the newest batch up to and with this record."""
    groups: tuple[GroupNote, ...] = ()
    """train: the slices' groups, in order."""
    pinned: bool = False
    """publish: exactly this version will be asked for; a newer one does not replace it."""
    state: bytes = b""
    """checkpoint: the controller's state at this position."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag="trained"):
    """The trainer passed a `train` record."""

    seq: int
    id: str
    versions: dict[str, int]
    updates: dict[str, int]
    metrics: dict[str, float] = {}
    reason: str = ""
    """Why there were 0 updates; empty otherwise."""
    spans: tuple[Span, ...] = ()
    """What the trainer did since it answered the record before; the training is the last."""

    @property
    def seconds(self) -> float:
        return self.spans[-1].seconds if self.spans else 0.0


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """The trainer passed an `evaluate` record: the loss of its targets, as a sum and the weight that divides it."""

    seq: int
    id: str
    versions: dict[str, int]
    rows: int
    total: float
    weight: float
    tokens: float
    """Those that count."""


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """A version is complete in the store; answers every older publish that it replaced."""

    track: str
    version: int
    nbytes: int = 0
    seconds: float = 0.0


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    """The checkpoint that covers the log up to and including `seq` is complete."""

    seq: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A trainer is up: what it found."""

    applied_seq: int
    versions: dict[str, int]
    published: dict[str, int]
    world_size: int


class Dead(msgspec.Struct, frozen=True, kw_only=True, tag="dead"):
    """A message of the group went to the dead letters."""

    gid: str
    stage: str
    error: str


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A service says that the job cannot go on (or, not fatal, that something is wrong)."""

    origin: str
    error: str
    fatal: bool


class RolledBack(msgspec.Struct, frozen=True, kw_only=True, tag="rolled_back"):
    """The trainer met a log that is not the one it applied."""

    seq: int
    detail: str


ENDED = ("done", "failed", "cancelled")
"""States that a job never leaves."""


class Operator(msgspec.Struct, frozen=True, kw_only=True, tag="operator"):
    """A person's command, from the API."""

    command: Literal["pause", "resume", "cancel", "checkpoint", "evaluate", "reissue"]
    gid: str = ""
    """reissue: the dead group whose prompt is to be issued again."""
    suite: str = ""
    """evaluate: one suite; empty: all of them."""


Message = Trained | Measured | Published | Saved | Started | Dead | Failure | RolledBack | Operator


class SliceResult(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a completed group."""

    head: SliceHead
    scores: dict[str, ScoreHead]


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """Every (scorer, slice) of a group is in."""

    gid: str
    slices: tuple[SliceResult, ...]


Event = Message | Completed


def envelope_fields(envelope: Envelope, body: bytes | None = None) -> dict[str, bytes | str]:
    """Fields of a stream entry: `h` head, `g` gid and `s` first sibling for the scripts, `b` inline body."""
    packed = pack(envelope)
    if len(packed) > MAX_HEAD:
        raise WireError(f"head of {envelope.gid} {envelope.slice} is {len(packed)} bytes, the limit is {MAX_HEAD}")
    fields: dict[str, bytes | str] = {"g": envelope.gid, "s": str(envelope.slice[0]), "h": packed}
    return fields if body is None else fields | {"b": body}


def event_fields(event: Message) -> dict[str, bytes | str]:
    return {"e": pack(event)}


def read_event(fields: dict[bytes, bytes]) -> Event:
    """An inbox entry: an event of its own, or the slots of a completed group as GATHER wrote them."""
    if (packed := fields.get(b"e")) is not None:
        return unpack(packed, Message)  # type: ignore[arg-type]
    heads: dict[int, SliceHead] = {}
    scores: dict[int, dict[str, ScoreHead]] = {}
    for name, value in fields.items():
        kind, _, rest = name.decode().partition(":")
        if kind == "h":
            heads[int(rest)] = unpack(value, SliceHead)
        elif kind == "s":
            scorer, _, low = rest.rpartition(":")
            scores.setdefault(int(low), {})[scorer] = unpack(value, ScoreHead)
    slices = tuple(SliceResult(head=heads[low], scores=scores[low]) for low in sorted(heads))
    return Completed(gid=fields[b"g"].decode(), slices=slices)
