"""From token losses to one number, and the scale that makes micro-batches add up to the global mean. Golden topic 2."""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class NoActiveTokens(ValueError):
    """An optimizer step without a single token that counts."""


def per_sequence(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of packed `values` over each sequence, [sequences]."""
    index = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths.to(values.device))
    return torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(0, index, values)


def aggregate(losses: Tensor, lengths: Tensor, mask: Tensor | None, mode: str, horizon: int = 8192) -> Tensor:
    """Mean of packed token losses.

    token-mean: `sum(l m) / max(sum m, 1)`. seq-mean-token-mean: the mean over sequences of their token means; empty and fully
    masked sequences count as 0 and stay in it. seq-mean-token-sum-norm: the mean over sequences of `sum(l m) / horizon`.
    """
    weight = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
    if mode == "token-mean":
        return (losses * weight).sum() / weight.sum().clamp(min=1)
    sums = per_sequence(losses * weight, lengths)
    if mode == "seq-mean-token-mean":
        return (sums / per_sequence(weight, lengths).clamp(min=1)).mean()
    if mode == "seq-mean-token-sum-norm":
        return sums.mean() / horizon
    raise ValueError(f"aggregation {mode!r}: legal are {', '.join(MODES)}")


def loss_scale(mode: str, active: float, total_active: float, sequences: int, total_sequences: int) -> float:
    """Factor of a micro-batch's loss so that summed gradients (over micro-batches and ranks) are those of the whole step.

    token-mean: its share of the step's active tokens over all ranks; otherwise its share of the sequences.
    """
    if mode == "token-mean":
        if total_active <= 0:
            raise NoActiveTokens("no token of the step counts: every sequence is empty, masked or failed")
        return active / total_active
    return sequences / total_sequences
