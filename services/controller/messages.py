"""From a lifecycle's commands to the writes of one commit: requests, log records, rows, notes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from services.controller import targets
from services.controller.busy import Meter
from services.controller.data.intake import BadPrompt, Example, MediaIntake, check_taught
from services.controller.jobs import Job
from services.controller.lifecycles.state import (
    Append,
    BadRecord,
    Close,
    Command,
    Covered,
    EvalRun,
    Evaluated,
    Group,
    Issue,
    Note,
    State,
    Stepped,
)
from services.controller.previews import Previews, media_of
from services.controller.restore import cut
from services.controller.scoring import train_slices
from shared.config.sections import Advantage
from shared.types.ids import root_id
from shared.types.params import ARSamplingParams, DiffusionSamplingParams
from shared.types.part import Part
from shared.types.sample import Sample
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.codec import pack
from shared.wire.envelope import Envelope, GroupNote, LogEntry, PartHead, SliceHead, Span, TrainSlice, envelope_fields
from shared.wire.errors import BodyLost, WireError
from shared.wire.hops import eval_stage
from shared.wire.keys import GROUP
from shared.wire.scripts import Write, hset, send, xadd

EVAL_ROOT = "eval"
"""Root of an evaluation request before it is issued under a tag."""


class Request(NamedTuple):
    """A group's bodies, ready to be sent; `error` if its prompt cannot be used."""

    error: str
    slices: tuple[tuple[tuple[int, int], Sample, list[codec.Buffer]], ...]
    """(siblings, Sample, body) of each message."""
    example: Example | None = None
    """Without a rollout: what is imitated."""


def _body(sample: Sample) -> list[codec.Buffer]:
    return codec.encode_parts([sample])


def _renamed(sample: Sample, root: str) -> Sample:
    """The request under another root id."""
    prompt, frontier = sample.parts
    ids = tuple(f"{root}/{i.partition('/')[2]}" for i in frontier.sample_ids)
    replace = msgspec.structs.replace
    return Sample((replace(prompt, sample_ids=(root,)), replace(frontier, sample_ids=ids)))


def _drawing(sample: Sample, steps: tuple[int, ...]) -> Sample:
    """The request with noise in these steps."""
    prompt, frontier = sample.parts
    assert isinstance(frontier.sampling_params, DiffusionSamplingParams)
    params = msgspec.structs.replace(frontier.sampling_params, sde_indices=steps)
    return Sample((prompt, msgspec.structs.replace(frontier, sampling_params=params)))


