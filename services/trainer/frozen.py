"""What is fixed before a batch's first update: log-probs and values of the policy that it starts from, the critic's targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.algorithms.base import Micro
from services.trainer.batch import Row
from services.trainer.world import World
from shared.types.advantages import part_gae

if TYPE_CHECKING:
    from services.trainer.stack import Work

Array = np.ndarray[Any, Any]


@dataclass
class Frozen:
    """Token columns of one update's rows on this rank, packed by row; rows that are not computed hold zeros."""

    starts: Array
    anchor: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None
    advantages: Tensor | None = None

    @classmethod
    def empty(cls, rows: Sequence[Row]) -> Frozen:
        starts = np.concatenate([[0], np.cumsum([len(row.completion) for row in rows])]).astype(np.int64)
        return cls(starts, torch.zeros(int(starts[-1])))

    def _places(self, chosen: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in chosen]))

    def put(self, chosen: Sequence[int], log_probs: Tensor, values: Tensor | None) -> None:
        """Columns of some rows, in the order in which those were replayed."""
        places = self._places(chosen)
        self.anchor = self.anchor.to(log_probs.dtype)
        self.anchor[places] = log_probs.cpu()
        if values is not None:
            held = torch.zeros(len(self.anchor), dtype=values.dtype) if self.values is None else self.values
            held[places] = values.cpu()
            self.values = held

    def fill(self, micro: Micro, chosen: Sequence[int]) -> None:
        """The columns of a micro-batch of these rows."""
        places, device = self._places(chosen), micro.new.device
        micro.anchor = self.anchor[places].to(device)
        if self.values is not None and self.returns is not None and self.advantages is not None:
            micro.old_values = self.values[places].to(device)
            micro.returns = self.returns[places].to(device)
            micro.token_advantages = self.advantages[places].to(device)


def critic_targets(frozen: Sequence[Frozen | None], work: Sequence[Work], algorithm: Any, world: World) -> None:
    """Advantages and returns of every token by GAE on each row's terminal reward, before anything is updated.

    Normalized, if the recipe says so, over the tokens of the whole batch that count, on all ranks.
    """
    p = algorithm.params
    sums = np.zeros(3)
    for held, own in zip(frozen, work, strict=True):
        assert held is not None
        values = torch.zeros_like(held.anchor) if held.values is None else held.values
        rewards = np.asarray([row.reward for row in own.rows], np.float32)
        lengths = [len(row.completion) for row in own.rows]
        advantages, returns, _ = part_gae(rewards, values.double().numpy(), lengths, p.gamma, p.lam)
        held.values = values
        kind = torch.promote_types(values.dtype, torch.float32)
        held.advantages, held.returns = (torch.from_numpy(column).to(kind) for column in (advantages, returns))
        active = advantages[_mask(own.rows) > 0].astype(np.float64)
        sums += [len(active), active.sum(), (active**2).sum()]
    if not p.normalize_advantages:
        return
    count, total, squares = world.total(sums.tolist())
    if count < 2:
        return
    mean = total / count
    deviation = math.sqrt(max(0.0, squares / count - mean**2))
    for held in frozen:
        assert held is not None and held.advantages is not None
        held.advantages = (held.advantages - mean) / (deviation + 1e-8)


def _mask(rows: Sequence[Row]) -> Array:
    return np.concatenate([row.mask for row in rows]) if rows else np.zeros(0, np.float32)
