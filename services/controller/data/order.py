"""Which record a draw number means: a pure function of source size, seed, shuffle and tail, so the cursor is one number."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np

from shared.types.ids import root_id

Tail = Literal["wrap", "drop", "pad"]


class DataOrder:
    """Epoch after epoch over `size` records, each in an order of its own; without a size the source never repeats."""

    def __init__(
        self, source: str, size: int | None, shuffle: bool, seed: int, batch_size: int = 1, tail: Tail = "wrap"
    ) -> None:
        """`tail`: where an epoch is no multiple of the batch, the next begins in the middle of it (wrap), the rest is left out
        (drop), or the epoch is filled up with its first records (pad).
        """
        self.source, self.size, self.shuffle, self.seed = source, size, shuffle, seed
        self.length = size
        """Draws of an epoch."""
        if size is not None and tail == "drop":
            self.length = max(1, size // batch_size) * batch_size
        elif size is not None and tail == "pad":
            self.length = -(-size // batch_size) * batch_size

    def place(self, draw: int) -> tuple[int, int]:
        """(epoch, row) of a draw."""
        epoch, index = self._index(draw)
        if self.size is None:
            return epoch, index
        index %= self.size
        return epoch, int(_permutation(self.seed, epoch, self.size)[index]) if self.shuffle else index

    def root(self, draw: int) -> str:
        """Unique: a record that fills up its epoch is numbered beyond the source's size."""
        epoch, row = self.place(draw)
        again = 0 if self.size is None else self._index(draw)[1] // self.size
        return root_id(self.source, epoch, row + again * (self.size or 0))

    def _index(self, draw: int) -> tuple[int, int]:
        return (0, draw) if self.length is None else divmod(draw, self.length)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(size)
