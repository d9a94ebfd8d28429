"""Low-rank adapters (Hu et al., arXiv 2106.09685), put into a model in place; their names are those of PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.config.sections import Lora
from shared.models.targets import chosen

LIVE = "default"
_PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """`y = x W^T + b + (alpha / rank) (x A^T) B^T` with the active adapter; B starts at zero, so y is then the base's."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.base_layer = base
        self.rank, self.scaling = rank, alpha / rank
        self.lora_A: Any = nn.ModuleDict()
        self.lora_B: Any = nn.ModuleDict()
        self.active: str | None = LIVE
        base.requires_grad_(False)
        self.add(LIVE, generator)

    def add(self, name: str, generator: torch.Generator | None = None, trainable: bool = True) -> None:
        """Another adapter of the same shape."""
        weight: Tensor = self.base_layer.get_parameter("weight")
        kind: dict[str, Any] = {"bias": False, "dtype": weight.dtype, "device": weight.device}
        self.lora_A[name] = nn.Linear(self.base_layer.in_features, self.rank, **kind).requires_grad_(trainable)
        self.lora_B[name] = nn.Linear(self.rank, self.base_layer.out_features, **kind).requires_grad_(trainable)
        bound = 1 / math.sqrt(self.base_layer.in_features)  # kaiming_uniform with a = sqrt(5)
        with torch.no_grad():
            a = torch.rand(self.rank, self.base_layer.in_features, generator=generator, dtype=torch.float64)
            self.lora_A[name].weight.copy_((2 * a - 1) * bound)
            self.lora_B[name].weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.active is None:
            return y
        low: Tensor = self.lora_B[self.active](self.lora_A[self.active](x))
        return y + low * self.scaling

    def delta(self, name: str = LIVE) -> Tensor:
        """What the adapter adds to the base's weight."""
        a, b = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        found: Tensor = b @ a * self.scaling
        return found


def inject(model: Any, section: Lora, seed: int = 0) -> list[str]:
    """Replaces the linear modules that the section names, and freezes everything else. ValueError if nothing is named.

    The adapters' start depends on the seed and the module's place alone, so all ranks make the same.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = chosen(linear, section)
    model.requires_grad_(False)
    for number, name in enumerate(found):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        parent, _, own = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, own, LoraLinear(getattr(holder, own), section.rank, section.alpha, generator))
    return found


def layers(model: Any) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def has_adapter(model: Any) -> bool:
    return any(True for _ in layers(model))


@contextmanager
def using(model: Any, adapter: str | None) -> Iterator[None]:
    """Another adapter, or with None the base alone, inside the block. What is trainable does not change."""
    before = [(module, module.active) for _, module in layers(model)]
    for module, _ in before:
        module.active = adapter
    try:
        yield
    finally:
        for module, active in before:
            module.active = active


def is_adapter(name: str, adapter: str = LIVE) -> bool:
    """Whether a state-dict name is one of the adapter's."""
    return f".lora_A.{adapter}." in name or f".lora_B.{adapter}." in name


def exported_name(name: str) -> str:
    """The name of an adapter's tensor in a file: PEFT's, without the adapter's own name."""
    return _PREFIX + name.replace(f".lora_A.{LIVE}.", ".lora_A.").replace(f".lora_B.{LIVE}.", ".lora_B.")


def own_name(name: str) -> str:
    """The inverse of exported_name."""
    bare = name.removeprefix(_PREFIX)
    return bare.replace(".lora_A.weight", f".lora_A.{LIVE}.weight").replace(".lora_B.weight", f".lora_B.{LIVE}.weight")


def merged(state: Mapping[str, Tensor], scaling: Mapping[str, float]) -> dict[str, Tensor]:
    """A plain model's state dict from one with adapters: `W + scaling B A`. `scaling` by module name."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        module, found, rest = name.partition(".base_layer.")
        if not found:
            out[name] = value
            continue
        if rest == "weight":
            a, b = state[f"{module}.lora_A.{LIVE}.weight"], state[f"{module}.lora_B.{LIVE}.weight"]
            value = (value.double() + scaling[module] * (b.double() @ a.double())).to(value.dtype)
        out[f"{module}.{rest}"] = value
    return out


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], section: Lora, base: str, modules: Iterable[str]) -> None:
    """A PEFT adapter folder. `tensors` by their exported names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
