"""Back to a checkpoint, when Redis has gone back in time or a person asks: the incarnation rises, prompts are issued again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from services.controller.jobs import JobDoc, enter, open_job, summary_of
from services.controller.lifecycles.state import EvalRun, Group, Plan, Restore, Root, State
from shared.config.problems import bad
from shared.config.settings import Settings
from shared.weights import checkpoints
from shared.wire.codec import unpack
from shared.wire.envelope import ENDED
from shared.wire.hops import meta_fields
from shared.wire.keys import JOBS, JobKeys
from shared.wire.scripts import Write, hset, new_revision, text, xadd

MOST = 5000
"""Entries that one write of a script deletes."""

if TYPE_CHECKING:
    from services.controller.runner import Runner


class Cut(msgspec.Struct, frozen=True):
    """What a checkpoint record carries: the root as of that position, and the open groups as (draw, issue)."""

    root: Root
    open: tuple[tuple[int, int], ...]


def cut(state: State) -> Cut:
    groups = sorted((g.draw, g.issue) for g in state.groups.values() if g.kind == "train")
    return Cut(state.root, tuple(groups))


def from_cut(saved: Cut, incarnation: int, seq: int) -> Root:
    """The root under a new incarnation, whose log begins behind the checkpoint's record number `seq`. Batches in the log before
    the checkpoint count as trained: the model holds them.

    Groups open at the cut are closed as dropped `restored`; their prompts are issued again, not counted as stale ones are.
    """
    root = saved.root
    batches = [r for r in root.records if r.kind == "train"]
    count = len(saved.open)
    dropped = root.dropped | ({"restored": root.dropped.get("restored", 0) + count} if count else {})
    return msgspec.structs.replace(
        root,
        phase="starting",
        incarnation=incarnation,
        seq=seq,
        batches=root.batches + len(batches),
        trained=root.trained + sum(len(r.gids) for r in batches),
        dropped=dropped,
        again=(*((draw, issue + 1) for draw, issue in saved.open), *root.again),
        records=(),
        evals=tuple(
            EvalRun(suite=r.suite, tag=r.tag, step=r.step, versions={}, size=r.size, issue=r.issue) for r in root.evals
        ),
        current={},
        published={},
        unsynced=(),
        cohorts={},
        filtered=0,
        trained_seq=0,
        log_bytes=0,
        trainer_up=False,
        last_id="",
    )


def restored(runner: Runner, state: State, command: Restore, taken: Sequence[str], revision: str) -> None:
    """Commits the state of the newest checkpoint (or a start from nothing) in place of one that the trainer's log denies."""
    keys, plan = runner.keys, runner.job.doc.plan
    base = runner.client.hget(keys.meta, "base") or b""
    folder = checkpoints.newest(runner.settings.checkpoints(runner.job.doc.id), state.root.incarnation, text(base))
    incarnation = state.root.incarnation + 1
    if folder is None:
        root, where = Root(incarnation=incarnation), "the beginning (there is no checkpoint)"
    else:
        root, where = _root(folder, incarnation), f"checkpoint {folder.name}"
    said = f"Redis went back in time ({command.detail}): the job returns to {where}, incarnation {incarnation}"
    writes = [
        hset(keys.meta, _meta(plan, incarnation, folder)),
        Write("HDEL", keys.meta, ("fence",)),  # the trainer of the history that is left has nothing more to say
        Write("UNLINK", keys.log),
        Write("UNLINK", keys.rows),
        Write("UNLINK", keys.open),
        *(Write("UNLINK", keys.group(gid)) for gid in state.groups),
        xadd(keys.events, {"at": f"{time.time():.3f}", "level": "warning", "text": said}),
    ]
    later, left = _later(runner.client, keys, root)
    writes += [Write("XDEL", keys.steps, later[i : i + MOST]) for i in range(0, len(later), MOST)]
    writes += [Write("HDEL", keys.evals, left)] if left else []
    runner.commit(revision, State(root, dict[str, Group]()), taken, writes)


def _meta(plan: Plan, incarnation: int, folder: Path | None) -> dict[str, int | str]:
    """`base`: the checkpoint that the trainer begins with."""
    known = meta_fields(incarnation, plan.route, plan.scorers, plan.eval_scorers)
    return {**known, "base": folder.name if folder is not None else ""}


