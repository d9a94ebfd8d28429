"""A world that plays workers and trainer against the pure lifecycle."""

from __future__ import annotations

import random
from typing import Any

from services.controller.lifecycles.core import advance
from services.controller.lifecycles.state import (
    Append,
    Branch,
    Command,
    Event,
    Group,
    Issue,
    Plan,
    Root,
    State,
    Tick,
    balanced,
    ledger,
)
from shared.types.ids import root_id
from shared.wire.envelope import (
    ENDED,
    Completed,
    Dead,
    Measured,
    PartHead,
    Published,
    Saved,
    ScoreHead,
    SliceHead,
    SliceResult,
    Started,
    Trained,
)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "domain": "ar",
        "steps": 4,
        "batch_size": 3,
        "branches": (Branch(track="policy", n=2),),
        "route": ("rollout.policy", "reward"),
        "tracks": ("policy",),
        "scorers": ("exact",),
        "max_inflight": 3,
        "checkpoint_every": 2,
    }
    return Plan(**(values | changes))


class World:
    """Plays workers and trainer against the lifecycle: answers commands in a random order, sometimes badly."""

    def __init__(self, plan: Plan, seed: int, faults: float = 0.0) -> None:
        self.plan, self.rng, self.faults = plan, random.Random(seed), faults
        self.state = State(Root(), {})
        self.now, self.nonce = 0.0, 0
        self.flights: dict[str, Group] = {}
        self.log: list[Append] = []
        self.version, self.published = 0, -1
        self.unusable = 0
        """Of each bunch of held-out records."""
        self.trained: list[str] = []
        self.ages: list[int] = []
        """Updates between a trained group's oldest version and the trainer's."""
        self.mixed: list[set[int]] = []
        """Versions of each batch."""
        self.commands: list[Command] = []

    def send(self, *events: Event) -> None:
        self.now += 1
        self.nonce += 1
        before = self.state
        root_of = lambda draw: root_id("s", 0, draw)  # noqa: E731
        self.state, commands = advance(self.plan, self.state, events, Tick(self.now), f"n{self.nonce}", root_of)
        self.commands += commands
        for command in commands:
            if isinstance(command, Issue) and self.plan.route and command.group.gid in self.state.groups:
                self.flights[command.group.gid] = command.group
            elif isinstance(command, Append):
                self.log.append(command)
        self.flights = {g: f for g, f in self.flights.items() if g in self.state.groups}
        self.check(before)
        if not self.plan.route and any(isinstance(command, Issue) for command in commands):
            self.send()  # as the runner does

    def check(self, before: State) -> None:
        root = self.state.root
        assert balanced(self.state), ledger(root)
        assert root.issued >= before.root.issued and root.batches <= self.plan.steps
        assert sum(r.kind == "train" for r in root.records) <= 1
        seqs = [a.seq for a in self.log]
        assert seqs == sorted(set(seqs)) and len({a.id for a in self.log}) == len(self.log)

    def completed(self, group: Group, rewards: tuple[float, ...] | None = None) -> Completed:
        need = group.needs["policy"]
        assert not self.plan.live or need.version == self.version, "this version is not to be had any more"
        lag = self.rng.randint(need.version, max(need.version, self.published)) if need.how == "at_least" else need.version
        n = 1 if group.kind == "eval" else 2
        root = group.gid.partition("#")[0]
        ids = tuple(f"{root}/{i}" for i in range(n))
        head = SliceHead(parts=(PartHead(ids=ids, track="policy", lengths=(1,) * n, versions=(lag,) * n),))
        scores = rewards or tuple(float(self.rng.random() < 0.5) for _ in range(n))
        if rewards is None and self.rng.random() < self.faults:
            scores = (float("nan"),) * n
        result = SliceResult(head=head, scores={"exact": ScoreHead(scores=scores)})
        return Completed(gid=group.gid, slices=(result,))

    def trainer(self) -> list[Event]:
        """Applies the next record of its log."""
        record = self.log.pop(0)
        if record.kind == "train":
            held = [v for g in record.groups for head in g.slices or () for part in head.parts for v in part.versions]
            self.ages += [self.version - v for v in held] or [0]
            self.mixed.append(set(held))
            bad = self.rng.random() < self.faults
            self.version += 0 if bad else self.plan.updates_per_batch
            self.trained += [g.gid for g in record.groups]
            updates = {"policy": 0 if bad else self.plan.updates_per_batch}
            event = Trained(seq=record.seq, id=record.id, versions={"policy": self.version}, updates=updates, reason="x")
            return [event] * self.rng.randint(1, 2)  # answers may come twice
        if record.kind == "evaluate":
            rows = record.rows[1] - record.rows[0] - self.unusable
            figures = {"total": 2.0 * rows, "weight": float(rows), "tokens": 2.0 * rows}
            word = Measured(seq=record.seq, id=record.id, versions={"policy": self.version}, rows=rows, **figures)
            return [word] * self.rng.randint(1, 2)
        if record.kind == "publish":
            self.published = max(self.published, self.version)
            return [Published(track="policy", version=self.version, nbytes=1)]
        return [Saved(seq=record.seq)] if record.kind == "checkpoint" else []

    def go(self, most: int = 3000) -> None:
        self.begin()
        for _ in range(most):
            if self.state.root.phase in ENDED:
                return
            self.act()
        raise AssertionError(f"not ended after {most} events: {self.state.root}")

    def begin(self) -> None:
        self.send()
        self.published = 0
        self.send(Started(applied_seq=0, versions={"policy": 0}, published={"policy": 0}, world_size=1))

    def act(self) -> None:
        """One worker or the trainer does something, if there is anything to do."""
        choices: list[Any] = []
        if self.flights:
            choices += ["complete"] * 4
        if self.log:
            choices.append("train")
            if self.plan.live:  # it samples when its log has nothing more for it
                choices = ["train"]
        if not choices:
            self.send()
            return
        if self.rng.choice(choices) == "train":
            self.send(*self.trainer())
            return
        group = self.flights.pop(self.rng.choice(sorted(self.flights)))
        if self.rng.random() < self.faults / 2:
            self.send(Dead(gid=group.gid, stage="rollout.policy", error="poison"))
        else:
            self.send(self.completed(group))


def started(**changes: Any) -> World:
    world = World(plan(**changes), 0)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={"policy": 0}, world_size=1))
    return world
