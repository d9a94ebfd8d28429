"""One rank of test_ranks_equal_one: `python -m tests.trainer.rank MODEL DTYPE FOLDER OPTIONS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.trainer.algorithms.cross_entropy import CrossEntropy
from services.trainer.batch import Batch
from services.trainer.checkpoint import Saver
from services.trainer.world import World
from shared.types.sample import Sample
from shared.weights.checkpoints import Position
from shared.wire.errors import BodyLost
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
    opens(other.train_track, world, folder / f"trained-{world.rank}.json")
    loses(other.train_track, world)
    if isinstance(stack.algorithm, CrossEntropy):
        opens(other.measure, world, folder / f"opened-{world.rank}.json")
        other.load(folder / "one" / position.name)
        measured = other.measure(make_batch(rows=7, group=1))
        if world.first:
            (folder / "measured.json").write_text(json.dumps(measured))
    if world.first:
        torch.save({"gradient": gradient, "weights": flat(weights), "later": flat(later)}, folder / "rank0.pt")
        torch.save({"weights": flat(resumed), "resharded": flat(resharded)}, folder / "resumed.pt")
        (folder / "metrics.json").write_text(json.dumps({"updates": position.versions["policy"]}))
    world.close()


def opens(use: Callable[[Batch], Any], world: World, told: Path) -> None:
    """Which bodies of a batch of 24 this rank opens."""
    batch, opened = make_batch(rows=24, group=1), set[int]()
    plain = batch.open_slice
    batch.open_slice = lambda i: (opened.add(i), plain(i))[1]  # type: ignore[func-returns-value]
    use(batch)
    told.write_text(json.dumps(sorted(opened)))
    world.barrier()


def loses(use: Callable[[Batch], Any], world: World) -> None:
    """A body that one rank misses stops all of them, and nobody waits in a collective."""
    batch = make_batch(rows=24, group=1)
    plain = batch.open_slice

    def gone(index: int) -> list[Sample]:
        if world.rank == 1:
            raise BodyLost("body dir:0/x is gone")
        return plain(index)

    batch.open_slice = gone
    with pytest.raises(BodyLost, match="gone" if world.rank == 1 else "another rank misses"):
        use(batch)


if __name__ == "__main__":
    main()
