"""From scores to a group's rewards, and from a batch's groups to its advantages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from services.controller.lifecycles.state import Group, Plan, Root, Scoring
from shared.config.sections import Advantage
from shared.types.part import Part
from shared.types.rewards import Blend, blend, truncated_reward
from shared.types.sample import Sample
from shared.wire.envelope import Completed, SliceHead, TrainSlice

Propagate = Literal["mean", "max", "sum"]


def scored(plan: Plan, group: Group, event: Completed, now: float, order: int) -> Group:
    """The group with the heads and raw components of its slices; `rewards` are the components blended by the plan."""
    how = plan.scoring(group)
    names = how.scorers
    components = {n: tuple(v for s in event.slices for v in s.scores[n].scores) for n in names}
    stacked = {n: np.asarray(v, np.float32) for n, v in components.items()}
    rewards = blend(stacked, plan_blend(how))
    heads = tuple(s.head for s in event.slices)
    last = [h.parts[-1] for h in heads]
    if plan.truncation != "keep" and group.kind == "train" and not plan.trajectories and last[0].max_new_tokens:
        lengths = np.asarray([n for part in last for n in part.lengths])
        rewards = truncated_reward(
            rewards,
            lengths,
            last[0].max_new_tokens,
            plan.truncation,
            plan.overlong_buffer,
            plan.overlong_factor,
        )
    return msgspec.structs.replace(
        group,
        slices=heads,
        rewards=tuple(rewards.tolist()),
        components=components,
        scored=tuple(score.span for s in event.slices for score in s.scores.values() if score.span is not None),
        ready_at=now,
        order=order,
    )


def plan_blend(how: Scoring) -> Blend:
    return Blend(method=how.aggregation, weights=how.weights, normalize=how.normalize_weights)


def skeleton(heads: Sequence[SliceHead], rewards: np.ndarray[Any, Any], propagate: Propagate) -> Sequence[Part]:
    """The generated Parts of a batch without their content, rewards propagated from the last one up."""
    ids = [tuple(i for h in heads for i in h.parts[k].ids) for k in range(len(heads[0].parts))]
    *above, last = [Part(sample_ids=column, role="assistant") for column in ids]
    last = msgspec.structs.replace(last, rewards=rewards)
    if not above:
        return [last]
    roots = tuple(dict.fromkeys(i.partition("/")[0] for i in ids[0]))
    return Sample((Part(sample_ids=roots), *above, last)).propagate_rewards(propagate).parts[1:]


def trajectories(heads: Sequence[SliceHead], rewards: np.ndarray[Any, Any], how: Advantage) -> list[TrainSlice]:
    """Each slice holds single-row Samples of unequal turns: a trajectory's advantage stands on every generated turn."""
    first = [i for h in heads for i in _starts(h)]
    part = Part(sample_ids=tuple(first), role="assistant", rewards=rewards).compute_advantages(**how.model_dump())
    assert part.advantages is not None
    of_reward = dict(zip(first, rewards.tolist(), strict=True))
    of = dict(zip(first, part.advantages.tolist(), strict=True))
    out: list[TrainSlice] = []
    for head in heads:
        starts = [_start(i) for p in head.parts for i in p.ids]
        lengths = np.cumsum([len(p.ids) for p in head.parts])[:-1]
        split = [tuple(map(str, piece)) for piece in np.split(np.asarray(starts), lengths)]
        out.append(
            TrainSlice(
                head=head,
                rewards=tuple(tuple(of_reward[s] for s in piece) for piece in split),
                advantages=tuple(tuple(of[s] for s in piece) for piece in split),
            )
        )
    return out


def _start(sample_id: str) -> str:
    """The first generated turn of a trajectory: root and sibling."""
    return "/".join(sample_id.split("/")[:2])


def _starts(head: SliceHead) -> list[str]:
    return list(dict.fromkeys(_start(i) for p in head.parts for i in p.ids))


def train_slices(plan: Plan, groups: Sequence[Group], how: Advantage) -> list[TrainSlice]:
    """The slices of a batch, groups in their order, with rewards propagated and advantages per generated Part."""
    heads = [head for group in groups for head in group.slices or ()]
    rewards = np.asarray([r for group in groups for r in group.rewards], np.float32)
    if plan.trajectories:
        return trajectories(heads, rewards, how)
    scored = skeleton(heads, rewards, plan.propagate)
    parts = [part.compute_advantages(**how.model_dump()) for part in scored]
    at = [0] * len(parts)
    out: list[TrainSlice] = []
    for head in heads:
        cut_rewards, cut_advantages = [], []
        for k, part in enumerate(parts):
            low, at[k] = at[k], at[k] + len(head.parts[k].ids)
            assert part.rewards is not None and part.advantages is not None
            cut_rewards.append(tuple(part.rewards[low : at[k]].tolist()))
            cut_advantages.append(tuple(part.advantages[low : at[k]].tolist()))
        out.append(TrainSlice(head=head, rewards=tuple(cut_rewards), advantages=tuple(cut_advantages)))
    return out


def batch_stats(plan: Plan, root: Root, groups: Sequence[Group]) -> dict[str, float]:
    """Figures of a batch at its forming: rewards and their spread, lengths, staleness in updates, seconds by stage."""
    if not plan.route:
        return {}
    rewards = np.asarray([r for g in groups for r in g.rewards], np.float64)
    finite = rewards[np.isfinite(rewards)]
    out = {
        "samples": float(len(rewards)),
        "reward": float(finite.mean()) if len(finite) else math.nan,
        "reward_std": float(finite.std()) if len(finite) else math.nan,
        "failed": float(len(rewards) - len(finite)),
        "groups_equal": float(np.mean([len({r for r in g.rewards if math.isfinite(r)}) < 2 for g in groups])),
    }
    for name in plan.scorers:
        values = np.asarray([v for g in groups for v in g.components.get(name, ())], np.float64)
        out[f"reward/{name}"] = float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
    parts = [part for g in groups for head in g.slices or () for part in head.parts]
    if lengths := [n for part in parts for n in part.lengths]:
        out["tokens"] = float(sum(lengths))
        out["length"] = float(np.mean(lengths))
    if status := [s for part in parts for s in part.status]:
        out["truncated"] = float(np.mean([s == "truncated" for s in status]))
    stale = [root.current.get(p.track, 0) - v for p in parts for v in p.versions]
    if stale:
        versions = [v for p in parts for v in p.versions]
        out |= {"staleness": float(np.mean(stale)), "staleness_max": float(max(stale))}
        out |= {"version_min": float(min(versions)), "version_max": float(max(versions))}
    out |= {f"publish_lag/{t}": float(v - root.published.get(t, 0)) for t, v in root.current.items() if t in plan.tracks[:1]}
    now = root.dropped | {"reissued": root.reissued}
    for name, count in now.items():
        if more := count - root.told.get(name, 0):
            out["reissued" if name == "reissued" else f"dropped/{name}"] = float(more)
    first = min(g.issued_at for g in groups)
    for span in (span for g in groups for head in g.slices or () for span in (*head.spans, *g.scored)):
        stage = f"seconds/{span.name.partition('.')[0].partition(' ')[0]}"
        out[stage] = max(out.get(stage, 0.0), span.seconds)
    out["seconds/gather"] = max(g.ready_at for g in groups) - first
    return out
