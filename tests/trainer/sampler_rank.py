"""One rank of test_sampler: `python -m tests.trainer.sampler_rank MODEL FOLDER OPTIONS`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.trainer.sampler import Sampler
from services.trainer.stack import TrainStack
from services.trainer.world import World
from shared.config.builtin import Engine
from shared.engines import LIVE
from shared.models.ar import packed
from shared.types import ARSamplingParams, Sample
from shared.wire import codec
from tests.trainer.test_stack import make_batch, make_stack, whole

PARAMS = ARSamplingParams(max_new_tokens=6, seed=5)


def requests(count: int = 5) -> list[bytes]:
    """Slices of two prompts of unequal lengths, one of which the engine refuses."""
    found = []
    for number in range(count):
        tokens = [5000] if number == 3 else list(range(10, 12 + number))
        sample = Sample.request([f"s:0:{number}"], PARAMS, n=2, track="policy", texts=["x"], tokens=[tokens])
        found.append(codec.encode([sample]))
    return found


def sampler_of(stack: TrainStack, world: World) -> Sampler:
    bundle = stack.backend.bundle
    engine = LIVE["transformers"](None, Engine(), bundle)

    @contextlib.contextmanager
    def ready() -> Iterator[None]:
        with stack.averaged(), stack.backend.whole(), packed.padded(bundle.model, "sdpa"), stack.backend.computing():
            yield

    return Sampler(engine, world, ready, "policy", "me")


def play(model: Path, world: World, options: dict[str, Any], samples: bool = True) -> tuple[TrainStack, dict[int, Any]]:
    """A batch, maybe some sampling, another batch."""
    stack = make_stack(model, world=world, **options)
    stack.train_track(make_batch())
    answers = sampler_of(stack, world).fill(requests(), stack.progress.version, alone=True) if samples else {}
    stack.train_track(make_batch(seed=1))
    return stack, answers


def main() -> None:
    model, folder, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    world = World()
    stack, answers = play(model, world, options)
    weights = whole(stack)
    if world.first:
        save_file(weights, folder / "weights.safetensors")
        for place, answer in answers.items():
            (folder / f"{place}.error").write_text(answer.error)
            (folder / f"{place}.body").write_bytes(answer.body)
    world.close()


if __name__ == "__main__":
    main()