def _root(folder: Path, incarnation: int) -> Root:
    saved = unpack((folder / checkpoints.STATE_FILE).read_bytes(), Cut)
    return from_cut(saved, incarnation, checkpoints.position(folder).seq)


def _later(client: Any, keys: JobKeys, root: Root) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Steps (entries of their stream) and evaluations (keys) of the history that is left: they are made anew."""
    rows = client.xrange(keys.steps)
    steps = (text(entry_id) for entry_id, fields in rows if msgspec.msgpack.decode(fields[b"m"])["step"] > root.batches)
    evaluations = (text(key) for key in client.hkeys(keys.evals))
    return tuple(steps), tuple(key for key in evaluations if key not in root.evaluated)


def choices(folder: Path, incarnation: int | None, base: str) -> dict[int, Path]:
    """By step the checkpoints of the history that goes on from which a job can start."""
    held = [path for path in checkpoints.history(folder, incarnation, base) if (path / checkpoints.JOB_FILE).exists()]
    return {checkpoints.position(path).step: path for path in held}


def revive(client: Any, settings: Settings, job: str, step: int | None = None) -> dict[str, Any]:
    """Starts a job that has ended, or that no Redis knows, from one of its checkpoints; returns what it goes on from.

    What stood open there is issued again. LookupError if there is no checkpoint at all; BadInput for a step without one, or if
    another job bears the name; RuntimeError if the job runs.
    """
    keys = JobKeys(job)
    number, base = client.hmget(keys.meta, "incarnation", "base")
    known = choices(settings.checkpoints(job), int(number) if number else None, text(base or b""))
    if not known:
        raise LookupError(f"no checkpoint of a job {job!r}")
    wanted = max(known) if step is None else step
    if wanted not in known:
        raise bad("step", step, "there is no checkpoint of it", ", ".join(map(str, sorted(known))))
    folder = known[wanted]
    document = (folder / checkpoints.JOB_FILE).read_bytes()
    doc = unpack(document, JobDoc)
    open_job(doc, settings)  # its data is there, and the same
    with client.pipeline() as pipe:
        pipe.watch(keys.state)
        if (packed := pipe.hget(keys.state, "snapshot")) and unpack(packed, Root).phase not in ENDED:
            raise RuntimeError(f"job {job} is {unpack(packed, Root).phase}: it goes on by itself")
        incarnation = 1 + max(_incarnations(client, settings, doc, keys))
        root = _root(folder, incarnation)
        later, left = _later(client, keys, root)
        enter(client, doc)
        pipe.multi()
        pipe.set(keys.doc, document)
        pipe.hset(keys.meta, mapping=_meta(doc.plan, incarnation, folder))
        pipe.hdel(keys.meta, "fence")
        pipe.unlink(keys.log, keys.rows, keys.open, keys.inbox)
        pipe.hset(keys.state, mapping={"revision": new_revision(""), "snapshot": msgspec.msgpack.encode(root)})
        if later:
            pipe.xdel(keys.steps, *later)
        if left:
            pipe.hdel(keys.evals, *left)
        said = f"restored by the operator from checkpoint {folder.name}, step {wanted}, incarnation {incarnation}"
        pipe.xadd(keys.events, {"at": f"{time.time():.3f}", "level": "info", "text": said})
        pipe.hset(JOBS, job, summary_of(doc, incarnation))
        try:
            pipe.execute()
        except redis.WatchError as error:
            raise RuntimeError(f"job {job} is being restored by somebody else") from error
    return {"id": job, "step": wanted, "incarnation": incarnation}


def _incarnations(client: Any, settings: Settings, doc: JobDoc, keys: JobKeys) -> list[int]:
    """All that have left anything: an empty Redis knows of none."""
    folders = [settings.weights(doc.id) / track for track in doc.plan.tracks]
    versions = [int(path.name) for folder in folders if folder.exists() for path in folder.iterdir() if path.name.isdigit()]
    saved = [checkpoints.position(path).incarnation for path in checkpoints.found(settings.checkpoints(doc.id))]
    return [int(client.hget(keys.meta, "incarnation") or 0), *versions, *saved]
