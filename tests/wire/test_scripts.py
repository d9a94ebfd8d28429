"""Each script's promises, one by one, on a real Redis; also as a one-node cluster, where undeclared slots are refused."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from shared.wire.bodies import BodyStore, DirectoryBodies
from shared.wire.client import connect
from shared.wire.codec import pack, unpack
from shared.wire.envelope import Dead, Envelope, Need, PartHead, ScoreHead, SliceHead, Trained, read_event
from shared.wire.hops import Commit, Filled, Work, commit, meta_fields, phase, read_work, send_all
from shared.wire.keys import GROUP, JobKeys
from shared.wire.scripts import Entry, Scripts, Write, ensure_group, hset, new_revision, send, text, xadd
from shared.wire.server import RedisServer

ROUTE = ("rollout.policy", "reward")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port if port < 55000 else free_port()  # the cluster bus takes port + 10000


@pytest.fixture(scope="module", params=["single", "cluster"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    cluster = request.param == "cluster"
    options = ("--cluster-enabled", "yes") if cluster else ()
    found = RedisServer(tmp_path_factory.mktemp(request.param), port=free_port() if cluster else 0, options=options)
    found.start()
    if cluster:
        client = connect(found.url)
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
            pass
    yield found
    found.kill()


class Bench:
    """A fresh job with one open group `g#0` of one slice and two scorers, and two consumers."""

    def __init__(self, client: Any, folder: Path) -> None:
        self.client, self.keys, self.scripts = client, JobKeys(uuid4().hex[:8]), Scripts(client)
        self.store = BodyStore(client, self.keys, DirectoryBodies(folder))
        client.hset(self.keys.meta, mapping=meta_fields(1, ROUTE, ("a", "b")))
        client.hdel(self.keys.meta, phase("eval", 0, "rollout.policy"))
        client.zadd(self.keys.open, {"g#0": 0})
        client.hset(self.keys.group("g#0"), mapping={"need": 2, "have": 0})
        for stage in ("rollout.policy", "reward.a", "reward.b", "inbox"):
            ensure_group(client, self.keys.stage(stage))

    def envelope(self, position: int = 0, **changes: Any) -> Envelope:
        values: dict[str, Any] = {
            "id": uuid4().hex,
            "job": self.keys.job,
            "incarnation": 1,
            "kind": "train",
            "route": ROUTE,
            "position": position,
            "scorers": ("a", "b"),
            "gid": "g#0",
            "shelf": 0,
            "slice": (0, 1),
            "needs": {"policy": Need("exactly", 0)},
            "head": SliceHead(parts=(PartHead(ids=("g/0",), track="policy"),)),
        }
        return Envelope(**(values | changes))

    def work(self, stage: str, position: int = 0, reader: str = "me", **changes: Any) -> Work:
        """Adds a message to a stage and reads it."""
        envelope = self.envelope(position, **changes)
        fields = {"g": envelope.gid, "s": "0", "h": pack(envelope), "b": b"body"}
        self.client.xadd(self.keys.stage(stage), fields)
        return read_work(self.read(stage, reader), 0.0)

    def read(self, stage: str, reader: str = "me") -> Entry:
        [[stream, [(entry_id, fields)]]] = self.client.xreadgroup(GROUP, reader, {self.keys.stage(stage): ">"}, count=1)
        return Entry(stream.decode(), entry_id.decode(), fields)

    def commit(self, stage: str, work: Work, result: Any, consumer: str = "me") -> str:
        [answer] = self.commits(stage, [(work, result)], consumer)
        return answer

    def commits(self, stage: str, results: Sequence[tuple[Work, Any]], consumer: str = "me") -> list[str]:
        made = [commit(self.keys, stage, work, result, self.store) for work, result in results]
        return send_all(self.scripts, self.keys, consumer, made)

    def untouched(self, entry: Entry) -> bool:
        stream = entry.stream
        return bool(self.client.xpending_range(stream, GROUP, entry.id, entry.id, 1)) and bool(
            self.client.xrange(stream, entry.id, entry.id)
        )

    def length(self, stage: str) -> int:
        return int(self.client.xlen(self.keys.stage(stage)))

    def count(self, name: str) -> int:
        return int(self.client.hget(self.keys.counts, name) or 0)


@pytest.fixture
def b(server: RedisServer, tmp_path: Path) -> Bench:
    return Bench(connect(server.url), tmp_path)


FILLED = Filled(SliceHead(parts=(PartHead(ids=("g/0",), track="policy", lengths=(3,), versions=(0,)),)), [b"filled"])
SCORE = ScoreHead(scores=(1.0,))


def refused(call: Callable[[], object], word: str) -> bool:
    try:
        call()
    except redis.ResponseError as error:
        return word in str(error)
    return False


def test_a_hop_moves_once_to_every_scorer_with_its_body(b: Bench) -> None:
    work = b.work("rollout.policy")
    assert b.commit("rollout.policy", work, FILLED, "other") == "LOST" and b.untouched(work.entry)
    assert [b.commit("rollout.policy", work, FILLED) for _ in range(2)] == ["OK", "LOST"]
    assert [b.length(s) for s in ("rollout.policy", "reward.a", "reward.b")] == [0, 1, 1]
    onward = read_work(b.read("reward.a"), 0.0).envelope
    assert onward.position == 1 and onward.head.body is not None
    assert bytes(b.store.load(onward.head.body)) == b"filled"


def test_nothing_is_written_when_a_key_is_of_the_wrong_kind(b: Bench) -> None:
    work = b.work("rollout.policy")
    b.client.delete(b.keys.stage("reward.b"))
    b.client.set(b.keys.stage("reward.b"), "not a stream")
    assert refused(lambda: b.commit("rollout.policy", work, FILLED), "BADKEY")
    assert b.untouched(work.entry) and not b.length("reward.a") and not b.client.exists(b.keys.shelf(0))


def test_of_commits_that_go_together_each_has_its_own_answer(b: Bench) -> None:
    """And one that Redis refuses changes nothing, of the others neither."""
    ours, lost, closed, odd = (b.work("rollout.policy", slice=(k, k + 1)) for k in range(4))
    closed = Work(closed.entry, b.envelope(gid="h#0"), None, 0.0)
    b.client.xack(lost.entry.stream, GROUP, lost.entry.id)
    pieces = [(work, FILLED) for work in (ours, lost, closed, odd)]
    assert b.commits("rollout.policy", pieces) == ["OK", "LOST", "late", "OK"]
    assert b.length("reward.a") == b.length("reward.b") == 2 and b.count("late") == 1
    assert b.commits("rollout.policy", pieces) == ["LOST"] * 4 and b.length("reward.a") == 2
    found = [b.work("reward.a", 1).entry for _ in range(3)]
    first, twin, other = (
        Work(entry, b.envelope(1, slice=place), None, 0.0) for entry, place in zip(found, ((0, 1), (0, 1), (5, 6)), strict=True)
    )
    assert b.commits("reward.a", [(first, SCORE), (twin, SCORE), (other, SCORE)]) == ["WAIT", "twin", "READY"]
    good, bad = (b.work("rollout.policy") for _ in range(2))
    made = [commit(b.keys, "rollout.policy", work, FILLED, b.store) for work in (good, bad)]
    wrong = Commit(made[1].entry, made[1].words, [xadd(b.keys.meta, {"e": "x"})])
    assert refused(lambda: send_all(b.scripts, b.keys, "me", [made[0], wrong]), "BADKEY")
    assert b.untouched(good.entry) and b.untouched(bad.entry) and b.length("reward.b") == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"incarnation": 2}, "refused"),
        ({"kind": "eval"}, "wrong_phase"),
        ({"position": 1}, "wrong_phase"),
        ({"position": 7}, "wrong_phase"),
        ({"gid": "h#0"}, "late"),
    ],
)
def test_a_message_of_another_incarnation_phase_or_closed_group_is_taken_counted_and_dropped(
    b: Bench, changes: dict[str, Any], why: str
) -> None:
    changes = dict(changes)
    position = changes.pop("position", 0)
    work = b.work("rollout.policy", **changes)
    stale = Work(work.entry, b.envelope(position, **changes), None, 0.0)
    if position >= len(ROUTE):  # the envelope itself cannot go on; only its phase matters here
        words = phase("train", position, "rollout.policy"), 1, "g#0"
        [answer] = send_all(b.scripts, b.keys, "me", [Commit(work.entry, words, [])])
    else:
        result = FILLED if position == 0 else SCORE
        answer = b.commit("rollout.policy", stale, result)
    assert answer == why and b.count(why) == 1
    assert not b.length("rollout.policy") and not b.length("reward.a") and not b.length("inbox")


def test_the_last_slot_sends_the_group_and_twins_do_not(b: Bench) -> None:
    b.client.hset(b.keys.group("g#0"), "h:0", pack(FILLED.head))
    first, twin, second = (b.work(s, 1) for s in ("reward.a", "reward.a", "reward.b"))
    late = b.work("reward.b", 1)
    assert b.commit("reward.a", first, SCORE, "other") == "LOST"
    assert b.commit("reward.a", first, SCORE) == "WAIT"
    assert b.commit("reward.a", twin, SCORE) == "twin"
    assert b.commit("reward.b", second, SCORE) == "READY"
    event = read_event(b.read("inbox").fields)
    assert event.gid == "g#0" and set(event.slices[0].scores) == {"a", "b"}  # type: ignore[union-attr]
    b.client.unlink(b.keys.group("g#0"))
    b.client.zrem(b.keys.open, "g#0")
    assert b.commit("reward.b", late, SCORE) == "late" and not b.client.exists(b.keys.group("g#0"))


def test_commit_state_is_all_or_nothing(b: Bench) -> None:
    for _ in range(2):
        b.client.xadd(b.keys.inbox, {"e": b"x"})
    first, second = b.read("inbox"), b.read("inbox")
    v1, v2 = new_revision(""), new_revision("1.x")
    out = [xadd(b.keys.log, {"e": "1"}, "1-0"), send(b.keys, "rollout.policy", "g#0", 0, {"g": "g#0"})]

    def step(revision: str, after: str, taken: list[str], writes: list[Write]) -> list[str]:
        return b.scripts.commit_state(b.keys, "t", revision, after, b"s", taken, writes)

    assert step("", v1, [first.id], out) == ["FENCED"]
    assert b.scripts.lease(b.keys.lease, "t", 9000, take=True) == "MINE"
    assert step("", v1, [first.id, "1-1", first.id], out) == ["GONE", "1-1", first.id]
    b.client.set(b.keys.steps, "text")
    assert refused(lambda: step("", v1, [first.id], [*out, xadd(b.keys.steps, {"m": 1})]), "BADKEY")
    assert b.untouched(first) and not b.client.exists(b.keys.state, b.keys.log)
    assert step("", v1, [first.id, second.id], out) == ["OK"]
    assert step("", v1, [first.id, second.id], out) == ["OK"]  # a retry after a lost reply
    assert step("1.stale", v2, [], out) == ["STALE"]
    assert b.client.xlen(b.keys.log) == 1 and b.length("rollout.policy") == 1 and not b.length("inbox")
    place = b.client.hget(b.keys.group("g#0"), "e:rollout.policy:0")
    assert b.client.xrange(b.keys.stage("rollout.policy"), place, place)


def test_the_log_refuses_a_repeated_or_lower_id_before_anything_is_written(b: Bench) -> None:
    b.scripts.lease(b.keys.lease, "t", 9000, take=True)
    rows = hset(b.keys.rows, {"g": "row"})

    def step(revision: str, *ids: str) -> tuple[str, list[str]]:
        after = new_revision(revision)
        writes = [rows, *(xadd(b.keys.log, {"e": "x"}, i) for i in ids)]
        return after, b.scripts.commit_state(b.keys, "t", revision, after, b"s", [], writes)

    revision, answer = step("", "1-0", "2-0")
    assert answer == ["OK"]
    for ids in (["2-0"], ["1-0"], ["3-0", "3-0"], ["4-0", "3-0"], ["x"]):
        b.client.delete(b.keys.rows)
        with pytest.raises(redis.ResponseError, match="BADID"):
            step(revision, *ids)
        assert not b.client.exists(b.keys.rows)


def test_renew_steals_nothing_and_claim_counts_lost_leases(b: Bench) -> None:
    mine, theirs = b.work("rollout.policy").entry, b.work("rollout.policy", reader="other").entry
    deleted = b.work("rollout.policy").entry
    assert b.scripts.renew(mine.stream, "me", [mine.id, theirs.id, "1-1"]) == [theirs.id, "1-1"]
    owners = {p["message_id"].decode(): p["consumer"] for p in b.client.xpending_range(mine.stream, GROUP, "-", "+", 9)}
    assert owners[theirs.id] == b"other" and b.scripts.claim(mine.stream, "me", 60000, 16) == []
    b.client.xdel(mine.stream, deleted.id)
    found = b.scripts.claim(mine.stream, "third", 0, 16)
    assert [(e.id, e.previous) for e in found] == [(mine.id, "me"), (theirs.id, "other")]
    assert b.client.xpending(mine.stream, GROUP)["pending"] == 2  # the deleted one is gone from it
    group = b.keys.group("g#0")
    assert b.scripts.lost(found[0], "third", group, "rollout.policy:0") == (1, 1)
    assert b.scripts.lost(found[1], "third", group, "rollout.policy:0") == (2, 2)
    b.client.unlink(group)
    assert b.scripts.lost(found[1], "third", group, "x") == (0, 0) and not b.client.exists(group)


def test_claim_walks_a_long_pending_list(b: Bench) -> None:
    works = [b.work("rollout.policy") for _ in range(40)]
    found = b.scripts.claim(works[0].entry.stream, "other", 0, 40)
    assert [e.id for e in found] == [w.entry.id for w in works]


def test_nack_is_claimable_at_once_then_tells_the_inbox(b: Bench) -> None:
    entry = b.work("rollout.policy").entry
    event = pack(Dead(gid="g#0", stage="rollout.policy", error="boom"))

    def nack(entry: Entry, consumer: str = "me") -> str:
        return b.scripts.nack(b.keys, entry, consumer, "rollout.policy:0", 2, "trace\nboom", event)

    assert nack(entry, "other") == "LOST" and nack(entry) == "AGAIN"
    [again] = b.scripts.claim(entry.stream, "me", 60000, 16)
    assert again.previous is None  # handed back, not lost
    assert nack(again) == "DEAD" and not b.length("rollout.policy")
    [[_, letter]] = b.client.xrange(b.keys.dead)
    assert letter[b"error"] == b"trace\nboom" and letter[b"errors"] == b"2" and b"message.h" in letter
    assert read_event(b.read("inbox").fields) == unpack(event, Dead)
    late = b.work("rollout.policy", gid="h#0").entry
    assert nack(late) == "late" and b.count("late") == 1 and b.client.xlen(b.keys.dead) == 1


def test_a_consumer_with_pending_entries_is_not_reaped(b: Bench) -> None:
    work = b.work("rollout.policy")
    assert b.scripts.reap(work.entry.stream, 0) == []
    assert b.commit("rollout.policy", work, FILLED) == "OK" and b.scripts.reap(work.entry.stream, 0) == ["me"]


def test_lease_has_one_holder(b: Bench) -> None:
    def lease(token: str, take: bool) -> str:
        return b.scripts.lease(b.keys.lease, token, 9000, take)

    assert [lease("t", False), lease("t", True), lease("u", True), lease("t", False)] == [
        "FREE",
        "MINE",
        "HELD",
        "MINE",
    ]
    assert not b.scripts.release(b.keys.lease, "u") and b.scripts.release(b.keys.lease, "t")
    assert lease("u", True) == "MINE"


def test_only_the_newest_trainer_is_heard(b: Bench) -> None:
    event = pack(Trained(seq=1, id="x", versions={}, updates={}))
    assert b.scripts.report(b.keys, "old", [event]) == "FENCED"
    key = b.keys.of("assignment")
    assert text(b.scripts.run("fence", [key, b.keys.meta], b"A", "new")) == "LOST"
    b.client.set(key, b"A")
    assert text(b.scripts.run("fence", [key, b.keys.meta], b"A", "new")) == "OK"
    assert b.scripts.report(b.keys, "old", [event]) == "FENCED" and b.scripts.report(b.keys, "new", [event]) == "OK"
    assert b.length("inbox") == 1


def test_dropping_takes_the_entry_from_whoever_holds_it(b: Bench) -> None:
    work = b.work("rollout.policy")
    b.scripts.lease(b.keys.lease, "t", 9000, take=True)
    take = Write("TAKE", work.entry.stream, (GROUP, work.entry.id))
    assert b.scripts.commit_state(b.keys, "t", "", new_revision(""), b"s", [], [take]) == ["OK"]
    assert b.scripts.renew(work.entry.stream, "me", [work.entry.id]) == [work.entry.id]
    assert b.commit("rollout.policy", work, FILLED) == "LOST"


def test_a_cluster_refuses_keys_of_another_job(server: RedisServer, b: Bench) -> None:
    if not b.client.info("cluster")["cluster_enabled"]:
        return
    work = b.work("rollout.policy")
    foreign = [xadd(JobKeys("another").inbox, {"e": "x"})]
    made = [commit(b.keys, "rollout.policy", work, FILLED, b.store, foreign)]
    call = lambda: send_all(b.scripts, b.keys, "me", made)  # noqa: E731
    assert refused(call, "same slot") or refused(call, "CROSSSLOT") or refused(call, "slot")
