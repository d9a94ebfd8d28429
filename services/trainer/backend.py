"""FSDP2 around the bundle's modules, in place. With one rank there is nothing to shard and nothing is wrapped."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from services.trainer.world import BACKENDS, World
from shared.config.sections import Placement
from shared.models import lora
from shared.models.ar.bundle import CRITIC, Bundle, placed, where
from shared.models.diffusion.bundle import DiffusionBundle


class Backend:
    """Parameters, gradients and state dicts of one bundle over the world's ranks.

    Gradient reductions are sums: the loss is already divided by global denominators.
    """

    def __init__(
        self,
        bundle: Bundle | DiffusionBundle,
        world: World,
        dtype: str,
        placement: Placement | None = None,
        recompute: bool = False,
        defer: bool = True,
    ) -> None:
        """Changes the bundle's modules in place.

        Args:
            recompute: activations of blocks are computed again in the backward pass.
            defer: gradients are summed over ranks where `sync` says so, not after every backward pass.
        """
        self.bundle: Any = bundle
        self.world, self.model = world, bundle.model
        self.tied = bundle.tied
        self.adapters = lora.has_adapter(bundle.model)
        self.autocast = dtype == "bfloat16"
        placement = placement or Placement(trainer_ranks=world.size)
        self.sharded = world.size > 1 or placement.cpu_offload
        self.defer = defer and not placement.cpu_offload  # whole gradients would stay on the device
        if not self.sharded:  # FSDP places group by group: a device holds no more than one of them whole
            placed(bundle)
        blocks = [m for m in self.model.modules() if type(m).__name__ in set(self.model._no_split_modules or ())]
        if recompute:
            for block in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if self.sharded:
            self._shard(blocks, where().type, placement)

    def _shard(self, blocks: Sequence[torch.nn.Module], device: str, placement: Placement) -> None:
        """Each block is a group of its own, the rest is the root's."""
        if not dist.is_initialized():  # one rank, whose layers visit the device
            how = BACKENDS if device == "cuda" else "gloo"
            dist.init_process_group(how, store=HashStore(), rank=0, world_size=1)
        policy = CPUOffloadPolicy(pin_memory=device == "cuda") if placement.cpu_offload else OffloadPolicy()
        copies, shared = placement.mesh()
        if copies == 1:
            mesh = init_device_mesh(device, (shared,))
        else:
            mesh = init_device_mesh(device, (copies, shared), mesh_dim_names=("copies", "shards"))
            for group in mesh.get_all_groups():  # they do not take the world's own
                dist.distributed_c10d._set_pg_timeout(self.world.patience, group)
        for module in (*blocks, self.model):
            fully_shard(module, mesh=mesh, offload_policy=policy)
        outside = [name for name, p in self.named_parameters().items() if not isinstance(p, DTensor)]
        if outside:
            raise ValueError(f"{len(outside)} trained parameters belong to no group of FSDP, the first is {outside[0]}")
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # torch 2.13 averages on gloo by default; the factor alone is refused there, the forced sum is exact
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def computing(self) -> Any:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(where().type, torch.bfloat16)

    def reshard(self) -> None:
        """Gives up whole parameters that a forward pass has left behind: the root's group keeps its own for a backward pass."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every rank holds all parameters, so that its forward passes need no other. All ranks must enter it."""
        groups = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in groups:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in groups:
                module.set_reshard_after_forward(module is not self.model, recurse=False)
            if self.sharded:  # also forgets this rank's own forward passes: backward passes gather in their order
                self.model.reset_iter_state()

    def sync(self, now: bool) -> None:
        """Whether the next backward pass sums the gradients so far over ranks: said on all of them alike."""
        if self.sharded and self.defer:
            self.model.set_requires_gradient_sync(now)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """What rollouts need, copied to the CPU: the model without its critic, with adapters those alone under PEFT's names.

        Each rank keeps its share of whole tensors, about as many bytes as the others (adapters are rank 0's): together they are
        the version. All ranks must call it.
        """
        held = {name: value for name, value in self._trained().items() if not name.startswith(f"{CRITIC}.")}
        owners = _owners({name: value.nbytes for name, value in held.items()}, 1 if self.adapters else self.world.size)
        own: dict[str, Tensor] = {}
        for name, value in held.items():
            live = value.to_local() if isinstance(value, DTensor) else value
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if owners[name] == self.world.rank:
                shared = whole.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()  # nothing was gathered
                kept = whole.clone() if shared and whole.device.type == "cpu" else whole.cpu()
                own[lora.exported_name(name) if self.adapters else name] = kept.contiguous()
        return own

    def _trained(self) -> dict[str, Tensor]:
        """The live tensors of the state dict that training may change, each once; on each rank its shards."""
        return {n: v.detach() for n, v in self.model.state_dict().items() if n not in self.tied and self._kept(n)}

    def _kept(self, name: str) -> bool:
        return not self.adapters or lora.is_adapter(name) or name.startswith(f"{CRITIC}.")

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What training has made of model and optimizer: the live tensors, on each rank its shards."""
        _prepared(self.model, optimizer)
        found = {f"model.{name}": value for name, value in self._trained().items()}
        for name, parameter in self.named_parameters().items():
            for field, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{name}.{field}"] = value
        return found


def _owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank writes which tensor: the largest first, each to the rank with the least so far."""
    sums, found = [0] * ranks, {}
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        found[name] = sums.index(min(sums))
        sums[found[name]] += sizes[name]
    return found


def _prepared(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state before its first step is there, and counts no step: torch makes it by one that moves nothing."""
    if not optimizer.state:
        held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
        for parameter, _ in held:
            parameter.grad = None  # torch takes a gradient as a sign that the state is there
        get_optimizer_state_dict(model, optimizer)
        for parameter, gradient in held:
            parameter.grad = gradient
        for fields in optimizer.state.values():
            fields["step"].zero_()
