"""What a lifecycle is made of: the plan (fixed), the state (one root row, one row per open group), events and commands."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.wire.envelope import BodyRef, Completed, Message, Need, SliceHead, Span, Trained

Phase = Literal["starting", "running", "finishing", "done", "failed", "cancelled"]


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One generated Part of a request: its track, and how many children each row of the Part before gets."""

    track: str
    n: int
    media: bool = False


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """Whose scores a group gets, and how they become one reward."""

    scorers: tuple[str, ...] = ()
    aggregation: Literal["weighted_sum", "mean", "min", "max"] = "weighted_sum"
    weights: dict[str, float] = {}
    normalize_weights: bool = True


class SuitePlan(Scoring, frozen=True, kw_only=True):
    """An evaluation suite."""

    at: tuple[str, ...] = ()
    every: int = 0
    size: int = 0
    n: int = 1
    """Samples for each prompt."""
    solved: float = 1.0
    """Reward from which on a sample has solved its prompt (pass@k)."""
    batch_size: int = 0
    """Of suites whose records are measured by the trainer: how many one log record names."""


class Plan(Scoring, frozen=True, kw_only=True):
    """Derived from the recipe once; everything that a lifecycle decides by."""

    domain: str
    steps: int
    batch_size: int
    branches: tuple[Branch, ...]
    """Generated Parts in order; empty when nothing is rolled out."""
    route: tuple[str, ...]
    """Stages of a message; empty when nothing is rolled out."""
    tracks: tuple[str, ...]
    slice: int | None = None
    trajectories: bool = False
    """Each row of a group is a Sample of its own with its own turns (agentic)."""
    updates_per_batch: int = 1
    max_staleness: int = 0
    max_inflight: int
    sync_interval: int = 1
    max_reissues: int = 3
    need: Literal["exactly", "at_least"] = "exactly"
    mixing: bool = True
    """False: cohorts of a batch, of one version each."""
    waits_for_old: bool = False
    """No batch forms that would make an open group too old."""
    max_backfill: int | None = None
    """Groups of equal rewards that are replaced for one batch; None: they are trained."""
    oversample: float = 1.0
    group_deadline: float | None = None
    publish_at_end_only: bool = False
    live: bool = False
    """The trainer's ranks sample with the weights as they are (layout trainside): there is one version, its own."""
    log_budget: int = 1 << 30
    """Bytes of bodies that the train log may retain."""
    advantages: bool = True
    on_failed: Literal["exclude", "drop_group", "abort"] = "exclude"
    checkpoint_every: int = 0
    truncation: Literal["keep", "zero", "soft"] = "keep"
    overlong_buffer: int = 4096
    overlong_factor: float = 1.0
    propagate: Literal["mean", "max", "sum"] = "mean"
    suites: dict[str, SuitePlan] = {}
    """Evaluations, by name."""
    previews: int = 3

    @property
    def group_size(self) -> int:
        """Siblings directly below a prompt."""
        return self.branches[0].n if self.branches else 1

    @property
    def eval_scorers(self) -> tuple[str, ...]:
        """Of all suites."""
        return tuple(dict.fromkeys(name for suite in self.suites.values() for name in suite.scorers))

    def scoring(self, group: Group) -> Scoring:
        """The group's own: its suite's, or that of training."""
        return self.suites[group.suite] if group.kind == "eval" else self

    def slices(self) -> tuple[tuple[int, int], ...]:
        n, step = self.group_size, self.slice or self.group_size
        return tuple((low, min(low + step, n)) for low in range(0, n, step))


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Row of an open group."""

    gid: str
    draw: int
    issue: int
    shelf: int
    needs: dict[str, Need]
    issued_at: float
    kind: Literal["train", "eval"] = "train"
    cohort: int | None = None
    """The batch that it is issued for, where versions are not mixed."""
    slices: tuple[SliceHead, ...] | None = None
    """None while it is in flight."""
    rewards: tuple[float, ...] = ()
    """Of the last generated Part, in the order of its ids."""
    components: dict[str, tuple[float, ...]] = {}
    scored: tuple[Span, ...] = ()
    """One of each scorer and slice."""
    ready_at: float = 0.0
    order: int = 0
    """Its place among the completed groups."""
    suite: str = ""
    tag: str = ""
    """eval: which run of the suite."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A log record that the trainer has not answered."""

    seq: int
    id: str
    kind: Literal["train", "evaluate", "publish", "checkpoint"]
    gids: tuple[str, ...] = ()
    at: float = 0.0
    shelf: int = 0
    """train: the oldest of its bodies'. checkpoint: shelves below are not needed once it is complete."""
    stats: dict[str, float] = {}
    """train: figures of the batch."""
    waits: dict[str, int] = {}
    """publish: the versions that are to be complete, once the trainer has told them."""
    nbytes: int = 0
    """checkpoint: bytes of the retained log that it makes needless."""
    rows: int = 0
    """evaluate: how many records of a run."""
    run: tuple[str, int] = ("", 0)
    """evaluate: the run's key and issue."""