class Writer:
    """Builds the writes of one commit. Reads data sources and bodies; writes nothing itself except bodies of files."""

    def __init__(self, job: Job, store: BodyStore, previews: Previews) -> None:
        self.job, self.store, self.keys, self.plan, self.previews = job, store, job.keys, job.doc.plan, previews
        self.prepared: dict[int, Request] = {}
        self.retained: list[tuple[int, int]] = []
        """Records of the last writes whose bodies were built here: their numbers, and bytes."""
        self.meter = Meter()
        self.worked: dict[int, dict[str, float]] = {}
        """By record of a batch that trains: how long its stages had worked for it."""
        self.acts: list[Span] = []
        """What the runner did since the step before."""

    def prepare(self, state: State) -> None:
        """Builds the next batch's requests ahead, while a batch trains: then issuing them is only sending them."""
        if not self.plan.route or not any(r.kind == "train" for r in state.root.records):
            return
        wanted = range(state.root.draw, state.root.draw + self.plan.batch_size)
        self.prepared = {draw: request for draw, request in self.prepared.items() if draw in wanted}
        for draw in wanted:
            if draw not in self.prepared:
                self.prepared[draw] = self._build(draw)

    def bad_records(self, commands: Sequence[Command]) -> list[BadRecord]:
        """Of the groups to be issued, those whose prompt cannot be used."""
        found = []
        for command in commands:
            if isinstance(command, Issue):
                error = self._take(command.group, keep=True).error
                if error:
                    found.append(BadRecord(command.group.gid, error))
        return found

    def writes(self, before: State, after: State, commands: Sequence[Command]) -> list[Write]:
        self.retained = []
        out: list[Write] = []
        closed = {gid for c in commands if isinstance(c, Close) for gid in c.gids}
        issued: list[tuple[int, str]] = []
        for command in commands:
            match command:
                case Issue(group) if group.gid not in closed and self.plan.route:
                    out += self._request(group, after.root.incarnation)
                    issued.append((group.shelf, group.gid))
                case Append():
                    out += self._append(command, after)
                case Close():
                    out += self._close(command)
                case Stepped():
                    out += self._stepped(command, after)
                case Evaluated():
                    out.append(hset(self.keys.evals, {command.run.key: pack(self._evaluation(command))}))
                case Covered():
                    out.append(Write("XTRIM", self.keys.log, ("MINID", f"{command.seq + 1}-0")))
                    shelves = range(command.first, command.below)
                    out += [Write("UNLINK", self.keys.shelf(number)) for number in shelves]
                case Note():
                    fields = {"at": f"{time.time():.3f}", "level": command.level, "text": command.text}
                    out.append(xadd(self.keys.events, fields))
        if issued:
            out.append(Write("ZADD", self.keys.open, tuple(word for mark in issued for word in mark)))
        changed = {g: pack(row) for g, row in after.groups.items() if before.groups.get(g) is not row}
        if changed:
            out.append(hset(self.keys.rows, changed))
        if gone := [g for g in before.groups if g not in after.groups]:
            out.append(Write("HDEL", self.keys.rows, tuple(gone)))
        return out

    def _take(self, group: Group, keep: bool = False) -> Request:
        """The group's request, built ahead or now. `keep`: it will be asked for again."""
        if group.kind == "eval":
            return self._build(group.draw, group.suite)
        found = self.prepared.get(group.draw)
        if found is None:
            found = self.prepared[group.draw] = self._build(group.draw)
        if not keep:
            del self.prepared[group.draw]
        return found

    def _build(self, draw: int, suite: str = "") -> Request:
        """The messages' bodies: they depend on the prompt alone, not on the issue."""
        data, params = (self.job.train, self.job.params) if not suite else self.job.suites[suite]
        record = data.source.get(data.order.place(draw)[1])
        try:
            if params is None:
                return Request("", (), data.intake.example(record))
            prompt = data.intake.prompt(record)
            if not suite:
                check_taught(self.job.recipe, record)
        except BadPrompt as error:
            return Request(str(error), ())
        n = self.plan.suites[suite].n if suite else self.plan.group_size
        root = EVAL_ROOT if suite else data.order.root(draw)
        whole = Sample.request(
            [root],
            params,
            n=n,
            track=self.plan.branches[0].track,
            texts=[prompt.text],
            tokens=[prompt.tokens] if prompt.tokens else None,
            references=[prompt.reference] if prompt.reference else None,
            metadata=[record.metadata],
        )
        spans = ((0, n),) if suite else self.plan.slices()
        pieces = [whole if span == (0, n) else whole.select(range(*span)) for span in spans]
        return Request("", tuple(zip(spans, pieces, map(_body, pieces), strict=True)))

    def _request(self, group: Group, incarnation: int) -> list[Write]:
        """The group's messages, and its hash."""
        request = self._take(group)
        need = len(request.slices) * len(self.plan.scoring(group).scorers)
        out = [hset(self.keys.group(group.gid), {"need": need, "have": 0})]
        for span, sample, parts in request.slices:
            if group.kind == "eval":
                sample = _renamed(sample, group.gid.rpartition("#")[0])
                parts = _body(sample)
            elif self.job.windowed:  # a group is issued for the batch that is formed next
                sample = _drawing(sample, self.job.recipe.rollout.sampling.drawing(group.shelf))
                parts = _body(sample)
            out.append(self._message(group, incarnation, sample.frontier, span, parts))
        return out

    def _message(
        self, group: Group, incarnation: int, frontier: Part, span: tuple[int, int], parts: list[codec.Buffer]
    ) -> Write:
        ref, body = self.store.enclose(group.shelf, f"{group.gid}.{span[0]}.{uuid4().hex[:8]}", parts)
        params = frontier.sampling_params
        most = params.max_new_tokens if isinstance(params, ARSamplingParams) else 0
        head = PartHead(ids=frontier.sample_ids, track=frontier.track or "", max_new_tokens=most)
        route = self.plan.route if group.kind == "train" else tuple(map(eval_stage, self.plan.route))
        envelope = Envelope(
            id=uuid4().hex,
            job=self.job.doc.id,
            incarnation=incarnation,
            kind=group.kind,
            route=route,
            position=0,
            scorers=self.plan.scoring(group).scorers,
            gid=group.gid,
            shelf=group.shelf,
            slice=span,
            needs=group.needs,
            head=SliceHead(parts=(head,), body=ref),
            deterministic=self.job.recipe.deterministic,
        )
        return send(self.keys, route[0], group.gid, span[0], envelope_fields(envelope, body))

    def _append(self, command: Append, after: State) -> list[Write]:
        slices: Sequence[TrainSlice] = ()
        out: list[Write] = []
        if command.kind == "train" and self.plan.route:
            how = self.job.recipe.algorithm.advantage if self.plan.advantages else Advantage()
            slices = train_slices(self.plan, command.groups, how)
            self.worked = {command.seq: self.meter.add(command.groups)}
        elif command.kind == "train":
            built = [(g.gid.rpartition("#")[0], self._take(g).example) for g in command.groups]
            found = [(root, example) for root, example in built if example is not None]
            slices, out = self._records(found, command.groups[0].shelf)
        elif command.kind == "evaluate":
            slices, out = self._records(self._held_out(command.suite, command.rows), after.root.formed)
        if not self.plan.route:
            self.retained += [(command.seq, s.head.body.nbytes) for s in slices if s.head.body is not None]
        entry = LogEntry(
            seq=command.seq,
            id=command.id,
            previous=command.previous,
            incarnation=after.root.incarnation,
            kind=command.kind,
            slices=tuple(slices),
            step=after.root.batches + sum(r.kind == "train" for r in after.root.records),
            groups=tuple(map(_note, command.groups)) if self.plan.route else (),
            pinned=command.pinned,
            state=pack(cut(after)) if command.kind == "checkpoint" else b"",
        )
        return [*out, xadd(self.keys.log, {"e": pack(entry)}, f"{command.seq}-0")]

    def _held_out(self, suite: str, rows: tuple[int, int]) -> list[tuple[str, Example]]:
        """Records of a suite by their names, but for those that cannot be used."""
        found = [(root_id(f"eval-{suite}", 0, row), self._build(row, suite).example) for row in range(*rows)]
        return [(root, example) for root, example in found if example is not None]

    def _records(self, found: Sequence[tuple[str, Example]], shelf: int) -> tuple[Sequence[TrainSlice], list[Write]]:
        """sft: prompts and targets as one body; the trainer builds the loss from them."""
        if not found:
            return (), []
        if isinstance(self.job.train.intake, MediaIntake):
            sample, about = targets.pictures(found, self.job.recipe.picture.height, self.job.recipe.picture.width)
        else:
            sample, about = targets.texts(found)
        name = f"records.{uuid4().hex[:8]}"
        ref, small = self.store.place(shelf, name, codec.encode_parts([sample]))
        writes = [] if small is None else [hset(self.keys.shelf(shelf), {name: small})]
        return (TrainSlice(head=SliceHead(parts=(about,), body=ref), rewards=(None,), advantages=(None,)),), writes

    def _close(self, command: Close) -> list[Write]:
        """The groups' hashes, marks, and entries that are still about, whoever holds them."""
        if not self.plan.route:
            return []
        out: list[Write] = []
        if command.in_flight:
            with self.store.client.pipeline(transaction=False) as pipe:
                for gid in command.gids:
                    pipe.hgetall(self.keys.group(gid))
                for fields in pipe.execute():
                    for name, entry_id in fields.items():
                        if name.startswith(b"e:"):
                            stage = name[2:].decode().rpartition(":")[0]
                            out.append(Write("TAKE", self.keys.stage(stage), (GROUP, entry_id)))
        out.append(Write("ZREM", self.keys.open, command.gids))
        return out + [Write("UNLINK", self.keys.group(gid)) for gid in command.gids]

    def _stepped(self, command: Stepped, after: State) -> list[Write]:
        """The step's figures, and who did what when of the newest steps."""
        spans, self.acts = (*command.trained.spans, *self.acts), []
        return [
            xadd(self.keys.steps, {"m": pack(self._step(command, after))}),
            xadd(self.keys.spans, {"step": after.root.batches, "t": pack(spans)}),
            Write("XTRIM", self.keys.spans, ("MAXLEN", "~", self.job.recipe.logging.keep_steps)),
        ]

    def _step(self, command: Stepped, after: State) -> dict[str, Any]:
        record, trained = command.record, command.trained
        return {
            "step": after.root.batches,
            "seq": record.seq,
            "at": command.at,
            "versions": trained.versions,
            "updates": sum(trained.updates.values()),
            **record.stats,
            **self.worked.get(record.seq, {}),
            **trained.metrics,
            "seconds/train": trained.seconds,
            "seconds/waited": command.at - record.at,
        }

    def _evaluation(self, command: Evaluated) -> dict[str, Any]:
        run = command.run
        good = run.size - run.failed
        variance = run.squares / run.samples - (run.sum / run.samples) ** 2 if run.samples else 0.0
        previews = []
        for index, ref, reward in sorted(run.previews):
            try:
                [sample] = codec.decode(self.store.glance(ref), list[Sample])
            except (BodyLost, WireError):
                continue  # it is for people only
            shown = media_of(sample.frontier).get(sample.frontier.sample_ids[0])
            previews.append(
                {
                    "index": index,
                    "prompt": sample.parts[0].text[0],
                    "completion": sample.frontier.text[0] if "text" in sample.frontier.primitives else "",
                    "metadata": dict(sample.parts[0].metadata[0]) if sample.parts[0].metadata else {},
                    "reward": reward,
                    "picture": shown is not None and self.previews.keep("evals", run.key, index, shown),
                }
            )
        return {
            "suite": run.suite,
            "tag": run.tag,
            "step": run.step,
            "at": round(time.time(), 3),
            "versions": run.versions,
            "prompts": run.size,
            "failed": run.failed,
            **(_loss(run) if self.plan.suites[run.suite].batch_size else {}),
            "reward": run.total / good if good and run.samples else None,
            "reward_std": math.sqrt(max(0.0, variance)) if run.samples else None,
            "samples": run.samples,
            **{f"reward/{n.rpartition('.')[2]}": total / count for n, (total, count) in run.components.items() if count},
            **{f"pass@{k}": value / good for k, value in sorted(run.passed.items()) if good},
            "previews": previews,
        }


def _loss(run: EvalRun) -> dict[str, Any]:
    """Of targets that were measured: their mean loss and its exponential."""
    total, weight, tokens = run.loss
    mean = total / weight if weight else None
    return {"loss": mean, "perplexity": None if mean is None else math.exp(min(mean, 700.0)), "tokens": tokens}


def _note(group: Group) -> GroupNote:
    return GroupNote(
        gid=group.gid,
        slices=len(group.slices or ()),
        issued_at=group.issued_at,
        ready_at=group.ready_at,
        components=group.components,
        scored=group.scored,
    )


def snapshot(state: State) -> bytes:
    return msgspec.msgpack.encode(state.root)
