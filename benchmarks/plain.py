"""One plain Python process that runs the demo's training step with the mesh's own engine, scorer and trainer code.

`python -m benchmarks.plain MODEL [overrides]` reads numbers of steps from its standard input, one a line, makes them, and
answers each with one JSON line of their seconds. No Redis, no messages, no weights on disk: what the mesh adds is the
difference.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.controller.data.intake import Intake
from services.controller.data.sources import open_source
from services.controller.lifecycles import parse
from services.controller.lifecycles.state import Group
from services.controller.scoring import train_slices
from services.reward.handler import requests
from services.reward.scorers import load as load_scorer
from services.reward.verdict import verdict
from services.trainer.algorithms import ALGORITHMS
from services.trainer.backend import Backend
from services.trainer.batch import Batch
from services.trainer.stack import TrainStack
from services.trainer.world import World
from shared.config import specs
from shared.config.compose import compose
from shared.config.settings import from_environment
from shared.engines.base import fill
from shared.engines.heads import filled
from shared.engines.transformers_engine import TransformersEngine
from shared.models.ar.bundle import load
from shared.types import ARSamplingParams, Sample
from shared.types.ids import root_id


class Plain:
    """Model, engine, scorer and stack of a recipe in this process; engine and trainer share the live weights."""

    def __init__(self, model: Path, overrides: list[str]) -> None:
        document = compose("ar/sort", [f"model.path={model}", *overrides])
        self.recipe, self.plan = parse(document)
        settings = from_environment()
        bundle = load(model, None)
        self.intake = Intake(model, self.recipe.data, self.recipe.rollout.sampling.max_new_tokens)
        self.source = open_source(self.recipe.data.source, settings, "data.source")
        engine = specs.check("engine", "transformers", self.recipe.rollout.engine.params, "engine")
        self.engine = TransformersEngine(bundle, engine)
        [section] = self.recipe.reward.scorers.values()
        self.scorer = load_scorer(section.name, section.params)
        named = self.recipe.algorithm
        algorithm = ALGORITHMS[named.name](specs.check("algorithm", named.name, named.params, "algorithm"))
        world = World()
        backend = Backend(bundle, world, "float32")
        self.stack = TrainStack(backend, algorithm, self.recipe.train, world, self.plan.steps, 1.0)
        sampling = self.recipe.rollout.sampling.model_dump()
        self.params = ARSamplingParams(**sampling, seed=self.recipe.seed, stop_token_ids=self.intake.stop_tokens)

    def step(self, number: int) -> float:
        """One training step; returns its mean reward."""
        size = self.plan.batch_size
        slices = fill(self.engine, [self.request(number * size + i) for i in range(size)])
        groups, heads = [], []
        for index, samples in enumerate(slices):
            found = verdict(self.scorer.score, [row for sample in samples for row in requests(sample)])
            head = filled(samples, ()).head
            heads.append(head)
            groups.append(self.group(number * size + index, head, found.scores))
        pieces = train_slices(self.plan, groups, self.recipe.algorithm.advantage)
        self.stack.train_track(Batch(pieces, "policy", lambda i: slices[i]))
        return float(np.mean([r for g in groups for r in g.rewards]))

    def request(self, draw: int) -> list[Sample]:
        record = self.source.get(draw)
        prompt = self.intake.prompt(record)
        root = root_id("sorting", 0, draw)
        n = self.plan.group_size
        return [
            Sample.request([root], self.params, n=n, texts=[prompt.text], tokens=[prompt.tokens], metadata=[record.metadata])
        ]

    def group(self, draw: int, head: Any, scores: tuple[float, ...]) -> Group:
        return Group(gid=f"g{draw}#0", draw=draw, issue=0, shelf=0, needs={}, issued_at=0.0, slices=(head,), rewards=scores)


def serve(step: Callable[[int], float]) -> None:
    """Makes as many steps as each line of the standard input says, and answers with their seconds."""
    number = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            step(number)
            seconds.append(time.perf_counter() - started)
            number += 1
        print(json.dumps(seconds), flush=True)


def main() -> None:
    torch.set_num_threads(from_environment().threads)
    serve(Plain(Path(sys.argv[1]), sys.argv[2:]).step)


if __name__ == "__main__":
    main()
