"""The diffusion demo's step in one plain process, with the mesh's own engine, scorer and trainer code.

`python -m benchmarks.plain_diffusion MODEL [overrides]` answers as benchmarks.plain does: numbers of steps in, seconds out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.plain import serve
from services.controller.data.sources import open_source
from services.controller.jobs import media_params
from services.controller.lifecycles import parse
from services.controller.lifecycles.state import Group
from services.controller.scoring import train_slices
from services.reward.handler import requests
from services.reward.scorers import load as load_scorer
from services.reward.verdict import verdict
from services.trainer.algorithms import ALGORITHMS
from services.trainer.backend import Backend
from services.trainer.flow_batch import FlowBatch
from services.trainer.flow_stack import FlowStack
from services.trainer.world import World
from shared.config import specs
from shared.config.compose import compose
from shared.config.settings import from_environment
from shared.engines.base import fill
from shared.engines.diffusers_engine import DiffusersEngine
from shared.engines.heads import filled
from shared.models.diffusion import family
from shared.models.diffusion.bundle import DiffusionBundle, load_pipeline
from shared.types import Sample
from shared.types.ids import root_id


class PlainDiffusion:
    """Pipeline, engine, scorer and stack of a recipe in this process; engine and trainer share the live weights."""

    def __init__(self, model: Path, overrides: list[str]) -> None:
        self.recipe, self.plan = parse(compose("diffusion/demo", [f"model.path={model}", *overrides]))
        self.source = open_source(self.recipe.data.source, from_environment(), "data.source")
        own, pipe = family(self.recipe.model.family), load_pipeline(model)
        bundle = DiffusionBundle(own.model(pipe).requires_grad_(True), own)
        engine = specs.check("engine", "diffusers", self.recipe.rollout.engine.params, "engine")
        self.engine = DiffusersEngine(own, pipe, engine)
        [section] = self.recipe.reward.scorers.values()
        self.scorer = load_scorer(section.name, section.params)
        named, world = self.recipe.algorithm, World()
        algorithm = ALGORITHMS[named.name](specs.check("algorithm", named.name, named.params, "algorithm"))
        backend, total = Backend(bundle, world, "float32"), self.plan.steps * self.recipe.train.num_updates_per_batch
        self.stack = FlowStack(backend, own, algorithm, self.recipe.train, world, total, seed=self.recipe.seed)
        self.params = media_params(self.recipe, model)

    def step(self, number: int) -> float:
        """One training step; returns its mean reward."""
        size = self.plan.batch_size
        slices = fill(self.engine, [self.request(number * size + i) for i in range(size)])
        groups = []
        for index, samples in enumerate(slices):
            found = verdict(self.scorer.score, [row for sample in samples for row in requests(sample)])
            about: Any = {"issue": 0, "shelf": 0, "needs": {}, "issued_at": 0.0}
            draw, head = number * size + index, filled(samples, ()).head
            groups.append(Group(gid=f"g{draw}#0", draw=draw, slices=(head,), rewards=found.scores, **about))
        pieces = train_slices(self.plan, groups, self.recipe.algorithm.advantage)
        self.stack.train_track(FlowBatch(pieces, "policy", lambda i: slices[i]))
        rewards = [reward for group in groups for reward in group.rewards]
        return sum(rewards) / len(rewards)

    def request(self, draw: int) -> list[Sample]:
        record = self.source.get(draw % (self.source.size or 1))
        n, root = self.plan.group_size, root_id("jsonl", 0, draw)
        return [
            Sample.request([root], self.params, n=n, texts=[str(record.prompt)], metadata=[record.metadata], track="policy")
        ]

    def sizes(self) -> tuple[int, int]:
        """Bytes of one sample's body besides its picture, and those of its trajectory alone."""
        [samples] = fill(self.engine, [self.request(0)])
        [sample] = samples
        frontier: Any = sample.frontier
        bare = Sample((*sample.parts[:-1], msgspec.structs.replace(frontier, primitives={})))
        body = sum(map(len, filled([bare], ()).parts))
        return body // len(frontier), frontier.segment.latents.nbytes // len(frontier)


def main() -> None:
    torch.set_num_threads(from_environment().threads)
    plain = PlainDiffusion(Path(sys.argv[1]), [word for word in sys.argv[2:] if word != "sizes"])
    if sys.argv[2] == "sizes":
        print(json.dumps(plain.sizes()), flush=True)
    else:
        serve(plain.step)


if __name__ == "__main__":
    main()
