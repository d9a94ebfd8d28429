"""An autoregressive model as both sides hold it: the module, its tokenizer, and how its weights are named."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from shared.files import local
from shared.models import lora

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Parameters' dtype by the recipe's: bfloat16 computes under autocast over fp32 master weights."""

CRITIC = "value_head"
"""Name of the module that estimates returns, put into a model for PPO. Rollouts never see it."""
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*")
"""What makes a folder of weights a model that others can open."""


@dataclass
class Bundle:
    model: Any
    """A transformers causal language model."""
    tokenizer: Tokenizer
    pad: int
    """Token id for padding; masked everywhere, so any legal id does."""

    @property
    def tied(self) -> frozenset[str]:
        """State-dict names that are views of others."""
        seen: dict[int, str] = {}
        found = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in seen:
                found.add(name)
            seen.setdefault(id(value), name)
        return frozenset(found)


def load(files: Path, weights: Path | None, dtype: str = "float32", attention: str = "sdpa") -> Bundle:
    """The model of a folder, or with the weights of a version folder in place of the folder's own."""
    kind = DTYPES[dtype]
    if weights is not None and (weights / lora.CONFIG).exists():
        adapter = lora.read_config(weights)
        plain = (adapter.base / "config.json").exists()  # a model folder, which transformers reads in any form
        bundle = load(adapter.base, None, dtype, attention) if plain else load(files, adapter.base, dtype, attention)
        tensors = {n: v for path in weights.glob("*.safetensors") for n, v in load_file(path).items()}
        lora.merge_into(bundle.model, adapter, tensors)
        return bundle
    if weights is None:
        model = AutoModelForCausalLM.from_pretrained(files, dtype=kind, attn_implementation=attention)
    else:
        config = AutoConfig.from_pretrained(files)
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=attention)
        assign(model, {n: v for path in sorted(weights.glob("*.safetensors")) for n, v in load_file(path).items()})
    model.eval()
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    pad = model.config.pad_token_id
    return Bundle(model, tokenizer, pad if isinstance(pad, int) else 0)


def add_critic(bundle: Bundle) -> None:
    """A linear head on the last hidden states; its first values are 0."""
    head = torch.nn.Linear(bundle.model.get_output_embeddings().in_features, 1, dtype=next(bundle.model.parameters()).dtype)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    setattr(bundle.model, CRITIC, head)


def where() -> torch.device:
    """This process's device: the first that its agent leased (or the rank's own), else the CPU. Models compute there, also
    those whose parameters stay in host memory."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placed(bundle: Any) -> Any:
    """The model on this process's device."""
    bundle.model.to(where())
    return bundle


@torch.no_grad()
def assign(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Copies a version's tensors into the model in place: all weights, or the adapter of a model that has one.

    ValueError names what is missing or does not fit.
    """
    own = model.state_dict(keep_vars=True)
    if lora.has_adapter(model):
        own = {lora.exported_name(name): value for name, value in own.items() if lora.is_adapter(name)}
    seen: set[int] = set()
    for name, value in state.items():
        if name not in own or own[name].shape != value.shape:
            raise ValueError(f"tensor {name} of shape {list(value.shape)} does not fit the model")
        own[name].copy_(value)
        seen.add(id(own[name]))
    missing = [name for name, value in own.items() if id(value) not in seen]
    if missing:
        raise ValueError(f"the version lacks {len(missing)} tensors, the first is {missing[0]}")


def copy_tokenizer(files: Path, target: Path) -> None:
    """What save_pretrained of a model does not write."""
    for pattern in SIDE_FILES[1:]:
        for path in files.glob(pattern):
            shutil.copyfile(path, target / path.name)


def copy_side_files(files: Path, target: Path) -> None:
    """Config and tokenizer, once; an existing complete copy stays."""
    if (target / "config.json").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    for pattern in reversed(SIDE_FILES):  # the config last: where it is, the others are
        for path in files.glob(pattern):
            there = target / (f".{path.name}" if local(target) else path.name)
            there.write_bytes(path.read_bytes())
            if local(target):
                there.rename(target / path.name)
