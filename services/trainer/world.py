"""The trainer's ranks: torchrun's environment contract, one gloo group for control words."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

WORDS = datetime.timedelta(hours=24)
"""Ranks wait for the next word while rank 0 writes a checkpoint, or waits for a full disk; who dies ends all at once anyhow."""


class World:
    """Rank 0 talks to Redis; the others learn everything from its control words."""

    def __init__(self) -> None:
        """From RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; one rank needs no process group.

        A rank that computes waits for the others UNIMESH_RANKS_TIMEOUT_S seconds (600); then all end, and begin again.
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.control: Any = None
        self.saving: Any = None
        """For the threads that write checkpoints: their words may not stand between the others."""
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.size > 1:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            patience = float(os.environ.get("UNIMESH_RANKS_TIMEOUT_S") or 600)
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=patience))
            self.control = dist.new_group(backend="gloo", timeout=WORDS)
            self.saving = dist.new_group(backend="gloo", timeout=WORDS)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, word: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. No rank waits here longer than rank 0 waits for a message (10 s)."""
        if self.size == 1:
            assert word is not None
            return word
        size = torch.tensor([len(word) if word is not None else 0])
        dist.broadcast(size, 0, group=self.control)
        data = torch.empty(int(size), dtype=torch.uint8)
        if not len(data):
            return b""
        if word is not None:
            data.copy_(torch.frombuffer(bytearray(word), dtype=torch.uint8))
        dist.broadcast(data, 0, group=self.control)
        return data.numpy().tobytes()

    def total(self, values: list[float]) -> list[float]:
        """Sums over ranks, float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], how: Any) -> list[float]:
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self.control)
        found: list[float] = tensor.tolist()
        return found

    def any(self, fact: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.largest([float(fact)])[0])

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
