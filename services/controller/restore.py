"""Back to the newest checkpoint when Redis has gone back in time: the incarnation rises and open prompts are issued again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from services.controller.lifecycles.state import EvalRun, Group, Restore, Root, State
from shared.weights import checkpoints
from shared.wire.codec import unpack
from shared.wire.hops import meta_fields
from shared.wire.scripts import Write, hset, xadd

if TYPE_CHECKING:
    from services.controller.runner import Runner


class Cut(msgspec.Struct, frozen=True):
    """What a checkpoint record carries: the root as of that position, and the open groups as (draw, issue)."""

    root: Root
    open: tuple[tuple[int, int], ...]


def cut(state: State) -> Cut:
    groups = sorted((g.draw, g.issue) for g in state.groups.values() if g.kind == "train")
    return Cut(state.root, tuple(groups))


def from_cut(saved: Cut, incarnation: int) -> Root:
    """The root under a new incarnation. Batches in the log before the checkpoint count as trained: the model holds them.

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
        trained_seq=0,
        log_bytes=0,
        trainer_up=False,
        last_id="",
    )


def restored(runner: Runner, state: State, command: Restore, taken: Sequence[str], revision: str) -> None:
    """Commits the state of the newest checkpoint (or a start from nothing) in place of one that the trainer's log denies."""
    keys, plan = runner.keys, runner.job.doc.plan
    folder = checkpoints.newest(runner.settings.checkpoints(runner.job.doc.id))
    incarnation = state.root.incarnation + 1
    if folder is None:
        root, where = Root(incarnation=incarnation), "the beginning (there is no checkpoint)"
    else:
        root = from_cut(unpack((folder / checkpoints.STATE_FILE).read_bytes(), Cut), incarnation)
        where = f"checkpoint {folder.name}"
    text = f"Redis went back in time ({command.detail}): the job returns to {where}, incarnation {incarnation}"
    writes = [
        hset(keys.meta, meta_fields(incarnation, plan.route, plan.scorers, plan.eval_scorers)),
        Write("UNLINK", keys.log),
        Write("UNLINK", keys.rows),
        Write("UNLINK", keys.open),
        *(Write("UNLINK", keys.group(gid)) for gid in state.groups),
        xadd(keys.events, {"at": f"{time.time():.3f}", "level": "warning", "text": text}),
    ]
    runner.commit(revision, State(root, dict[str, Group]()), taken, writes)
