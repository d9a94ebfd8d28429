"""The folders of tiny pipelines with random weights, text encoders and tokenizers of a few words or of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.models.diffusion.qwen_processor import PictureProcessor
from tests.models.tiny_pipelines import TINY
from tests.models.tiny_sd3 import WORDS, make_tokenizer

VOCABULARY = len(WORDS) + 3
BYTES = 384
"""Tokens of a tokenizer of bytes: long enough for the pipelines' own words before a prompt."""
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def words() -> Any:
    found = make_tokenizer()
    found.chat_template = TEMPLATE
    return found


def letters() -> Any:
    return ByT5Tokenizer(chat_template=TEMPLATE)


def umt5() -> Any:
    return UMT5EncoderModel(
        UMT5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, pad_token_id=0)
    )


def qwen3(kind: Any = Qwen3Model, vocabulary: int = VOCABULARY, layers: int = 2, width: int = 16) -> Any:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    return kind(config)


def llama() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaModel(LlamaConfig(vocab_size=BYTES, **sizes))


def clip() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1, bos_token_id=None, **sizes))


def t5() -> Any:
    return T5EncoderModel(T5Config(vocab_size=BYTES, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


VISIBLE = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def pieces() -> Any:
    """Qwen's tokenizer, of bytes."""
    names = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", *VISIBLE]
    found = Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    found.add_special_tokens({"additional_special_tokens": list(VISIBLE)})
    return found


def qwen_eyes() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}
    text = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(pieces())}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=sizes | {"depth": 1, "num_heads": 2, "out_hidden_size": 16, "fullatt_block_indexes": [0]},
        image_token_id=pieces().convert_tokens_to_ids("<|image_pad|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def sees() -> Any:
    return PictureProcessor(Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=4 * 28 * 28), pieces())


WAN: dict[str, Callable[[], Any]] = {"text_encoder": umt5, "tokenizer": words}
ENCODERS: dict[str, dict[str, Callable[[], Any]]] = {
    "wan21": WAN,
    "wan22": WAN,
    "wan21_i2v": WAN,
    "wan22_i2v": WAN,
    "qwen_image_edit": {"text_encoder": qwen_eyes, "tokenizer": pieces, "processor": sees},
    "z_image": {"text_encoder": qwen3, "tokenizer": words},
    "qwen_image": {"text_encoder": lambda: qwen3(vocabulary=BYTES), "tokenizer": letters},
    "flux2_klein": {"text_encoder": lambda: qwen3(Qwen3ForCausalLM, BYTES, 28, 8), "tokenizer": letters},
    "hunyuan_video": {"text_encoder": llama, "tokenizer": letters, "text_encoder_2": clip, "tokenizer_2": words},
    "hunyuan_video15": {
        "text_encoder": lambda: qwen3(vocabulary=BYTES, layers=3),
        "tokenizer": letters,
        "text_encoder_2": t5,
        "tokenizer_2": ByT5Tokenizer,
    },
}
"""By family, what its tiny pipeline of tests lacks."""


def make_folder(folder: Path, name: str, seed: int) -> Path:
    """As DiffusionPipeline.save_pretrained writes it."""
    torch.manual_seed(seed)
    pipe = TINY[name]().pipe
    parts = {part: make() for part, make in ENCODERS[name].items()}
    pipe.register_modules(**{n: p.eval() if isinstance(p, torch.nn.Module) else p for n, p in parts.items()})
    pipe.save_pretrained(folder)
    if "processor" in parts:  # as published folders name it
        index = json.loads((folder / "model_index.json").read_text())
        index["processor"] = ["transformers", "Qwen2VLProcessor"]
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder
