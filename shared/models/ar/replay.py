"""New log-probs of stored completions: the same layout as generation, so that both score the same policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.models.ar.bundle import Bundle
from shared.models.ar.generate import left_padded, positions

Tokens = np.ndarray[Any, Any]


def replay(bundle: Bundle, prompts: Sequence[Tokens], completions: Sequence[Tokens], temperature: float = 1.0) -> Tensor:
    """Log-probs (at least fp32) of all completion tokens, packed [sum of completion lengths], differentiable in the weights.

    Prompts are padded on the left and completions on the right, so that all completions start in one column; logits are
    computed for the completion's columns only. Prompts must hold at least one token.
    """
    device = bundle.model.device
    ids, mask = left_padded(prompts, bundle.pad)
    lengths = [len(c) for c in completions]
    width = max(lengths)
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
    logits = found.logits[:, :-1][valid.to(device)]
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    chosen = targets[valid.to(device)]
    scores: Tensor = logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(-1)
    return scores
