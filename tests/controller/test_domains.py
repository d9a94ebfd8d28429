"""Contract of all eight domains, without any model: wire, slices, gather with two scorers, propagation, advantages, the log
entry, and a pure lifecycle from the first request to the last step, on a real Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.controller.lifecycles import DOMAINS, parse
from services.controller.lifecycles.core import advance
from services.controller.lifecycles.state import Append, Event, Group, Issue, Plan, Root, State, Tick, balanced
from services.controller.scoring import train_slices
from services.trainer.batch import Batch
from shared.config.sections import Advantage
from shared.engines.heads import filled
from shared.types import (
    ARSamplingParams,
    DiffusionSamplingParams,
    LatentSegment,
    Media,
    Part,
    RawTensor,
    Sample,
    Text,
    TextSegment,
)
from shared.types.ids import root_id
from shared.wire import codec
from shared.wire.bodies import BodyStore, DirectoryBodies
from shared.wire.codec import pack, unpack
from shared.wire.envelope import (
    Envelope,
    LogEntry,
    PartHead,
    Published,
    Saved,
    ScoreHead,
    SliceHead,
    Started,
    Trained,
    envelope_fields,
    read_event,
)
from shared.wire.hops import commit, meta_fields, read_work, send_all
from shared.wire.keys import GROUP, JobKeys
from shared.wire.scripts import Entry, Scripts, ensure_group

TEXT = ARSamplingParams(max_new_tokens=8)
IMAGE = DiffusionSamplingParams(num_inference_steps=4, height=64, width=64, sigmas=(1.0, 0.75, 0.5, 0.25, 0.0))
BASE: dict[str, Any] = {
    "steps": 2,
    "model": {"path": "x"},
    "data": {"source": {"name": "sorting"}, "batch_size": 2},
    "train": {"optimizer": {"lr": 1e-3}, "checkpoint_every": 1},
}
REWARD = {"reward": {"scorers": {"a": {"name": "exact_match", "weight": 3}, "b": {"name": "exact_match"}}}}
SAMPLING = {"max_new_tokens": 8}
MEDIA = {"num_inference_steps": 4, "height": 64, "width": 64}
GRPO = {"name": "grpo"}
PICTURES: dict[str, Any] = {
    "model": {"path": "x", "family": "sd3"},
    "rollout": {"group_size": 2, "sampling": MEDIA},
    "algorithm": {"name": "flow_grpo"},
    "reward": {"scorers": {"a": {"name": "brightness", "weight": 3}, "b": {"name": "jpeg_size"}}},
}
RECIPES: dict[str, dict[str, Any]] = {
    "ar": {"rollout": {"group_size": 4, "slice": 2, "sampling": SAMPLING}, "algorithm": GRPO} | REWARD,
    "async_ar": {"rollout": {"group_size": 4, "sampling": SAMPLING}, "algorithm": GRPO} | REWARD,
    "sft": {},
    "diffusion": PICTURES,
    "async_diffusion": PICTURES,
    "pe": {
        "diffusion_model": {"path": "y"},
        "rollout": {"ar": {"n": 2, "sampling": SAMPLING}, "diffusion": {"n": 3, "sampling": MEDIA}, "slice": 1},
        "algorithm": {"ar": GRPO, "diffusion": {"name": "flow_grpo"}},
    }
    | REWARD,
    "unified_model": {
        "rollout": {"engine": {"name": "u"}, "group_size": 3, "images": 2, "text": SAMPLING, "image": MEDIA},
        "algorithm": {"text": GRPO, "image": {"name": "flow_grpo"}},
    }
    | REWARD,
    "agentic": {
        "rollout": {"group_size": 3, "slice": 2, "sampling": SAMPLING},
        "algorithm": GRPO,
        "environment": {"name": "tools"},
    }
    | REWARD,
}


def test_every_domain_has_a_recipe_here() -> None:
    assert set(RECIPES) == set(DOMAINS)


def plan_of(domain: str) -> Plan:
    return parse(BASE | RECIPES[domain] | {"domain": domain})[1]


# hand-built payloads


def fill_text(sample: Sample, version: int, length: int = 3) -> Sample:
    rows = len(sample.frontier)
    segment = TextSegment(
        tokens=np.arange(rows * length, dtype=np.int32),
        lengths=np.full(rows, length, np.int32),
        log_probs=np.full(rows * length, -0.5, np.float32),
        finish_reasons=("stop",) * rows,
    )
    return sample.fill(
        segment,
        primitives={"text": tuple(Text(f"answer {i}") for i in range(rows))},
        status=("ok",) * rows,
        output_version=np.full(rows, version, np.int64),
    )


def fill_image(sample: Sample, version: int, size: int = 1000) -> Sample:
    rows = len(sample.frontier)
    rng = np.random.default_rng(version)
    latents = RawTensor(rng.integers(0, 256, (rows, 3, size, 2), np.uint8), "bfloat16")
    segment = LatentSegment(
        latents=latents,  # type: ignore[arg-type]
        positions=(0, 1, 4),
        sigmas=np.asarray(IMAGE.sigmas, np.float32),
        sde_indices=(0,),
        log_probs=np.full((rows, 1), -1.0, np.float32),
    )
    pixels = tuple(Media(mime="image/raw", data=rng.integers(0, 256, (8, 8, 3), np.uint8)) for _ in range(rows))
    return sample.fill(
        segment,
        primitives={"image": pixels},
        conditions={"prompt_embeds": np.ones((rows, 4, 8), np.float16)},
        status=("ok",) * rows,
        output_version=np.full(rows, version, np.int64),
    )


def text_slice(root: str, low: int, high: int, version: int) -> list[Sample]:
    whole = Sample.request([root], TEXT, n=4, texts=["prompt"], tokens=[[1, 2, 3]])
    return [fill_text(whole.select(range(low, high)), version)]


def image_slice(root: str, low: int, high: int, version: int) -> list[Sample]:
    whole = Sample.request([root], IMAGE, n=2, texts=["a cat"])
    return [fill_image(whole.select(range(low, high)), version, size=1_750_000)]  # about 10 MB a row


def pe_slice(root: str, low: int, high: int, version: int) -> list[Sample]:
    rewrites = Sample.request([root], TEXT, n=2, track="ar", texts=["a cat"], tokens=[[1]]).select(range(low, high))
    sample = fill_text(rewrites, version)
    return [fill_image(sample.fork(3, IMAGE, track="diffusion"), version + 5)]


def unified_slice(root: str, low: int, high: int, version: int) -> list[Sample]:
    whole = Sample.request([root], TEXT, n=3, texts=["a cat"], tokens=[[1]]).select(range(low, high))
    return [fill_image(fill_text(whole, version).fork(2, IMAGE), version)]


def agentic_slice(root: str, low: int, high: int, version: int) -> list[Sample]:
    """Trajectories of unequal turns, each a Sample of its own."""
    out = []
    for index in range(low, high):
        sample = Sample.request([root], TEXT, n=3, texts=["task"], tokens=[[1]]).select([index])
        sample = fill_text(sample, version)
        for turn in range(index):
            sample = sample.observe("tool", tokens=[[7, 7]], primitives={"text": (Text("result"),)}).fork(1, TEXT)
            sample = fill_text(sample, version, length=2 + turn)
        out.append(sample)
    return out


SLICES: dict[str, Callable[[str, int, int, int], list[Sample]]] = {
    "ar": text_slice,
    "async_ar": text_slice,
    "diffusion": image_slice,
    "async_diffusion": image_slice,
    "pe": pe_slice,
    "unified_model": unified_slice,
    "agentic": agentic_slice,
}


class Mesh:
    """One job's lifecycle on a real Redis; plays every worker by hand."""

    def __init__(self, client: Any, folder: Path, domain: str) -> None:
        self.domain, self.plan, self.client = domain, plan_of(domain), client
        self.keys, self.scripts = JobKeys(domain), Scripts(client)
        self.store = BodyStore(client, self.keys, DirectoryBodies(folder, durable=False))
        client.hset(self.keys.meta, mapping=meta_fields(1, self.plan.route, self.plan.scorers))
        self.state = State(Root(), {})
        self.log: list[Append] = []
        self.entries: list[LogEntry] = []
        self.versions = dict.fromkeys(self.plan.tracks, 0)
        self.now = 0.0

    def send(self, *events: Event) -> list[Group]:
        """Advances; returns the groups to be issued."""
        self.now += 1
        nonce = f"n{self.now}"
        self.state, commands = advance(self.plan, self.state, events, Tick(self.now), nonce, lambda d: root_id("s", 0, d))
        assert balanced(self.state)
        for command in commands:
            if isinstance(command, Append):
                self.log.append(command)
        return [c.group for c in commands if isinstance(c, Issue) and c.group.slices is None]

    def roll(self, group: Group) -> None:
        """Every slice through the first stage's stream, filled, committed; then both scorers' streams, gathered."""
        need = len(self.plan.slices()) * len(self.plan.scorers)
        self.client.hset(self.keys.group(group.gid), mapping={"need": need, "have": 0})
        self.client.zadd(self.keys.open, {group.gid: group.shelf})
        version = group.needs[self.plan.tracks[0]].version
        for low, high in self.plan.slices():
            self.issue(group, low, high)
            result = SLICES[self.domain](group.gid.partition("#")[0], low, high, version)
            for position, stage in enumerate(self.plan.route[:-1]):
                work = read_work(self.read(stage), 0.0)
                assert work.envelope.position == position
                made = commit(self.keys, stage, work, filled(result, ()), self.store)
                assert send_all(self.scripts, self.keys, "me", [made]) == ["OK"]
        for scorer in self.plan.scorers:
            for _ in self.plan.slices():
                self.score(scorer)

    def issue(self, group: Group, low: int, high: int) -> None:
        ids = tuple(f"{group.gid.partition('#')[0]}/{i}" for i in range(low, high))
        envelope = Envelope(
            id="m",
            job=self.domain,
            incarnation=1,
            kind="train",
            route=self.plan.route,
            position=0,
            scorers=self.plan.scorers,
            gid=group.gid,
            shelf=group.shelf,
            slice=(low, high),
            needs=group.needs,
            head=SliceHead(parts=(PartHead(ids=ids, track=self.plan.branches[0].track),)),
        )
        self.client.xadd(self.keys.stage(self.plan.route[0]), envelope_fields(envelope, b""))

    def score(self, scorer: str) -> None:
        work = read_work(self.read(f"reward.{scorer}"), 0.0)
        assert work.envelope.head.body is not None
        samples = codec.decode(self.store.load(work.envelope.head.body), list[Sample])
        rows = sum(len(s.frontier) for s in samples)
        low = work.envelope.slice[0]
        scores = tuple(float(low + i) if scorer == "a" else 1.0 for i in range(rows))
        made = commit(self.keys, f"reward.{scorer}", work, ScoreHead(scores=scores), self.store)
        [answer] = send_all(self.scripts, self.keys, "me", [made])
        assert answer in ("WAIT", "READY")

    def read(self, stage: str) -> Entry:
        stream = self.keys.stage(stage)
        ensure_group(self.client, stream)
        [[_, [(entry_id, fields)]]] = self.client.xreadgroup(GROUP, "me", {stream: ">"}, count=1)
        return Entry(stream, entry_id.decode(), fields)

    def train(self) -> list[Event]:
        """Answers every record; a train record's entry is built and sent through the wire first."""
        events: list[Event] = []
        while self.log:
            record = self.log.pop(0)
            if record.kind == "train":
                slices = train_slices(self.plan, record.groups, Advantage()) if self.plan.route else []
                entry = LogEntry(
                    seq=record.seq,
                    id=record.id,
                    previous=record.previous,
                    incarnation=1,
                    kind="train",
                    slices=tuple(slices),
                )
                self.entries.append(unpack(pack(entry), LogEntry))
                self.versions = {t: v + 1 for t, v in self.versions.items()}
                updates = dict.fromkeys(self.versions, 1)
                events.append(Trained(seq=record.seq, id=record.id, versions=self.versions, updates=updates))
            elif record.kind == "publish":
                events += [Published(track=t, version=v) for t, v in self.versions.items()]
            elif record.kind == "checkpoint":
                events.append(Saved(seq=record.seq))
        return events

    def run(self) -> None:
        started = Started(applied_seq=0, versions=self.versions, published=self.versions, world_size=1)
        todo = self.send(started)
        for _ in range(50):
            if self.state.root.phase == "done":
                return
            for group in todo:
                self.roll(group)
            events: list[Event] = [read_event(self.read("inbox").fields) for _ in todo]
            todo = self.send(*events, *self.train())
        raise AssertionError(self.state.root)


