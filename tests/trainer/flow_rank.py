"""One rank of test_two_ranks_train_the_same: `python -m tests.trainer.flow_rank BATCH FOLDER OPTIONS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.world import World
from tests.trainer.test_flow_stack import make_stack, read_batch
from tests.trainer.test_stack import whole


def main() -> None:
    torch.set_num_threads(1)
    world, folder = World(), Path(sys.argv[2])
    stack = make_stack(world, **json.loads(sys.argv[3]))
    for _ in range(2):  # an average differs from what is trained from the second on
        result = stack.train_track(read_batch(Path(sys.argv[1])))
    weights = whole(stack)
    if world.first:
        save_file({n: v.contiguous() for n, v in weights.items()}, folder / "weights.safetensors")
        (folder / "result.json").write_text(json.dumps([result.updates, result.metrics]))
    world.close()


if __name__ == "__main__":
    main()
