"""The folders of tiny pipelines with random weights, text encoders and a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3Model, UMT5Config, UMT5EncoderModel

from tests.models.tiny_pipelines import TINY
from tests.models.tiny_sd3 import WORDS, make_tokenizer

VOCABULARY = len(WORDS) + 3


def umt5() -> Any:
    return UMT5EncoderModel(
        UMT5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, pad_token_id=0)
    )


def qwen3() -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    return Qwen3Model(config)


ENCODERS = {"wan21": umt5, "wan22": umt5, "z_image": qwen3}
"""By family."""


def make_folder(folder: Path, name: str, seed: int) -> Path:
    """As DiffusionPipeline.save_pretrained writes it."""
    torch.manual_seed(seed)
    pipe, tokenizer = TINY[name]().pipe, make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    pipe.register_modules(text_encoder=ENCODERS[name]().eval(), tokenizer=tokenizer)
    pipe.save_pretrained(folder)
    return folder
