"""The folder of a tiny Wan 2.1 or 2.2 with random weights, UMT5 and a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import UMT5Config, UMT5EncoderModel

from tests.models.tiny_pipelines import wan
from tests.models.tiny_sd3 import WORDS, make_tokenizer

TEXT = 32
"""Width of a text's conditions."""


def make_folder(folder: Path, name: str, seed: int) -> Path:
    """As DiffusionPipeline.save_pretrained writes it."""
    torch.manual_seed(seed)
    pipe = wan(name).pipe
    config = UMT5Config(vocab_size=len(WORDS) + 3, d_model=TEXT, d_kv=8, d_ff=64, num_layers=1, num_heads=2, pad_token_id=0)
    pipe.register_modules(text_encoder=UMT5EncoderModel(config).eval(), tokenizer=make_tokenizer())
    pipe.save_pretrained(folder)
    return folder