@pytest.mark.parametrize("domain", sorted(DOMAINS))
def test_a_domain_from_request_to_last_step(client: Any, tmp_path: Path, domain: str) -> None:
    mesh = Mesh(client, tmp_path, domain)
    mesh.run()
    root = mesh.state.root
    assert root.batches == 2 and root.trained == 4 and root.outstanding == 0
    if not mesh.plan.route:
        return
    assert len(mesh.entries) == 2
    for entry in mesh.entries:
        check_entry(mesh, entry)


def check_entry(mesh: Mesh, entry: LogEntry) -> None:
    """Every generated Part of every slice has rewards and advantages of its rows, and its body opens to the same ids."""
    assert len(entry.slices) == 2 * len(mesh.plan.slices())
    for piece in entry.slices:
        assert piece.head.body is not None
        samples = codec.decode(mesh.store.load(piece.head.body), list[Sample])
        for k, (part, rewards, advantages) in enumerate(zip(piece.head.parts, piece.rewards, piece.advantages, strict=True)):
            assert rewards is not None and advantages is not None
            assert len(part.ids) == len(rewards) == len(advantages)
            held = [i for s in samples if len(s.gen_parts) > k for i in s.gen_parts[k].sample_ids]
            assert held == list(part.ids)
    for track in mesh.plan.tracks:
        opened = [mesh.store.load(p.head.body) for p in entry.slices if p.head.body is not None]
        batch = Batch(entry.slices, track, lambda i: codec.decode(opened[i], list[Sample]))  # noqa: B023
        texts = [i for i, h in enumerate(batch.heads) if h.length]
        for index in texts:
            row = batch.row(index)
            assert len(row.completion) == batch.heads[index].length and len(row.prompt) >= 1


