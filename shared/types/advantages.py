"""Advantages from scalar rewards (group baselines) and from per-token values (GAE). Golden topic 1 holds the vectors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from shared.types.arrays import Array
from shared.types.ids import ancestor_id

Scope = Literal["group", "global"]
Estimator = Literal["group", "rloo", "reinforce_pp"]


def finite_mean_std(values: Array) -> tuple[float, float]:
    """Mean and population standard deviation of the finite entries: (0, 1) without any, std 1 with one (float32, two-pass)."""
    finite = np.asarray(values, np.float32)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return 0.0, 1.0
    mean = finite.mean(dtype=np.float32)
    if len(finite) == 1:
        return float(mean), 1.0
    return float(mean), float(np.sqrt(np.mean((finite - mean) ** 2, dtype=np.float32)))


def group_keys(sample_ids: Sequence[str], depth: int | None) -> list[str]:
    """The ancestor that names each sample's group; None is the parent's depth of the first id."""
    if depth is None:
        depth = max(sample_ids[0].count("/") - 1, 0)
    return [ancestor_id(sample_id, depth) for sample_id in sample_ids]


def group_bounds(keys: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges of equal keys. ValueError unless each key is one range and all ranges have one size."""
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    bounds = list(zip(starts, [*starts[1:], len(keys)], strict=True))
    if len({keys[i] for i in starts}) != len(starts):
        raise ValueError("groups are not contiguous: siblings must stand side by side")
    if len(sizes := {hi - lo for lo, hi in bounds}) > 1:
        raise ValueError(f"groups have different sizes: {sorted(sizes)}")
    return bounds


def group_advantages(
    sample_ids: Sequence[str],
    rewards: Array | None,
    *,
    normalize: bool = True,
    eps: float = 1e-8,
    scope: Scope = "group",
    use_global_std: bool = False,
    group_layer: int | None = None,
    estimator: Estimator = "group",
) -> Array:
    """float32 [n]: `(r - mean) / (std + eps)` over the sample's group; a non-finite reward gets exactly 0.

    `rloo` (Ahmadian et al., arXiv 2402.14740): the reward less the mean of the others of its group, not divided.
    `reinforce_pp` (Hu et al., arXiv 2501.03262, with baseline): the reward less the group's mean, then whitened over the batch.

    Args:
        sample_ids: n ids, siblings contiguous, groups of equal size (ignored when `scope` is global).
        rewards: float32 [n]; non-finite entries are left out of mean and std.
        normalize: divide by the standard deviation (population).
        use_global_std: the mean is the group's, the std that of all rewards.
        group_layer: depth of the ancestor that names a group; None is the parent.
    """
    if rewards is None:
        raise ValueError("no rewards to compute advantages from")
    values = np.asarray(rewards, np.float32)
    if len(values) != len(sample_ids):
        raise ValueError(f"{len(values)} rewards for {len(sample_ids)} samples")
    bounds = [(0, len(values))] if scope == "global" else group_bounds(group_keys(sample_ids, group_layer))
    table = values.reshape(len(bounds), -1)
    means, stds = _row_mean_std(table)
    if estimator != "group":
        return _other(table - means[:, None], estimator, eps)
    if use_global_std:
        stds = np.full_like(stds, finite_mean_std(values)[1])
    centred = table - means[:, None]
    scale = (stds + np.float32(eps))[:, None] if normalize else np.float32(1)
    return np.where(np.isfinite(centred), centred / scale, np.float32(0)).reshape(-1).astype(np.float32)


def _other(centred: Array, estimator: Estimator, eps: float) -> Array:
    """rloo and reinforce_pp from the rewards less their group's mean, [groups, siblings]."""
    finite = np.isfinite(centred)
    if estimator == "rloo":
        count = finite.sum(1, keepdims=True)
        found = centred * (count / np.maximum(count - 1, 1)) * (count > 1)
    else:
        mean, std = finite_mean_std(centred.reshape(-1))
        found = (centred - mean) / (std + eps)
    return np.where(finite, found, 0.0).reshape(-1).astype(np.float32)