class EvalRun(msgspec.Struct, frozen=True, kw_only=True):
    suite: str
    tag: str
    """When: `start`, `step-20`, `asked-7`, `end`."""
    step: int
    versions: dict[str, int]
    size: int
    shelf: int = 0
    """Where its bodies begin: the previews' are read when it is done."""
    issue: int = 0
    """How often it was begun before, at a version that did not come."""
    done: int = 0
    failed: int = 0
    total: float = 0.0
    """Sum over prompts of the mean reward of their samples."""
    samples: int = 0
    """Scored samples, and the sums of their rewards and of the squares."""
    sum: float = 0.0
    squares: float = 0.0
    components: dict[str, tuple[float, int]] = {}
    """Scorer → sum and count of its finite scores."""
    passed: dict[int, float] = {}
    """k → sum over prompts of the chance that one of k samples solves it."""
    previews: tuple[tuple[int, BodyRef, float], ...] = ()
    """(index, body, reward) of the first ones."""
    asked: int = 0
    """Records whose loss the trainer was asked for."""
    loss: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of targets: the sum, the weight that divides it, the tokens that count."""

    @property
    def key(self) -> str:
        return f"{self.suite}:{self.tag}"


class Root(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    phase: Phase = "starting"
    reason: str = ""
    paused: bool = False
    incarnation: int = 1
    draw: int = 0
    """The data cursor: the next draw number."""
    again: tuple[tuple[int, int], ...] = ()
    """(draw, issue) of prompts to issue once more."""
    dead_draws: tuple[int, ...] = ()
    issued: int = 0
    trained: int = 0
    dead: int = 0
    dropped: dict[str, int] = {}
    completed: int = 0
    batches: int = 0
    formed: int = 0
    seq: int = 0
    last_id: str = ""
    records: tuple[Record, ...] = ()
    """Unanswered, in order."""
    trained_seq: int = 0
    """The record of the newest trained batch."""
    current: dict[str, int] = {}
    """The trainer's version by track after the last batch."""
    published: dict[str, int] = {}
    unsynced: tuple[tuple[int, int], ...] = ()
    """(batch, version of the first track) of batches with updates trained since the newest published version."""
    publishes: int = 0
    published_bytes: int = 0
    publish_seconds: float = 0.0
    trainer_up: bool = False
    saved_seq: int = 0
    log_bytes: int = 0
    """Bytes of bodies that the log names and no complete checkpoint covers."""
    swept: int = 0
    """Shelves below are gone."""
    cohorts: dict[int, dict[str, int]] = {}
    """The versions of the batches that groups have been issued for, where they are not mixed."""
    filtered: int = 0
    """Groups that the filter has replaced since the newest batch."""
    told: dict[str, int] = {}
    """Dropped groups by reason, and re-issues, when the newest batch had formed."""
    reissued: int = 0
    evals: tuple[EvalRun, ...] = ()
    evaluated: tuple[str, ...] = ()
    """Keys of the runs that are done."""
    asked: tuple[str, ...] = ()
    """Suites to evaluate once the batch in training is done."""
    dying: int = 0
    """Groups that died since one was completed or trained."""
    started_at: float = 0.0
    changed_at: float = 0.0
    """When a batch was last trained, or a phase entered."""

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    @property
    def outstanding(self) -> int:
        return self.issued - self.trained - self.dropped_total - self.dead


class State(msgspec.Struct, frozen=True):
    root: Root
    groups: dict[str, Group]


def ledger(root: Root) -> dict[str, Any]:
    """issued = trained + dropped (by reason) + dead + in flight; `balanced` says whether the open groups agree."""
    return {
        "issued": root.issued,
        "trained": root.trained,
        "dropped": dict(root.dropped),
        "dead": root.dead,
        "in_flight": root.outstanding,
    }


def balanced(state: State) -> bool:
    """Every gid has exactly one fate: what the counters call in flight is exactly what is open or in training."""
    open_groups = sum(g.kind == "train" for g in state.groups.values())
    in_training = sum(len(r.gids) for r in state.root.records)
    return state.root.outstanding == open_groups + in_training


class Tick(msgspec.Struct, frozen=True):
    now: float


class BadRecord(msgspec.Struct, frozen=True):
    """The prompt of this draw cannot be used (too long, empty): its group ends as dead."""

    gid: str
    error: str


class Gone(msgspec.Struct, frozen=True):
    """A version that evaluations or cohorts are pinned to is no longer in the store: nobody held it for too long."""

    track: str
    version: int


Event = Message | Completed | BadRecord | Gone


class Issue(msgspec.Struct, frozen=True):
    """Send the group's request (or, without a route, read its record)."""

    group: Group


class Append(msgspec.Struct, frozen=True):
    """Add a record to the train log."""

    seq: int
    id: str
    previous: str
    kind: Literal["train", "evaluate", "publish", "checkpoint", "stop"]
    groups: tuple[Group, ...] = ()
    pinned: bool = False
    suite: str = ""
    rows: tuple[int, int] = (0, 0)
    """evaluate: these records of the suite."""
    run: tuple[str, int] = ("", 0)
    """evaluate: the run's key and issue."""


class Close(msgspec.Struct, frozen=True):
    """The groups are no longer open; entries of theirs that are still about are deleted."""

    gids: tuple[str, ...]
    in_flight: bool


class Stepped(msgspec.Struct, frozen=True):
    """Write the record of a trained step."""

    record: Record
    trained: Trained
    at: float


class Evaluated(msgspec.Struct, frozen=True):
    run: EvalRun


class Covered(msgspec.Struct, frozen=True):
    """A checkpoint covers the log up to `seq`: trim it, and sweep the shelves `first … below - 1`."""

    seq: int
    first: int
    below: int


class Note(msgspec.Struct, frozen=True):
    """Something that a person should see."""

    level: Literal["info", "warning", "error"]
    text: str


class Restore(msgspec.Struct, frozen=True):
    """Redis went back in time: return to the newest checkpoint and raise the incarnation."""

    detail: str


Command = Issue | Append | Close | Stepped | Evaluated | Covered | Note | Restore
