"""One rank of test_ranks_equal_one: `python -m tests.trainer.rank MODEL DTYPE FOLDER OPTIONS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.checkpoint import Saver
from services.trainer.world import World
from shared.weights.checkpoints import Position
from tests.trainer.test_stack import flat, gradient_of, make_batch, make_stack, whole


def main() -> None:
    model, dtype, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    world = World()
    options = json.loads(sys.argv[4])
    stack = make_stack(model, dtype, world, **options)
    gradient = gradient_of(stack, make_batch())
    weights = whole(stack)
    share = stack.backend.weights()
    position = Position(1, 1, "n.1", {"policy": stack.progress.version})
    saver = Saver(folder / "checkpoints", world)
    saver.save(position, stack.state(), {})
    stack.train_track(make_batch(seed=1))
    later = whole(stack)
    save_file(share, folder / f"share-{world.rank}.safetensors")  # a snapshot, whatever was trained meanwhile
    saver.wait()
    world.barrier()

    other = make_stack(model, dtype, world, **options)
    other.load(folder / "checkpoints" / position.name)
    other.progress.version = position.versions["policy"]
    other.train_track(make_batch(seed=1))
    resumed = whole(other)
    other.load(folder / "one" / position.name)
    resharded = whole(other)
    if isinstance(stack.algorithm, CrossEntropy):
        batch, opened = make_batch(rows=8, group=1), set[int]()
        plain = batch.open_slice
        batch.open_slice = lambda i: (opened.add(i), plain(i))[1]  # type: ignore[func-returns-value]
        other.measure(batch)
        (folder / f"opened-{world.rank}.json").write_text(json.dumps(sorted(opened)))
        world.barrier()
        other.load(folder / "one" / position.name)
        measured = other.measure(make_batch(rows=7, group=1))
        if world.first:
            (folder / "measured.json").write_text(json.dumps(measured))
    if world.first:
        torch.save({"gradient": gradient, "weights": flat(weights), "later": flat(later)}, folder / "rank0.pt")
        torch.save({"weights": flat(resumed), "resharded": flat(resharded)}, folder / "resumed.pt")
        (folder / "metrics.json").write_text(json.dumps({"updates": position.versions["policy"]}))
    world.close()


if __name__ == "__main__":
    main()