def _row_mean_std(table: Array) -> tuple[Array, Array]:
    """finite_mean_std of every row at once."""
    finite = np.isfinite(table)
    count = finite.sum(1)
    some = np.maximum(count, 1).astype(np.float32)
    means = np.where(finite, table, np.float32(0)).sum(1, dtype=np.float32) / some
    squares = np.where(finite, (table - means[:, None]) ** 2, np.float32(0)).sum(1, dtype=np.float32) / some
    return means, np.where(count > 1, np.sqrt(squares), np.float32(1)).astype(np.float32)


def gae(rewards: Array, values: Array, gamma: float, lam: float, mask: Array | None = None) -> tuple[Array, Array]:
    """Generalized advantage estimation (Schulman et al., arXiv 1506.02438) along the last axis: (advantages, returns).

    `delta_t = r_t + gamma m_{t+1} v_{t+1} - v_t`, `A_t = m_t (delta_t + gamma lam A_{t+1})`, `returns = A + v`.
    Shapes [T] or [B, T].
    """
    for name, number in (("gamma", gamma), ("lambda", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} {number}: must lie in [0, 1]")
    if rewards.shape != values.shape or (mask is not None and mask.shape != values.shape):
        raise ValueError(f"shapes differ: rewards {rewards.shape}, values {values.shape}")
    if rewards.ndim not in (1, 2):
        raise ValueError(f"rewards of shape {rewards.shape}: must be [T] or [B, T]")
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    m = np.ones_like(v) if mask is None else np.asarray(mask, np.float64)
    advantages = np.zeros_like(v)
    after = np.zeros(v.shape[:-1])
    for t in range(v.shape[-1] - 1, -1, -1):
        last = t + 1 == v.shape[-1]
        ahead = 0.0 if last else m[..., t + 1] * v[..., t + 1]
        after = m[..., t] * (r[..., t] + gamma * ahead - v[..., t] + gamma * lam * after)
        advantages[..., t] = after
    return advantages.astype(np.float32), (advantages + v).astype(np.float32)


def scatter_terminal_rewards(rewards: Array, cu_seqlens: Sequence[int]) -> Array:
    """float32 [tokens]: each sample's reward on its last token, 0 elsewhere; that of an empty sample is dropped."""
    cu = list(cu_seqlens)
    if len(cu) != len(rewards) + 1 or cu[0] != 0 or any(b < a for a, b in itertools.pairwise(cu)):
        raise ValueError(f"cu_seqlens {cu}: must start at 0, never fall, and have {len(rewards) + 1} entries")
    out = np.zeros(cu[-1], np.float32)
    for reward, lo, hi in zip(rewards, cu, cu[1:], strict=False):
        if hi > lo:
            out[hi - 1] = reward
    return out


def part_gae(
    rewards: Array, values: Array, lengths: Sequence[int], gamma: float, lam: float, loss_mask: Array | None = None
) -> tuple[Array, Array, Array]:
    """GAE of packed sequences with terminal rewards: (token advantages, returns, sample advantages), float32.

    The recursion takes no mask; a sample's advantage is the mean over its tokens with `loss_mask > 0` (0 without any).
    """
    cu = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    tokens = scatter_terminal_rewards(rewards, cu.tolist())
    out, returns = np.zeros_like(tokens), np.zeros_like(tokens)
    samples = np.zeros(len(lengths), np.float32)
    for index, (low, high) in enumerate(itertools.pairwise(cu)):
        out[low:high], returns[low:high] = gae(tokens[low:high], values[low:high], gamma, lam)
        active = out[low:high] if loss_mask is None else out[low:high][loss_mask[low:high] > 0]
        samples[index] = active.mean() if len(active) else 0.0
    return out, returns, samples
