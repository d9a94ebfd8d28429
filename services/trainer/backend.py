"""FSDP2 around the bundle's modules, in place. With one rank there is nothing to shard and nothing is wrapped."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from services.trainer.world import World
from shared.models import lora
from shared.models.ar.bundle import CRITIC, Bundle, exported, placed

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Backend:
    """Parameters, gradients and state dicts of one bundle over the world's ranks.

    Gradient reductions are sums: the loss is already divided by global denominators.
    """

    def __init__(self, bundle: Bundle, world: World, dtype: str) -> None:
        self.bundle, self.world, self.model = bundle, world, bundle.model
        self.tied = bundle.tied
        self.adapters = lora.has_adapter(bundle.model)
        self.autocast = dtype == "bfloat16"
        placed(bundle)
        if world.size > 1:
            self._shard(self.model.device.type)

    def _shard(self, device: str) -> None:
        mesh = init_device_mesh(device, (self.world.size,))
        blocks = set(self.model._no_split_modules or ())
        for module in list(self.model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # torch 2.13 averages on gloo by default; the factor alone is refused there, the forced sum is exact
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def computing(self) -> Any:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """What rollouts need, as state(): the model without its critic; with adapters those alone, under PEFT's names."""
        state = self.state()
        if self.adapters:
            return {lora.exported_name(name): value for name, value in state.items() if lora.is_adapter(name)}
        return {name: value for name, value in state.items() if not name.startswith(f"{CRITIC}.")}

    def state(self) -> dict[str, Tensor]:
        """All that is trained, on the CPU, copied, each tensor once (empty on other ranks than 0). All ranks must call it."""
        if self.world.size == 1:
            own = {n: v for n, v in self.model.state_dict().items() if self._kept(n)}
            shared = self.model.device.type == "cpu"  # elsewhere the copy to the CPU is one already
            return {n: v.clone() if shared else v for n, v in exported(own, self.tied).items()}
        options = dataclasses.replace(_FULL, ignore_frozen_params=self.adapters)
        state: Any = get_model_state_dict(self.model, options=options)
        return {n: v for n, v in exported(state, self.tied).items() if self._kept(n)}

    def _kept(self, name: str) -> bool:
        return not self.adapters or lora.is_adapter(name) or name.startswith(f"{CRITIC}.")

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What training has made of model and optimizer: the live tensors, on each rank its shards."""
        model = {n: v for n, v in self.model.state_dict().items() if n not in self.tied and self._kept(n)}
        _prepared(self.model, optimizer)
        found = {f"model.{name}": value for name, value in model.items()}
        for name, parameter in self.named_parameters().items():
            for field, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{name}.{field}"] = value
        return found


def _prepared(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state before its first step is there, and counts no step: torch makes it by one that moves nothing."""
    if not optimizer.state:
        get_optimizer_state_dict(model, optimizer)
        for fields in optimizer.state.values():
            fields["step"].zero_()
