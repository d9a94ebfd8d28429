"""Which record a draw number means: a pure function of source size, seed and shuffle, so the cursor is one number."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from shared.types.ids import root_id


class DataOrder:
    """Epoch after epoch over `size` records, each in an order of its own; without a size the source never repeats."""

    def __init__(self, source: str, size: int | None, shuffle: bool, seed: int) -> None:
        self.source, self.size, self.shuffle, self.seed = source, size, shuffle, seed

    def place(self, draw: int) -> tuple[int, int]:
        """(epoch, row) of a draw."""
        if self.size is None:
            return 0, draw
        epoch, index = divmod(draw, self.size)
        return epoch, int(_permutation(self.seed, epoch, self.size)[index]) if self.shuffle else index

    def root(self, draw: int) -> str:
        epoch, row = self.place(draw)
        return root_id(self.source, epoch, row)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(size)