def rewards_of(mesh: Mesh, part: int) -> list[float]:
    return [r for piece in mesh.entries[0].slices for r in piece.rewards[part] or ()]


def test_ar_blends_two_scorers_by_weight(client: Any, tmp_path: Path) -> None:
    mesh = Mesh(client, tmp_path, "ar")
    mesh.run()
    wanted = [(3 * a + 1) / 4 for a in (0, 1, 2, 3)] * 2  # the scorer `a` counts siblings, `b` says 1
    assert rewards_of(mesh, 0) == pytest.approx(wanted)


def test_pe_propagates_image_rewards_to_rewrites_and_gives_each_part_its_own_advantage(client: Any, tmp_path: Path) -> None:
    mesh = Mesh(client, tmp_path, "pe")
    mesh.run()
    images = np.asarray(rewards_of(mesh, 1)).reshape(4, 3)
    assert rewards_of(mesh, 0) == pytest.approx(images.mean(1).tolist())
    for piece in mesh.entries[0].slices:
        assert sum(piece.advantages[1] or ()) == pytest.approx(0, abs=1e-5)  # siblings of one rewrite
        assert {p.track for p in piece.head.parts} == {"ar", "diffusion"}
        versions = [set(p.versions) for p in piece.head.parts]
        assert versions[0] != versions[1], "two tracks, two versions"


