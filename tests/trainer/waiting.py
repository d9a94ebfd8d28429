"""One rank of test_ranks: `python -m tests.trainer.waiting MODEL FOLDER IDLE_S SLOW_S`.

Idles for so long, as the trainer does between two records; then rank 1 is slow at every micro-batch of a step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.world import World
from tests.trainer.test_stack import make_batch, make_stack, whole


def main() -> None:
    model, folder, idle_s, slow_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    world = World()
    stack = make_stack(model, "float64", world, micro_batch_size=2)
    until = time.monotonic() + idle_s
    while (
        world.share(b"nop" if time.monotonic() < until else b"train") == b"nop" if world.first else world.share(None) == b"nop"
    ):
        time.sleep(0.5 if world.first else 0)
    if not world.first:
        stack.tick = lambda: time.sleep(slow_s)
    stack.train_track(make_batch())
    weights = whole(stack)
    if world.first:
        save_file(weights, folder / "weights.safetensors")
    world.close()


if __name__ == "__main__":
    main()
