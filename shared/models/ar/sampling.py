"""From logits to the next token and its log-prob under the distribution sampled from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.types.params import ARSamplingParams


def filtered(logits: Tensor, params: ARSamplingParams) -> Tensor:
    """fp32 logits [rows, vocabulary] after temperature, top-k and top-p; what is cut is -inf."""
    logits = logits.float()
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    if params.top_k:
        kept = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    if params.top_p < 1:
        values, order = logits.sort(dim=-1, descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    return logits


def draw(
    logits: Tensor, params: ARSamplingParams, uniform: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> tuple[Tensor, Tensor]:
    """(token ids, fp32 log-probs), [rows] each, by inversion of the distribution function at `uniform` in [0, 1)."""
    log_probs = filtered(logits, params).log_softmax(-1)
    if params.temperature == 0:
        tokens = log_probs.argmax(-1)
    else:
        cdf = log_probs.exp().cumsum(-1)
        at = torch.from_numpy(uniform).to(cdf.dtype).to(cdf.device)[:, None] * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, at, right=True).squeeze(1)
        last = (log_probs > -torch.inf).cumsum(-1).argmax(-1)  # the last token that can be drawn
        tokens = torch.minimum(tokens, last)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)