def test_unified_model_trains_two_parts_of_one_track_in_one_step(client: Any, tmp_path: Path) -> None:
    mesh = Mesh(client, tmp_path, "unified_model")
    mesh.run()
    piece = mesh.entries[0].slices[0]
    assert [p.track for p in piece.head.parts] == ["policy", "policy"]
    assert len(piece.head.parts[1].ids) == 2 * len(piece.head.parts[0].ids)


def test_agentic_puts_the_trajectory_advantage_on_every_generated_turn(client: Any, tmp_path: Path) -> None:
    mesh = Mesh(client, tmp_path, "agentic")
    mesh.run()
    of: dict[str, set[float]] = {}
    for piece in mesh.entries[0].slices:
        for part, advantages in zip(piece.head.parts, piece.advantages, strict=True):
            for sample_id, advantage in zip(part.ids, advantages or (), strict=True):
                of.setdefault("/".join(sample_id.split("/")[:2]), set()).add(round(advantage, 6))
    assert len(of) == 6 and all(len(values) == 1 for values in of.values())
    turns = [len(p.ids) for piece in mesh.entries[0].slices for p in piece.head.parts]
    assert len(turns) > len(mesh.entries[0].slices), "unequal turns"


def test_a_ten_megabyte_slice_stays_out_of_redis(client: Any, tmp_path: Path) -> None:
    mesh = Mesh(client, tmp_path, "diffusion")
    mesh.run()
    bodies = [p.head.body for p in mesh.entries[0].slices]
    assert all(ref is not None and ref.uri.startswith("dir:") and ref.nbytes > 10_000_000 for ref in bodies)
    assert client.info("memory")["used_memory"] < 20_000_000


def test_parts_hold_the_columns_of_their_domain() -> None:
    [sample] = pe_slice("s:0:0", 0, 1, 0)
    assert isinstance(sample.parts[-1], Part) and sample.parts[-1].conditions["prompt_embeds"].shape == (3, 4, 8)
