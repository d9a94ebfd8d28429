"""Optimizer, learning-rate schedules and clipping. Golden topic 11."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor

from shared.config.sections import Optimizer as Section


def lr_factor(section: Section, step: int, total: int) -> float:
    """Factor on the base learning rate of optimizer step `step` (from 0) of `total`.

    linear: k/w during w warm-up steps, then 1 falling to 0. cosine: the same warm-up, then half a cosine. linear_warmup:
    `1e-8 + (1 - 1e-8) k/w`, then 1. constant: 1, warm-up ignored. `min_ratio` is a floor of both decays.
    """
    warmup = section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "linear_warmup":
        return 1e-8 + (1 - 1e-8) * step / warmup if step < warmup else 1.0
    if step < warmup:
        return step / warmup
    share = (step - warmup) / (total - warmup)
    fall = 1 - share if section.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0)))
    return max(section.min_ratio, fall, 0.0)


def param_groups(names: Iterable[str], lr: float, group_lrs: Mapping[str, float]) -> list[tuple[float, list[str]]]:
    """(learning rate, names): the first of `group_lrs` that a name contains decides, the rest has `lr` and comes first."""
    groups: dict[str, list[str]] = {"": [], **{part: [] for part in group_lrs}}
    for name in names:
        groups[next((part for part in group_lrs if part in name), "")].append(name)
    return [(group_lrs.get(part, lr), own) for part, own in groups.items() if own]


def make_optimizer(named: Mapping[str, torch.nn.Parameter], section: Section) -> torch.optim.AdamW:
    groups = [
        {"params": [named[name] for name in names], "lr": lr}
        for lr, names in param_groups(named, section.lr, section.group_lrs)
    ]
    fused = all(p.device.type == "cuda" for p in named.values()) or None
    how: dict[str, Any] = {"betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay, "fused": fused}
    return torch.optim.AdamW(groups, lr=section.lr, **how)


def global_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """2-norm of all gradients over all ranks' shards."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if isinstance(norm, torch.distributed.tensor.DTensor):
        norm = norm.full_tensor()
    return float(norm)


def clip_(parameters: Iterable[torch.nn.Parameter], norm: float, limit: float) -> None:
    """`g ← g min(1, limit / (norm + 1e-6))`."""
    factor = min(1.0, limit / (norm + 1e-6))
    if factor < 1.0:
        grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, factor)
