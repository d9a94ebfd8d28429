"""One rank of test_two_ranks_equal_one: `python -m tests.trainer.rank MODEL DTYPE FOLDER OPTIONS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.trainer import checkpoint
from services.trainer.world import World
from tests.trainer.test_stack import gradient_of, make_batch, make_stack


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([v.flatten() for v in weights.values()]) if weights else torch.zeros(0)


def main() -> None:
    model, dtype, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    world = World()
    options = json.loads(sys.argv[4])
    stack = make_stack(model, dtype, world, **options)
    gradient = gradient_of(stack, make_batch())
    weights = stack.backend.state()
    optimizer = stack.backend.optimizer_state(stack.optimizer)
    if world.first:
        save_file(weights, folder / "model.safetensors")
        checkpoint.save_optimizer(folder / "optimizer.safetensors", optimizer)
        (folder / "metrics.json").write_text(json.dumps({"updates": stack.progress.version}))
    world.barrier()
    stack.train_track(make_batch(seed=1))
    later = stack.backend.state()

    other = make_stack(model, dtype, world, **options)
    other.backend.load_state(load_file(folder / "model.safetensors") if world.first else {})
    other.backend.load_optimizer(other.optimizer, checkpoint.load_optimizer(folder / "optimizer.safetensors"))
    other.progress.version = json.loads((folder / "metrics.json").read_text())["updates"]
    other.train_track(make_batch(seed=1))
    resumed = other.backend.state()
    if world.first:
        torch.save({"gradient": gradient, "weights": flat(weights), "later": flat(later)}, folder / "rank0.pt")
        torch.save({"weights": flat(resumed)}, folder / "resumed.pt")
    world.close()


if __name__ == "__main__":
    main()
