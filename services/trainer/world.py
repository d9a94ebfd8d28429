"""The trainer's ranks: torchrun's environment contract, one gloo group for control words."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

WORDS = datetime.timedelta(hours=24)
"""Ranks wait for the next word while rank 0 writes a checkpoint, or waits for a full disk; who dies ends all at once anyhow."""

BACKENDS = "cpu:gloo,cuda:nccl"
"""What is kept in host memory is summed there."""


class World:
    """Rank 0 talks to Redis; the others learn everything from its control words."""

    def __init__(self) -> None:
        """From RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; one rank needs no process group.

        A rank that computes waits for the others UNIMESH_RANKS_TIMEOUT_S seconds (600); then all end, and begin again.
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.control: Any = None
        self.computing: Any = None
        """For sums in the middle of a step, where a rank may not be later than `patience`."""
        self.saving: Any = None
        """For the threads that write checkpoints: their words may not stand between the others."""
        self.patience = datetime.timedelta(seconds=float(os.environ.get("UNIMESH_RANKS_TIMEOUT_S") or 600))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.size > 1:
            dist.init_process_group(BACKENDS if torch.cuda.is_available() else "gloo", timeout=self.patience)
            self.control = dist.new_group(backend="gloo", timeout=WORDS)
            self.computing = dist.new_group(backend="gloo", timeout=self.patience)
            self.saving = dist.new_group(backend="gloo", timeout=WORDS)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, word: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. They wait here for the next word: a second where there is nothing to do, and as long
        as rank 0 waits for a checkpoint, a version or a full disk."""
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
        """Sums over ranks, float64; in a step."""
        return self._reduce(values, dist.ReduceOp.SUM, self.computing)

    def largest(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX, self.computing)

    def any(self, fact: bool) -> bool:
        """Whether it is so on any rank; between steps."""
        return bool(self._reduce([float(fact)], dist.ReduceOp.MAX, self.control)[0])

    def _reduce(self, values: list[float], how: Any, group: Any) -> list[float]:
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=group)
        found: list[float] = tensor.tolist()
        return found

    def collect(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; on rank 0 alone. They wait for each other as long as it takes."""
        if self.size == 1:
            return [data]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self.control)
        most = int(sizes.max())
        own = torch.zeros(most, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        found = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)] if self.first else None
        dist.gather(own, found, dst=0, group=self.control)
        return [one[:size].numpy().tobytes() for one, size in zip(found or [], sizes.tolist(), strict=False)]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
