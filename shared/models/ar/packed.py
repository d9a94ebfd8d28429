"""Attention for packed rows: several sequences stand one after the other in a single row, and none sees another.

Sequences of one length are computed together by PyTorch's scaled dot-product attention; nothing of the size of the whole row
squared is ever made. Models reach it by transformers' attention interface, under the name NAME.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "unimesh_packed"
CHANGING = ("softcap", "s_aux", "position_bias")
"""Options of attention that change its result, and that this one does not have."""
LAYERS = {"full_attention", "sliding_attention"}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_lengths: Sequence[int] = (),
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. [1, heads, tokens, size] → [1, tokens, heads, size]."""
    if attention_mask is not None or sum(packed_lengths) != query.shape[2]:
        raise ValueError(f"packed rows of {query.shape[2]} tokens come with their lengths and without a mask")
    if odd := [name for name in CHANGING if more.get(name) is not None]:
        raise ValueError(f"train.replay packed: {type(module).__name__} wants {', '.join(odd)}; use padded")
    starts = [0, *itertools.accumulate(packed_lengths)]
    alike: dict[int, list[int]] = defaultdict(list)
    for start, length in zip(starts, packed_lengths, strict=False):
        alike[length].append(start)
    gqa = query.shape[1] != key.shape[1]
    order, found = [], []
    for length, places in alike.items():
        index = (torch.tensor(places)[:, None] + torch.arange(length)).flatten()
        order.append(index)
        q, k, v = (_rows(x, index.to(x.device), len(places)) for x in (query, key, value))
        mask = _band(length, sliding_window, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None, enable_gqa=gqa
        )
        found.append(out.transpose(1, 2).flatten(0, 1))
    back = torch.argsort(torch.cat(order)).to(query.device)
    return torch.cat(found).index_select(0, back)[None], None


def _rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """[1, heads, tokens, size] → [count, heads, length, size]."""
    chosen = x[0].index_select(1, index)
    return chosen.view(chosen.shape[0], count, -1, chosen.shape[2]).transpose(0, 1)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The causal mask of a sliding window; None where plain causality is the same."""
    if window is None or length <= window:
        return None
    far = torch.arange(length, device=device)
    distance = far[:, None] - far
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def enable(model: Any) -> None:
    """From now on the model takes packed rows only. ValueError for a model that brings an attention of its own."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"train.replay packed: {type(model).__name__} computes attention in a way of its own; use padded")
    if other := set(getattr(model.config, "layer_types", None) or ()) - LAYERS:
        raise ValueError(f"train.replay packed: {type(model).__name__} has layers of {', '.join(sorted(other))}; use padded")
    model.set_attn_implementation(NAME)


@contextmanager
def padded(model: Any, attention: str) -> Iterator[None]:
    """Inside, a model that takes packed rows takes padded ones, with an attention of transformers'."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != NAME:
        yield
        return
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)
