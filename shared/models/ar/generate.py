"""Batched generation with a KV cache: one prefill per distinct prompt, left padding, rows leave the batch as they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from shared.models.ar.bundle import Bundle
from shared.models.ar.philox import uniform
from shared.models.ar.sampling import draw
from shared.types.params import ARSamplingParams

PAUSED = "paused"
Tokens = Sequence[int] | np.ndarray[Any, Any]


@dataclass
class Completion:
    tokens: list[int] = field(default_factory=list)
    """Up to and including the first stop token."""
    log_probs: list[float] = field(default_factory=list)
    finish: str = "length"
    """`stop`, `length` when the limit cut it, or `paused` while it is to be continued."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version) of each run of tokens that one version of the weights made."""


def left_padded(rows: Sequence[Tokens], pad: int) -> tuple[Tensor, Tensor]:
    """(ids, mask), int64 [rows, longest]: padding stands on the left."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), pad, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def positions(mask: Tensor) -> Tensor:
    """Position ids that count real tokens only; padding gets 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.inference_mode()
def generate(
    bundle: Bundle,
    prompts: Sequence[Tokens],
    rows: Sequence[int],
    seeds: Sequence[int],
    params: ARSamplingParams,
    progress: Callable[[], None] = lambda: None,
    ended: Callable[[int, Completion], None] = lambda row, completion: None,
    begun: Sequence[Completion] | None = None,
    pause: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """A completion for each row.

    Args:
        prompts: distinct prompts, none empty.
        rows: for each completion the index of its prompt.
        seeds: one 64-bit seed a row; token t draws number t of it.
        progress: called after every token.
        ended: called for each row when its last token is drawn, while others may go on.
        begun: what there is of each row, which is continued in place: a token is the same whenever it is drawn.
        pause: asked after every token; where it is true, what has not ended is `paused`, and not told of.
    """
    run = _Run(bundle, prompts, rows, seeds, params, begun)
    while run.active:
        for row in run.step():
            ended(row, run.out[row])
        progress()
        if run.active and pause():
            for row in run.active:
                run.out[row].finish = PAUSED
            break
    return run.out


def _continued(prompts: Sequence[Tokens], rows: Sequence[int], begun: Sequence[Completion]) -> tuple[list[Tokens], list[int]]:
    """Prompts and places in which a row that has begun has a prompt of its own: what was asked, and what there is of it."""
    found: list[Tokens] = []
    places: list[int] = []
    known: dict[int, int] = {}
    for prompt, completion in zip(rows, begun, strict=True):
        if completion.tokens:
            places.append(len(found))
            found.append(np.concatenate([np.asarray(prompts[prompt]), np.asarray(completion.tokens)]))
            continue
        if prompt not in known:
            known[prompt] = len(found)
            found.append(prompts[prompt])
        places.append(known[prompt])
    return found, places


class _Run:
    """The state of one batch: the cache and, for each row still active, its place in the output."""

    def __init__(
        self,
        bundle: Bundle,
        prompts: Sequence[Tokens],
        rows: Sequence[int],
        seeds: Sequence[int],
        params: ARSamplingParams,
        begun: Sequence[Completion] | None = None,
    ) -> None:
        self.model, self.params = bundle.model, params
        self.device = bundle.model.device
        self.out = [Completion() for _ in rows] if begun is None else list(begun)
        self.active = list(range(len(rows)))
        self.numbers = np.asarray([len(completion.tokens) for completion in self.out], np.uint64)
        """Of each active row's next token."""
        if self.numbers.any():
            prompts, rows = _continued(prompts, rows, self.out)
        for completion in self.out:
            completion.finish = "length"
        self.seeds = np.asarray(seeds, np.uint64)
        self.stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=self.device)
        ids, mask = left_padded(prompts, bundle.pad)
        self.padded = bool((mask == 0).any())
        self.cache = DynamicCache(config=bundle.model.config)
        logits = self._forward(ids, mask, positions(mask))
        index = torch.tensor(rows, device=self.device)
        self.mask = mask[index.cpu()]
        self.next_position = self.mask.sum(-1)
        if list(rows) != list(range(len(prompts))):
            self.cache.reorder_cache(index)
            logits = logits[index]
        self.logits: Tensor | None = logits
        self.last = torch.zeros(len(rows), dtype=torch.long)

    def _forward(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of the last column."""
        found = self.model(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device) if self.padded else None,
            position_ids=position_ids.to(self.device) if self.padded else None,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = found.logits[:, -1]
        return logits

    def step(self) -> list[int]:
        """One token for every active row; returns the rows that it ended."""
        if self.logits is None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            self.logits = self._forward(self.last[:, None], self.mask, self.next_position[:, None])
            self.next_position = self.next_position + 1
        tokens, log_probs = draw(self.logits, self.params, uniform(self.seeds, self.numbers))
        self.logits = None
        self.numbers = self.numbers + np.uint64(1)
        full = self.numbers >= self.params.max_new_tokens
        ended = torch.isin(tokens, self.stops).tolist()
        keep, over = [], []
        for place, (row, token, log_prob) in enumerate(zip(self.active, tokens.tolist(), log_probs.tolist(), strict=True)):
            completion = self.out[row]
            completion.tokens.append(token)
            completion.log_probs.append(log_prob)
            if ended[place]:
                completion.finish = "stop"
                over.append(row)
            elif full[place]:
                over.append(row)
            else:
                keep.append(place)
        self.last = tokens
        if over:
            self._keep(keep)
        return over

    def _keep(self, places: list[int]) -> None:
        """Only these rows go on."""
        self.active = [self.active[p] for p in places]
        if not places:
            return
        index = torch.tensor(places, device=self.device)
        self.cache.batch_select_indices(index)
        self.last, self.seeds, self.numbers = self.last[index], self.seeds[places], self.numbers[places]
        self.mask, self.next_position = self.mask[index.cpu()], self.next_position[index.cpu()]
