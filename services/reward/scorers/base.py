"""What a scorer is: rows in, one number a row out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.types.rewards import RewardRequest


class Scorer(Protocol):
    def score(self, rows: Sequence[RewardRequest]) -> Sequence[float | None]:
        """One score a row, in order. None or a number that is not finite means that the row could not be scored."""
        ...
