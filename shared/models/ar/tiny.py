"""The demo's model, made on the spot: a Qwen3 of 0.41 M parameters and a tokenizer with one token a character.

Run as `python -m shared.models.ar.tiny FOLDER SEED`, in a process of its own: it needs torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = 0, 1, 2
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""What the assistant says stands in generation marks, and ends with <eos>."""


def make_tokenizer() -> Any:
    """Ids 0, 1, 2 are <pad>, <eos>, <unk>; then newline and the printable ASCII characters."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN} | {char: i + 3 for i, char in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 3 + len(ALPHABET),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


def make_folder(folder: Path, seed: int, **changes: Any) -> Path:
    """A Hugging Face model folder with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(seed, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]), int(sys.argv[2]))
