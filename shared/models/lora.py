"""Low-rank adapters (Hu et al., arXiv 2106.09685), put into a model in place; their names are those of PEFT."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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


def inject(model: Any, section: Lora, seed: int = 0) -> list[str]:
    """Replaces the linear modules that the section names, and freezes everything else. ValueError if nothing is named.

    The adapters' start depends on the seed and the module's place alone, so all ranks make the same.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = chosen(linear, section)
    shared = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    if tied := [name for name in found if shared[id(model.get_submodule(name).weight)] > 1]:
        raise ValueError(f"model.lora.targets: the weight of {tied[0]} is tied to another module's")
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


CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    """What an adapter's folder says of itself."""

    base: Path
    """Folder of the weights that it was trained on."""
    rank: int
    alpha: float
    modules: tuple[str, ...]
    """The linear modules that it changes, by their whole names."""


def config_text(section: Lora, base: Path, modules: Iterable[str]) -> str:
    """adapter_config.json of PEFT."""
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
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
    return json.dumps(document, indent=2)


def read_config(folder: Path) -> Adapter:
    """Of a version that holds an adapter alone. ValueError if the file is none."""
    try:
        found = json.loads((folder / CONFIG).read_text())
        modules = tuple(map(str, found["target_modules"]))
        return Adapter(Path(found["base_model_name_or_path"]), int(found["r"]), float(found["lora_alpha"]), modules)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / CONFIG} is no adapter's configuration: {error}") from error


@torch.no_grad()
def merge(model: Any) -> None:
    """Adds the live adapters to their bases and takes them out of the model, which is then a plain one."""
    for name, module in list(layers(model)):
        base, weight = module.base_layer, module.base_layer.get_parameter("weight")
        _add(weight, module.lora_A[LIVE].weight, module.lora_B[LIVE].weight, module.scaling)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, base)


@torch.no_grad()
def merge_into(model: Any, adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    """Adds an adapter to a plain model's weights: `W + (alpha / rank) B A`, computed in float64."""
    for name in adapter.modules:
        a, b = (tensors[f"{_PREFIX}{name}.lora_{part}.weight"] for part in "AB")
        _add(model.get_submodule(name).weight, a, b, adapter.alpha / adapter.rank)


def _add(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> None:
    weight.copy_((weight.double() + scaling * (b.double() @ a.double())).to(weight.dtype))
