"""Records that are made by rule: the demo's task, and reasoning-gym's."""

from __future__ import annotations

import random
import string
import zlib
from functools import cached_property
from typing import Any

import msgspec

from services.controller.data.record import Record, fingerprint_of
from shared.config import builtin
from shared.config.problems import bad


class SortingSource:
    """The demo's task: `582013>` → `012358`. Row k is drawn by a generator of its own."""

    shuffle = False

    def __init__(self, params: builtin.Sorting) -> None:
        self.params, self.fingerprint = params, fingerprint_of(params)

    @property
    def size(self) -> int | None:
        return self.params.size

    def get(self, row: int) -> Record:
        p = self.params
        rng = random.Random(f"{p.seed}:{p.split}:{row}")
        while True:
            digits = "".join(rng.choice(string.digits) for _ in range(p.digits))
            prompt = f"{digits}>"
            if (zlib.crc32(prompt.encode()) % 10 == 0) == (p.split == "held_out"):
                break
        answer = "".join(sorted(digits))
        return Record(prompt=prompt, target=self._demonstration(digits, answer, rng), metadata={"answer": answer})

    def _demonstration(self, digits: str, right: str, rng: random.Random) -> str:
        draw = rng.random()
        if draw < self.params.right:
            return right
        return right[1:] + right[0] if draw < self.params.right + self.params.rotated else digits


class ReasoningGymSource:
    """A procedural data set of reasoning-gym; the entry travels in the metadata so that its own grader can score."""

    shuffle = False

    def __init__(self, params: builtin.ReasoningGymSource) -> None:
        self.params, self.fingerprint = params, fingerprint_of(params)

    @property
    def size(self) -> int:
        return self.params.size

    @cached_property
    def dataset(self) -> Any:
        import reasoning_gym

        p = self.params
        try:
            return reasoning_gym.create_dataset(p.dataset, size=p.size, seed=p.seed, **p.config)
        except (ValueError, TypeError, AssertionError) as error:
            raise bad("data.source.params", p.dataset, f"reasoning-gym refused it: {error}") from error

    def get(self, row: int) -> Record:
        entry = self.dataset[row]
        plain = msgspec.json.decode(msgspec.json.encode(entry, enc_hook=str))
        return Record(
            prompt=entry["question"],
            target=str(entry["answer"]),
            metadata={"answer": str(entry["answer"]), "dataset": self.params.dataset, "entry": plain},
        )
