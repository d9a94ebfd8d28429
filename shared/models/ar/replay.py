"""New log-probs of stored completions: the same temperature and positions as generation, so that both score the same policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.models.ar.bundle import CRITIC, Bundle, where
from shared.models.ar.generate import left_padded, positions

Tokens = np.ndarray[Any, Any]
Pick = Callable[[Tensor], Tensor]
"""[rows, columns, …] of a forward pass → [completion tokens, …]."""


@dataclass
class Replayed:
    """Columns over all completion tokens, packed [sum of completion lengths], differentiable in the weights."""

    log_probs: Tensor
    """At least fp32."""
    entropy: Tensor | None = None
    """Nats of the distribution that each token was drawn from."""
    values: Tensor | None = None
    """The critic's, of the state before each token; None without a critic."""


def replay(
    bundle: Bundle,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    temperature: float = 1.0,
    packed: bool = False,
    entropy: bool = False,
) -> Replayed:
    """Scores completions. Prompts must hold at least one token; logits are computed where a completion token follows only.

    padded: prompts are padded on the left and completions on the right, so that all completions start in one column.
    packed: all rows stand in one, without padding (the model must have been enabled for it).
    """
    with _states(bundle.model) as states:
        found, targets, pick = (_packed if packed else _padded)(bundle, prompts, completions)
    logits = pick(found)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    total = logits.logsumexp(-1)
    scores = logits.gather(1, targets[:, None]).squeeze(1) - total
    out = Replayed(scores)
    if entropy:
        out.entropy = total - (logits.softmax(-1) * logits).sum(-1)
    if states:
        hidden = pick(states[0])
        critic: nn.Module = getattr(bundle.model, CRITIC)
        with torch.autocast(hidden.device.type, enabled=False):  # returns are regressed in float32 at least
            out.values = critic(hidden.float() if hidden.dtype.itemsize < 4 else hidden).squeeze(-1)
    return out


@contextmanager
def _states(model: Any) -> Iterator[list[Tensor]]:
    """Collects what goes into the output layer, if the model has a critic."""
    found: list[Tensor] = []
    if not hasattr(model, CRITIC):
        yield found
        return
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        yield found
    finally:
        handle.remove()


def _padded(bundle: Bundle, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> tuple[Tensor, Tensor, Pick]:
    """(logits [rows, columns, vocabulary], targets [tokens], how columns become tokens)."""
    device = where()
    ids, mask = left_padded(prompts, bundle.pad)
    width = max(map(len, completions))
    tail = np.full((len(completions), width), bundle.pad, np.int64)
    real = np.zeros((len(completions), width), bool)
    for index, completion in enumerate(completions):
        tail[index, : len(completion)] = completion
        real[index, : len(completion)] = True
    targets, valid = torch.from_numpy(tail).to(device), torch.from_numpy(real)
    whole = torch.cat([mask, valid.long()], 1)
    padded = bool((mask == 0).any())  # on the left; what stands on the right of a row is hidden from it by causality alone
    found = bundle.model(
        input_ids=torch.cat([ids.to(device), targets], 1),
        attention_mask=whole.to(device) if padded else None,
        position_ids=positions(whole).to(device) if padded else None,
        use_cache=False,
        logits_to_keep=width + 1,
    )
    chosen = valid.to(device)
    return found.logits, targets[chosen], lambda x: x[:, :-1][chosen]


def _packed(bundle: Bundle, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> tuple[Tensor, Tensor, Pick]:
    device = where()
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([part for p, c in zip(prompts, completions, strict=True) for part in (p, c)]).astype(np.int64)
    places = np.concatenate([np.arange(n) for n in lengths])
    before = [np.arange(s + len(p) - 1, s + n - 1) for s, p, n in zip(starts, prompts, lengths, strict=False)]
    keep = np.concatenate(before)
    found = bundle.model(
        input_ids=torch.from_numpy(ids)[None].to(device),
        position_ids=torch.from_numpy(places)[None].to(device),
        use_cache=False,
        logits_to_keep=torch.from_numpy(keep).to(device),
        packed_lengths=lengths,
    )
    return found.logits, torch.from_numpy(ids[keep + 1]).to(device), lambda x: x[0]
