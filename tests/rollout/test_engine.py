"""The engine and the handler in front of it: batching, versions, deterministic mode, errors."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.rollout import handler
from services.rollout.handler import RolloutHandler, VersionMissing
from services.rollout.prefetch import Prefetch
from services.trainer.publisher import shards
from shared.config.builtin import Engine as EngineParams
from shared.engines.base import fill
from shared.engines.batching import Item
from shared.engines.transformers_engine import TransformersEngine
from shared.models.ar.bundle import load
from shared.types import ARSamplingParams, Sample
from shared.weights.store import WeightsDamaged, WeightStore
from shared.wire import codec
from shared.wire.bodies import BodyStore, DirectoryBodies
from shared.wire.envelope import Envelope, Need, PartHead, SliceHead
from shared.wire.hops import Filled, Result, Work
from shared.wire.keys import JobKeys
from shared.wire.scripts import Entry
from tests.conftest import own_tensors

PARAMS = ARSamplingParams(max_new_tokens=6, stop_token_ids=(1,), seed=5)


@pytest.fixture
def engine(model_folder: Path) -> Iterator[TransformersEngine]:
    found = TransformersEngine(load(model_folder, None), EngineParams(batch_wait_ms=20))
    yield found
    found.close()


def request(root: str, n: int = 3, prompt: tuple[int, ...] = (20, 21, 22), params: ARSamplingParams = PARAMS) -> list[Sample]:
    return [Sample.request([root], params, n=n, texts=["x"], tokens=[list(prompt)])]


def tokens(samples: list[Sample]) -> list[int]:
    return list(samples[0].frontier.text_segment.tokens)


def test_a_filled_slice_has_everything_that_later_stages_need(engine: TransformersEngine) -> None:
    [[sample]] = fill(engine, [request("a:0:0")])
    part = sample.frontier
    segment = part.text_segment
    assert part.sample_ids == ("a:0:0/0", "a:0:0/1", "a:0:0/2") and segment.log_probs is not None
    assert segment.log_probs.dtype == np.float32 and len(segment.log_probs) == segment.lengths.sum()
    assert set(part.status or ()) <= {"ok", "truncated"} and len(part.text) == 3
    assert segment.finish_reasons is not None and part.output_version is not None


def test_slices_of_one_kind_share_a_batch_and_the_result_does_not_depend_on_it(engine: TransformersEngine) -> None:
    requests = [request(f"a:0:{i}", prompt=(20 + i, 21)) for i in range(6)]
    found = [tokens(samples) for samples in fill(engine, requests)]
    single = [tokens(fill(engine, [one])[0]) for one in requests]
    assert found == single and len({tuple(f) for f in found}) > 1


def test_slices_of_other_parameters_are_not_mixed(engine: TransformersEngine) -> None:
    short = msgspec.structs.replace(PARAMS, max_new_tokens=2)
    found = fill(engine, [request(f"a:0:{i}", params=PARAMS if i % 2 else short) for i in range(4)])
    longest = [max(sample.frontier.text_segment.lengths) for [sample] in found]
    assert longest[0] <= 2 and longest[2] <= 2 and max(longest[1], longest[3]) > 2


def test_an_error_belongs_to_its_batch_only(engine: TransformersEngine) -> None:
    with pytest.raises(IndexError):
        fill(engine, [request("a:0:0", prompt=(5000,))])
    assert fill(engine, [request("a:0:0")])


def test_very_different_lengths_are_not_padded_together(engine: TransformersEngine) -> None:
    engine.waiting = [Item(request("a:0:0", prompt=(9,) * n), False, 0, lambda outcomes: None) for n in (3, 100, 5, 90)]
    lengths = [sorted(len(i.samples[0].conditioning(0)) for i in engine.choose()) for _ in range(2)]
    engine.waiting.clear()
    assert lengths == [[3, 5], [90, 100]]


# the handler -----------------------------------------------------------------------------------------------------------------


class Setup:
    def __init__(self, engine: TransformersEngine, client: Any, folder: Path) -> None:
        self.engine, self.store = engine, WeightStore(folder / "weights", "policy")
        bodies = BodyStore(client, JobKeys("j"), DirectoryBodies(folder / "bodies"))
        self.client, self.keys = client, JobKeys("j")
        self.prefetch = Prefetch(lambda: client, self.keys, self.store, engine.load, "me")
        self.handler = RolloutHandler(engine, self.store, self.prefetch, bodies, "policy", "me", patience_s=1.0)

    def publish(self, version: int, scale: float = 1.0) -> None:
        bundle = self.engine.bundle
        state = {n: v * scale for n, v in own_tensors(bundle).items()}
        self.store.publish(1, version, shards(state))

    def work(self, root: str, need: Need, deterministic: bool = False) -> Work:
        head = SliceHead(parts=(PartHead(ids=(), track="policy"),))
        envelope = Envelope(
            id="m",
            job="j",
            incarnation=1,
            kind="train",
            route=("rollout.policy", "reward"),
            position=0,
            scorers=("a",),
            gid=f"{root}#0",
            shelf=0,
            slice=(0, 3),
            needs={"policy": need},
            head=head,
            deterministic=deterministic,
        )
        body = codec.encode(request(root))
        return Work(Entry("s", "1-1", {}), envelope, body, time.monotonic())

    def one(self, root: str, need: Need, **more: Any) -> Filled:
        [future] = self.handler.submit([self.work(root, need, **more)])
        found: Result = future.result(30)
        assert isinstance(found, Filled)
        return found


@pytest.fixture
def setup(engine: TransformersEngine, client: Any, tmp_path: Path) -> Setup:
    return Setup(engine, client, tmp_path)


def test_the_version_that_a_message_needs_is_pulled_and_stamped(setup: Setup) -> None:
    setup.publish(0)
    first = setup.one("a:0:0", Need("exactly", 0))
    setup.publish(1, scale=0.5)
    second = setup.one("a:0:0", Need("exactly", 1))
    assert [f.head.parts[0].versions for f in (first, second)] == [(0, 0, 0), (1, 1, 1)]
    a, b = (codec.decode(b"".join(f.parts), list[Sample]) for f in (first, second))
    assert a[0].frontier.text_segment.log_probs is not None and b[0].frontier.text_segment.log_probs is not None
    assert a[0].frontier.text_segment.log_probs.tobytes() != b[0].frontier.text_segment.log_probs.tobytes()
    again = setup.one("a:0:0", Need("exactly", 0))  # a pinned evaluation of the older version
    assert b"".join(again.parts) == b"".join(first.parts)


def test_at_least_takes_the_newest_and_exactly_does_not(setup: Setup) -> None:
    for version in (0, 1, 2):
        setup.publish(version)
    assert set(setup.one("a:0:0", Need("at_least", 1)).head.parts[0].versions) == {2}
    assert set(setup.one("a:0:0", Need("exactly", 1)).head.parts[0].versions) == {1}


def test_a_version_that_comes_later_is_waited_for(setup: Setup) -> None:
    [future] = setup.handler.submit([setup.work("a:0:0", Need("exactly", 3))])
    threading.Timer(0.3, setup.publish, (3,)).start()
    assert isinstance(future.result(30), Filled)


def test_a_version_that_never_comes_is_an_error_that_names_it(setup: Setup) -> None:
    [future] = setup.handler.submit([setup.work("a:0:0", Need("exactly", 9))])
    with pytest.raises(VersionMissing, match="version 9 of policy"):
        future.result(30)


def test_a_version_that_newer_ones_left_behind_is_not_waited_for(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "LEFT_BEHIND_S", 0.2)
    setup.handler.patience_s = 1e9
    setup.publish(5)
    [future] = setup.handler.submit([setup.work("a:0:0", Need("exactly", 4))])
    with pytest.raises(VersionMissing, match="version 4 of policy: the store has 5"):
        future.result(10)


@pytest.mark.parametrize("end", ["withdrawn", "closed"])
def test_nobody_waits_for_a_version_when_nothing_needs_it(setup: Setup, end: str) -> None:
    """Groups that were dropped meanwhile, and a worker that is told to end."""
    setup.handler.patience_s = 1e9
    works = [setup.work(f"a:0:{i}", Need("exactly", 4)) for i in range(2)]
    futures = setup.handler.submit(works)
    time.sleep(0.2)
    works[0].cancelled.set()
    time.sleep(0.2)
    assert not any(f.done() for f in futures)
    works[1].cancelled.set() if end == "withdrawn" else setup.handler.close()
    for future in futures:
        with pytest.raises(VersionMissing, match="nobody waits"):
            future.result(10)


def test_a_damaged_version_is_refused(setup: Setup) -> None:
    setup.publish(4)
    shard = setup.store.path(1, 4) / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    [future] = setup.handler.submit([setup.work("a:0:0", Need("exactly", 4))])
    with pytest.raises(WeightsDamaged):
        future.result(30)


def test_an_announced_version_is_read_ahead(setup: Setup) -> None:
    setup.publish(1)
    channel = setup.keys.published("policy")
    deadline = time.monotonic() + 10
    while setup.prefetch.staged is None:
        setup.client.publish(channel, codec.pack((1, 1)))
        assert time.monotonic() < deadline
        time.sleep(0.02)
    setup.client.publish(channel, b"nonsense")
    setup.client.publish(channel, codec.pack((1, 99)))  # never written: what was read ahead stays
    time.sleep(0.1)
    shutil.rmtree(setup.store.path(1, 1))
    (setup.store.path(1, 1)).mkdir()
    (setup.store.path(1, 1) / "COMPLETE").touch()
    assert set(setup.one("a:0:0", Need("exactly", 1)).head.parts[0].versions) == {1}, "from memory: the files are gone"


def test_versions_are_taken_while_they_are_announced(setup: Setup) -> None:
    """A request waits for a version that is being written: the hint and the request find it at the same moment."""
    setup.publish(0)
    setup.one("a:0:0", Need("exactly", 0))
    for version in range(1, 60):
        [future] = setup.handler.submit([setup.work(f"a:0:{version}", Need("exactly", version))])
        setup.publish(version)
        setup.client.publish(setup.keys.published("policy"), codec.pack((1, version)))
        found = future.result(10)
        assert isinstance(found, Filled) and set(found.head.parts[0].versions) == {version}
    assert setup.prefetch.thread.is_alive()


def test_deterministic_slices_are_computed_alone(setup: Setup) -> None:
    """The bytes of a slice are the same whether others were submitted with it or not."""
    setup.publish(0)
    single = setup.one("a:0:1", Need("exactly", 0), deterministic=True)
    works = [setup.work(f"a:0:{i}", Need("exactly", 0), deterministic=True) for i in range(4)]
    found = [f.result(30) for f in setup.handler.submit(works)]
    assert isinstance(found[1], Filled) and b"".join(found[1].parts) == b"".join(single.parts)


def test_two_readers_of_one_worker_do_not_take_each_others_leases(setup: Setup) -> None:
    setup.publish(1)
    setup.publish(2)

    def read(_: int) -> None:
        for _ in range(400):
            with setup.store.leased(1, 1, "me"):
                assert setup.store.collect(1, keep=1) == []

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))
    assert setup.store.collect(1, keep=1) == [1]


def test_the_store_collects_old_versions_but_not_leased_or_pinned_ones(setup: Setup) -> None:
    for version in range(6):
        setup.publish(version)
    with setup.store.leased(1, 1, "reader"):
        assert setup.store.collect(1, keep=2, pinned=frozenset({0})) == [2, 3]
    assert setup.store.versions(1) == [0, 1, 4, 5]
    assert setup.store.collect(1, keep=2) == [0, 1]
    assert setup.store.publish(1, 5, ()) == 0, "a complete version is never rewritten"


# the probe -------------------------------------------------------------------------------------------------------------------


def until(check: Any, patience_s: float = 10) -> None:
    deadline = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_probe_is_the_log_prob_of_a_fixed_text(setup: Setup) -> None:
    first = setup.engine.probe()
    assert first is not None and first < 0 and setup.engine.probe() == first
    setup.publish(0, scale=0.9)
    setup.one("a:0:0", Need("exactly", 0))
    assert setup.engine.probe() not in (None, first)


@pytest.mark.parametrize("broken", [False, True])
def test_weights_that_do_not_arrive_raise_an_alarm(setup: Setup, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    said: list[str] = []
    setup.handler.say = said.append
    setup.publish(0)
    setup.one("a:0:0", Need("exactly", 0))
    until(lambda: setup.handler.probed is not None)
    if broken:
        monkeypatch.setattr("shared.engines.transformers_engine.assign", lambda model, loaded: None)
    setup.publish(1)  # the same bytes: a step with learning rate 0
    setup.one("a:0:1", Need("exactly", 1))
    until(lambda: setup.handler.probed is not None and setup.handler.probed[0] == (1, 1))
    assert said == []
    for version in (2, 3, 4, 5):
        assert said == []
        setup.publish(version, scale=0.5 + version / 10)
        setup.one(f"a:0:{version}", Need("exactly", version))
        until(lambda: setup.handler.probed is not None and setup.handler.probed[0] == (1, version))  # noqa: B023
        if broken and version == 4:
            [told] = said
            assert "4 versions with other bytes each, up to 4" in told and "the same answer" in told
            said.clear()
    assert said == []


def test_a_load_that_fails_in_the_middle_leaves_no_mixture(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine holds then is nothing: the next message gets its version in full, also the one from before."""
    setup.publish(0)
    setup.publish(1, scale=0.5)
    before = setup.one("a:0:0", Need("exactly", 0))

    def half(model: Any, loaded: Any) -> None:
        name = next(iter(loaded))
        with torch.no_grad():
            model.state_dict(keep_vars=True)[name].copy_(loaded[name])
        raise ValueError("broke off")

    with monkeypatch.context() as patch:
        patch.setattr("shared.engines.transformers_engine.assign", half)
        [future] = setup.handler.submit([setup.work("a:0:0", Need("exactly", 1))])
        with pytest.raises(ValueError, match="broke off"):
            future.result(30)
    assert setup.handler.held is None
    again = setup.one("a:0:0", Need("exactly", 0))
    assert b"".join(again.parts) == b"".join(before.parts)
