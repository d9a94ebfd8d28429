"""The pure lifecycle under every order of events: the ledger balances, the staleness bound holds, no prompt is lost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller.lifecycles.admission import launch, retained
from services.controller.lifecycles.state import (
    Append,
    BadRecord,
    Branch,
    Evaluated,
    Event,
    Gone,
    Note,
    Restore,
    State,
    Stepped,
    SuitePlan,
    balanced,
)
from services.controller.restore import cut, from_cut
from services.controller.views import waits_for
from shared.wire.envelope import (
    BodyRef,
    Completed,
    Dead,
    Failure,
    Need,
    Operator,
    PartHead,
    Published,
    RolledBack,
    Saved,
    ScoreHead,
    SliceHead,
    SliceResult,
    Started,
    Trained,
)
from tests.controller.world import World, plan, started


@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 3),
    interval=st.integers(1, 3),
    updates=st.integers(1, 2),
    faults=st.sampled_from([0.0, 0.0, 0.15]),
    mixing=st.booleans(),
    waits=st.booleans(),
    backfill=st.sampled_from([None, 0, 3]),
    oversample=st.sampled_from([1.0, 1.5]),
    slow=st.sampled_from([None, 12.0]),
)
@settings(max_examples=400, deadline=None)
def test_every_order_ends_with_a_balanced_ledger_and_the_bound_kept(
    seed: int,
    staleness: int,
    interval: int,
    updates: int,
    faults: float,
    mixing: bool,
    waits: bool,
    backfill: int | None,
    oversample: float,
    slow: float | None,
) -> None:
    if staleness < interval - 1:
        return
    mixing = mixing or not staleness or oversample > 1
    world = World(
        plan(
            max_staleness=staleness,
            sync_interval=interval,
            updates_per_batch=updates,
            max_inflight=int(3 * (staleness + 1) * oversample),
            need="at_least" if staleness else "exactly",
            mixing=mixing,
            waits_for_old=waits and staleness > 0,
            max_backfill=backfill,
            oversample=oversample,
            group_deadline=slow,
            max_reissues=50 if slow else 3,
            suites={"s": SuitePlan(at=("start", "end"), size=4, scorers=("exact",))},
        ),
        seed,
        faults,
    )
    world.go()
    root = world.state.root
    assert root.phase == "done" and root.batches == 4 and root.outstanding == 0 and not world.state.groups
    assert root.trained == len(world.trained) == len(set(world.trained)) == 12
    assert root.published["policy"] == root.current["policy"]
    roots = [g.partition("#")[0] for g in world.trained]
    assert len(set(roots)) == len(roots)
    assert max(world.ages) <= staleness * updates, "the bound is hard"
    assert mixing or all(len(versions) == 1 for versions in world.mixed), "a batch of one version"
    if waits and not slow and not faults and oversample == 1:
        assert "stale" not in root.dropped
    if backfill is not None:
        assert root.dropped.get("zero_variance", 0) <= backfill * 4
    assert [c.run.tag for c in world.commands if isinstance(c, Evaluated)] and set(root.evaluated) == {"s:start", "s:end"}


@given(seed=st.integers(0, 10**6), staleness=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_group_enters_a_batch_beyond_the_bound(seed: int, staleness: int) -> None:
    world = World(plan(max_staleness=staleness, max_inflight=3 * (staleness + 1), need="at_least", steps=8), seed)
    bound_broken = []
    original = world.trainer

    def trainer() -> list[Event]:
        record = world.log[0]
        for group in record.groups:
            oldest = min(v for head in group.slices or () for p in head.parts for v in p.versions)
            if world.version - oldest > staleness:
                bound_broken.append((group.gid, oldest, world.version))
        return original()

    world.trainer = trainer  # type: ignore[method-assign]
    world.go()
    assert not bound_broken


def phase(world: World) -> str:
    return world.state.root.phase


def test_nothing_is_issued_before_the_first_version_is_published() -> None:
    world = World(plan(), 0)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    assert phase(world) == "starting" and not world.flights
    world.send(Published(track="policy", version=0))
    assert phase(world) == "running" and len(world.flights) == 3


def test_requests_demand_exactly_the_version_that_the_batch_before_has_made() -> None:
    """They are issued while it is written: their worker waits for it, not the mesh."""
    world = started()
    assert {g.needs["policy"] for g in world.flights.values()} == {Need("exactly", 0)}
    world.send(*(world.completed(g) for g in list(world.flights.values())))
    assert [a.kind for a in world.log] == ["train", "publish"] and not world.flights
    world.send(*world.trainer())
    issued = dict(world.flights)
    assert {g.needs["policy"] for g in issued.values()} == {Need("exactly", 1)} and world.state.root.published == {"policy": 0}
    world.send(*world.trainer())
    assert world.flights == issued and world.state.root.published == {"policy": 1}


def test_without_a_publish_that_is_due_nothing_is_issued_for_a_version_to_come() -> None:
    """Under `at_least` an older version would do: nobody should wait for the one that is being written."""
    world = started(need="at_least", max_staleness=1, max_inflight=6)
    world.send(*(world.completed(g) for g in list(world.flights.values())[:3]))
    world.send(*world.trainer())
    assert len(world.flights) == 3 and world.state.root.published == {"policy": 0}
    world.send(*world.trainer())
    newest = max(world.flights.values(), key=lambda g: g.draw)
    assert newest.draw == 8 and newest.needs["policy"] == Need("at_least", 1)


def test_groups_issued_for_a_version_that_did_not_come_are_issued_again() -> None:
    """A trainer that applies a batch again after a crash may come to another number of updates."""
    world = started()
    world.send(*(world.completed(g) for g in list(world.flights.values())))
    record = world.log[0]
    world.send(*world.trainer())
    first = sorted(world.flights)
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={"policy": 0}, world_size=1))
    world.send(Trained(seq=record.seq, id=record.id, versions={"policy": 1}, updates={"policy": 1}))
    assert sorted(world.flights) == first, "a trainer that starts again is about to publish it"
    world.send(Trained(seq=record.seq, id=record.id, versions={"policy": 0}, updates={"policy": 0}, reason="not finite"))
    assert world.state.root.dropped == {"unpublished": 3} and world.state.root.current == {"policy": 0}
    assert {(g.issue, g.needs["policy"].version) for g in world.flights.values()} == {(1, 0)}


def test_a_publish_of_two_tracks_is_answered_by_both() -> None:
    world = World(plan(tracks=("a", "b"), branches=(Branch(track="a", n=2), Branch(track="b", n=1))), 0)
    versions = {"a": 0, "b": 0}
    world.send(Started(applied_seq=0, versions=versions, published=versions, world_size=1))
    for group in list(world.flights.values()):
        ids = tuple(f"{group.gid[:-2]}/{i}" for i in range(2))
        heads = (
            PartHead(ids=ids, track="a", versions=(0, 0)),
            PartHead(ids=tuple(f"{i}/0" for i in ids), track="b", versions=(0, 0)),
        )
        result = SliceResult(head=SliceHead(parts=heads), scores={"exact": ScoreHead(scores=(0.0, 1.0))})
        world.send(Completed(gid=group.gid, slices=(result,)))
    record = world.log[0]
    world.send(Trained(seq=record.seq, id=record.id, versions={"a": 1, "b": 1}, updates={"a": 1, "b": 1}))
    flights = sorted(world.flights)
    for track, left in (("a", 1), ("b", 0)):
        world.send(Published(track=track, version=1))
        assert sum(r.kind == "publish" for r in world.state.root.records) == left
        assert sorted(world.flights) == flights and world.state.root.dropped == {}


def test_a_batch_is_in_the_order_of_the_data_whatever_came_first() -> None:
    world = started()
    groups = list(world.flights.values())
    world.send(*(world.completed(g) for g in reversed(groups)))
    assert [g.draw for g in world.log[0].groups] == [0, 1, 2]


def test_an_unscored_group_is_issued_again_then_dead_and_replaced() -> None:
    world = started(max_reissues=1, steps=1, checkpoint_every=0)
    nan = float("nan")
    first = next(iter(world.flights.values()))
    world.send(world.completed(first, (nan, 1.0)))
    assert world.state.root.dropped == {"unscored": 1} and f"{first.gid[:-2]}#1" in world.flights
    world.send(world.completed(world.flights[f"{first.gid[:-2]}#1"], (nan, nan)))
    root = world.state.root
    assert root.dead == 1 and root.dead_draws == (first.draw,) and root.dropped == {"unscored": 1}
    assert root.draw == 4, "the next prompt in data order replaces it"


def test_one_failed_sibling_of_three_is_excluded_and_the_group_stays() -> None:
    world = started(batch_size=1, max_inflight=1)
    group = next(iter(world.flights.values()))
    event = world.completed(group)
    ids = tuple(f"x/{i}" for i in range(3))
    head = SliceHead(parts=(PartHead(ids=ids, track="policy", versions=(0, 0, 0)),))
    scores = ScoreHead(scores=(1.0, float("nan"), 0.0))
    world.send(msgspec.structs.replace(event, slices=(SliceResult(head=head, scores={"exact": scores}),)))
    assert [a.kind for a in world.log] == ["train", "publish"] and world.state.root.dropped == {}


def test_on_failed_abort_ends_the_job_with_its_reason() -> None:
    world = started(on_failed="abort")
    world.send(world.completed(next(iter(world.flights.values())), (1.0, float("nan"))))
    root = world.state.root
    assert root.phase == "failed" and "on_failed: abort" in root.reason and root.outstanding == 0
    assert world.log[-1].kind == "stop"


def test_a_batch_without_an_update_counts_and_says_why() -> None:
    world = started()
    world.send(*(world.completed(g) for g in list(world.flights.values())))
    record = world.log.pop(0)
    world.send(Trained(seq=record.seq, id=record.id, versions={"policy": 0}, updates={"policy": 0}, reason="no tokens"))
    root = world.state.root
    assert root.batches == 1 and root.unsynced == () and len(world.flights) == 3
    world.send(Published(track="policy", version=0))
    assert not any(r.kind == "publish" for r in world.state.root.records)


def test_repeats_and_strangers_are_ignored() -> None:
    world = started()
    group = next(iter(world.flights.values()))
    event = world.completed(group)
    world.send(event, event, Saved(seq=77), Dead(gid="nobody#0", stage="x", error="x"))
    assert world.state.root.completed == 1 and world.state.root.dead == 0


@pytest.mark.parametrize("seq_id", [(99, "x"), (1, "another")])
def test_a_trainer_ahead_of_the_log_means_that_redis_went_back(seq_id: tuple[int, str]) -> None:
    world = started()
    world.send(*(world.completed(g) for g in list(world.flights.values())))
    world.send(Trained(seq=seq_id[0], id=seq_id[1], versions={"policy": 1}, updates={"policy": 1}))
    assert any(isinstance(c, Restore) for c in world.commands)


def test_rolled_back_asks_for_restore() -> None:
    world = started()
    world.send(RolledBack(seq=3, detail="gone"))
    assert any(isinstance(c, Restore) for c in world.commands)


def test_a_checkpoints_cut_counts_its_batches_and_issues_the_open_groups_again() -> None:
    world = started(checkpoint_every=1, max_staleness=1, max_inflight=6, need="at_least")
    chosen = sorted(world.flights)[:3]
    world.send(*(world.completed(world.flights[g]) for g in chosen))
    saved = cut(world.state)
    assert [r.kind for r in saved.root.records] == ["train", "publish", "checkpoint"] and len(saved.open) == 3
    root = from_cut(saved, incarnation=2, seq=9)
    assert (root.batches, root.trained, root.dropped, root.incarnation) == (1, 3, {"restored": 3}, 2)
    assert root.seq == 9 and root.again == ((3, 1), (4, 1), (5, 1)) and root.outstanding == 0 and balanced(State(root, {}))


def test_pause_stops_admission_and_resume_goes_on() -> None:
    world = started()
    world.send(Operator(command="pause"))
    world.send(*(world.completed(g) for g in list(world.flights.values())))
    world.send(*world.trainer())
    world.send(*world.trainer())
    assert world.state.root.batches == 1 and not world.flights and launch(world.plan, world.state.root) == 0
    world.send(Operator(command="resume"))
    assert len(world.flights) == 3


def test_cancel_closes_everything_and_stops_the_trainer() -> None:
    world = started()
    world.send(Operator(command="cancel"))
    root = world.state.root
    assert root.phase == "cancelled" and root.dropped == {"cancelled": 3} and root.outstanding == 0
    assert world.log[-1].kind == "stop" and not world.state.groups


def test_a_fatal_failure_fails_the_job_and_another_only_notes() -> None:
    world = started()
    world.send(Failure(origin="reward", error="odd", fatal=False))
    assert phase(world) == "running"
    world.send(Failure(origin="trainer", error="no such tensor", fatal=True))
    assert phase(world) == "failed" and world.state.root.reason == "trainer: no such tensor"


def test_a_bad_prompt_is_dead_and_replaced_by_the_next() -> None:
    world = started()
    gid = sorted(world.flights)[0]
    world.send(BadRecord(gid, "too long"))
    assert world.state.root.dead == 1 and len(world.flights) == 3 and gid not in world.flights


def test_a_job_whose_groups_all_die_fails_with_the_last_error() -> None:
    world = started(steps=100)
    while phase(world) == "running" and world.state.root.dead < 1000:
        gid = sorted(world.flights)[0]
        if world.state.root.dead == 42:  # one that gets through: the count starts again
            world.send(world.completed(world.flights[gid]))
        world.send(*(Dead(gid=g, stage="rollout.policy", error="no such layer") for g in sorted(world.flights)))
    root = world.state.root
    assert phase(world) == "failed" and "no such layer" in root.reason and 64 + 42 <= root.dead < 64 + 42 + 6


def test_sft_issues_records_that_are_ready_and_publishes_at_the_end_only() -> None:
    world = World(
        plan(domain="sft", branches=(), route=(), scorers=(), max_inflight=6, publish_at_end_only=True, advantages=False),
        0,
    )
    world.send(Started(applied_seq=0, versions={"policy": 0}, published={}, world_size=1))
    while world.log:
        world.send(*world.trainer())
    root = world.state.root
    assert root.phase == "done" and root.trained == 12 and root.dropped == {} and root.published == {"policy": 4}
    assert sum(isinstance(c, Stepped) for c in world.commands) == 4


def test_two_checkpoints_under_way_count_the_log_once() -> None:
    world = started(checkpoint_every=1, log_budget=1000, steps=9)
    body, late = BodyRef(uri="redis:0/x", nbytes=25), list[Append]()
    for _ in range(2):
        for group in list(world.flights.values()):
            event = world.completed(group)
            [piece] = event.slices
            piece = msgspec.structs.replace(piece, head=msgspec.structs.replace(piece.head, body=body))
            world.send(msgspec.structs.replace(event, slices=(piece,)))
        saved = [record for record in world.log if record.kind == "checkpoint"]
        world.log = [record for record in world.log if record.kind != "checkpoint"]
        while world.log:
            world.send(*world.trainer())
        late += saved
    assert world.state.root.log_bytes == 150
    for record, left in zip(late, (75, 0), strict=True):
        world.send(Saved(seq=record.seq))
        assert world.state.root.log_bytes == left


def test_the_retained_log_has_a_budget() -> None:
    """At 70 % a checkpoint is made, at 100 % admission waits for it."""
    world = started(checkpoint_every=0, log_budget=100, steps=9)
    body = BodyRef(uri="redis:0/x", nbytes=25)

    def complete() -> None:
        for group in list(world.flights.values()):
            event = world.completed(group)
            [piece] = event.slices
            piece = msgspec.structs.replace(piece, head=msgspec.structs.replace(piece.head, body=body))
            world.send(msgspec.structs.replace(event, slices=(piece,)))

    complete()
    assert [a.kind for a in world.log] == ["train", "publish", "checkpoint"] and world.state.root.log_bytes == 75
    saved = world.log.pop()
    world.send(*world.trainer())
    world.send(*world.trainer())
    complete()
    assert world.state.root.log_bytes == 150 and [a.kind for a in world.log] == ["train", "publish"]
    world.send(*world.trainer())
    world.send(*world.trainer())
    assert not world.flights and launch(world.plan, world.state.root) == 0
    said = waits_for(world.plan, world.state.root, world.state.groups.values())
    assert said == "a checkpoint: the train log retains 150 bytes of 100"
    world.send(Saved(seq=saved.seq))
    assert world.state.root.log_bytes == 75 and len(world.flights) == 3


def test_a_log_that_one_batch_fills_is_relieved() -> None:
    """What is built with a batch (targets) counts when it is written: past the budget a checkpoint comes without a batch."""
    world = started(checkpoint_every=0, log_budget=100, steps=9)
    for group in list(world.flights.values()):
        world.send(world.completed(group))
    assert [a.kind for a in world.log] == ["train", "publish"]
    world.state = msgspec.structs.replace(world.state, root=retained(world.state.root, world.log[0].seq, 600))
    world.send(Operator(command="pause"))
    world.send(*world.trainer())
    world.send(*world.trainer())
    assert [a.kind for a in world.log][-1] == "checkpoint", world.log
    saved = world.log[-1]
    world.send(Operator(command="resume"))
    world.send(Saved(seq=saved.seq))
    assert world.state.root.log_bytes == 0


def test_groups_of_equal_rewards_are_replaced_up_to_a_bound() -> None:
    world = started(max_backfill=2, batch_size=2, max_inflight=2)
    for number in range(4):
        first = min(world.flights.values(), key=lambda g: g.draw)
        world.send(world.completed(first, rewards=(0.5, 0.5)))
        assert world.state.root.dropped == {"zero_variance": min(number + 1, 2)}, "their prompts do not come again"
        world.flights = {g: f for g, f in world.flights.items() if g != first.gid}
    [record, *_] = world.log
    assert [g.draw for g in record.groups] == [2, 3] and not world.state.root.again
    [note] = [c for c in world.commands if isinstance(c, Note) and "equal rewards" in c.text]
    assert "batch 1: 2 groups of equal rewards were replaced; further ones are trained" in note.text
    assert world.state.root.records[0].stats["dropped/zero_variance"] == 2


def test_what_is_left_over_when_a_batch_has_formed_is_dropped() -> None:
    world = started(oversample=1.5, batch_size=2, max_inflight=3)
    assert len(world.flights) == 3
    slow = world.flights["s:0:0#0"]
    world.send(*(world.completed(g) for g in list(world.flights.values()) if g is not slow))
    assert [g.draw for g in world.log[0].groups] == [1, 2]
    assert world.state.root.dropped == {"surplus": 1} and not world.state.root.again and not world.state.groups
    world.send(world.completed(slow))
    assert world.state.root.completed == 2, "it comes too late"


def test_a_slow_group_is_issued_again_after_its_deadline() -> None:
    world = started(group_deadline=5.0, batch_size=1, max_inflight=1)
    for _ in range(7):
        world.send()
    assert set(world.flights) == {"s:0:0#1"} and world.state.root.dropped == {"deadline": 1}
    assert world.state.root.reissued == 1


def test_a_cohort_is_of_one_version_also_what_is_issued_again() -> None:
    world = started(mixing=False, max_staleness=1, batch_size=2, max_inflight=4, need="at_least", on_failed="drop_group")
    first = [g for g in world.flights.values() if g.cohort == 0]
    assert len(first) == 2 and {g.needs["policy"] for g in world.flights.values()} == {Need("exactly", 0)}
    world.send(*(world.completed(g) for g in first))
    world.send(*world.trainer())
    world.send(*world.trainer())  # version 1 is published
    late = [g for g in world.flights.values() if g.cohort == 2]
    assert {g.needs["policy"] for g in late} == {Need("exactly", 1)} and world.state.root.cohorts == {
        1: {"policy": 0},
        2: {"policy": 1},
    }
    failing = next(g for g in world.flights.values() if g.cohort == 1)
    world.send(world.completed(failing, rewards=(float("nan"),) * 2))
    [again] = [g for g in world.flights.values() if g.gid == f"{failing.gid.partition('#')[0]}#1"]
    assert again.cohort == 1 and again.needs["policy"] == Need("exactly", 0)
    world.send(*(world.completed(g) for g in late))
    assert len(world.log) == 0, "a later cohort does not go first"


def test_a_deadline_makes_no_prompt_bad() -> None:
    """Where no worker comes, nothing dies."""
    world = started(group_deadline=5.0, batch_size=1, max_inflight=1, max_reissues=2)
    for _ in range(100):
        world.send()
    assert world.state.root.dead == 0 and set(world.flights) == {"s:0:0#2"}


def test_a_cohort_that_became_too_old_is_issued_for_a_newer_version() -> None:
    world = started(mixing=False, max_staleness=1, batch_size=2, max_inflight=4, need="at_least", steps=9)
    world.state = State(
        msgspec.structs.replace(world.state.root, current={"policy": 5}, published={"policy": 5}), world.state.groups
    )
    first = next(g for g in world.flights.values() if g.cohort == 0)
    world.send(world.completed(first))
    assert world.state.root.dropped == {"stale": 2} and world.state.root.dead == 0
    again = [g for g in world.flights.values() if g.cohort == 0]
    assert {g.issue for g in again} == {1} and {g.needs["policy"] for g in again} == {Need("exactly", 5)}


def test_a_version_that_is_gone_is_not_waited_for() -> None:
    """A controller that was away for longer than its leases last: what is pinned to it is issued for what there is."""
    suites = {"s": SuitePlan(at=("start",), size=2, scorers=("exact",))}
    world = started(mixing=False, max_staleness=1, batch_size=2, max_inflight=4, need="at_least", steps=9, suites=suites)
    world.state = State(
        msgspec.structs.replace(world.state.root, current={"policy": 1}, published={"policy": 1}), world.state.groups
    )
    first = next(g for g in world.flights.values() if g.cohort == 0)
    world.send(world.completed(first))
    world.send(Gone("policy", 0))
    root = world.state.root
    assert root.dropped == {"unpublished": 4} and balanced(world.state) and root.dead == 0
    train = [g for g in world.state.groups.values() if g.kind == "train"]
    assert {g.issue for g in train} == {1} and {g.needs["policy"] for g in train} == {Need("exactly", 1)}
    [run] = root.evals
    assert run.versions == {"policy": 1} and run.issue == 1
    world.go()
    assert world.state.root.phase == "done"


def test_what_keeps_for_longer_waits_for_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of the oldest version are in flight: a batch of newer ones would leave one batch too many."""
    world = started(waits_for_old=True, max_staleness=2, batch_size=2, max_inflight=6, need="at_least", steps=9)
    monkeypatch.setattr(world.rng, "randint", lambda low, high: low)  # rollouts take what they must
    old = list(world.flights.values())
    world.send(*map(world.completed, old[:2]))
    while world.log:
        world.send(*world.trainer())
    newer = [g for g in world.flights.values() if g.needs["policy"].version == 1]
    world.send(*map(world.completed, newer))
    assert len(newer) == 2 and not world.log, "four old groups fit into two batches, and into no fewer"
    world.send(*map(world.completed, old[2:4]))
    assert {g.gid for g in world.log[0].groups} == {g.gid for g in old[2:4]}
    while world.log:
        world.send(*world.trainer())
    assert not world.log and world.state.root.batches == 2
    world.send(*map(world.completed, old[4:]))
    assert {g.gid for g in world.log[0].groups} == {g.gid for g in old[4:]} and not world.state.root.dropped


def test_nothing_is_dropped_where_the_trainer_waits() -> None:
    world = started(waits_for_old=True, max_staleness=1, batch_size=2, max_inflight=4, need="at_least", steps=9)
    slow = world.flights["s:0:0#0"]
    for _ in range(2):
        others = [g for g in world.flights.values() if g is not slow and g.needs["policy"].version == world.version]
        world.send(*(world.completed(g) for g in others[:2]))
        while world.log:
            world.send(*world.trainer())
    assert world.state.root.batches == 1 and slow.gid in world.flights, "its last chance is the next batch"
    old = [g for g in world.flights.values() if g.needs["policy"].version == 0]
    assert slow in old and len(old) == 2
    world.send(*map(world.completed, old))
    assert slow.gid in {g.gid for g in world.log[0].groups} and not world.state.root.dropped
