"""The trainer is killed before and after each of its outward acts: every record counts once, the job ends."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import xxhash

from services.controller.jobs import create, prepare
from services.controller.lifecycles.state import balanced
from services.controller.runner import Runner
from services.trainer import checkpoint
from services.trainer.base_stack import Progress, StepResult
from services.trainer.batch import Batch
from services.trainer.checkpoint import Saver, State
from services.trainer.link import Link
from services.trainer.loop import Trainer
from services.trainer.publisher import Publisher
from services.trainer.world import World
from shared.config.settings import Settings
from shared.weights import checkpoints
from shared.weights.store import WeightStore
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.client import connect
from shared.wire.codec import unpack
from shared.wire.keys import JobKeys, assignment
from tests.conftest import recipe
from tests.simulated import Simulated

STEPS = 12


class Number:
    """A model of one number, which remembers every batch and their order."""

    batch = Batch

    def __init__(self) -> None:
        self.value, self.progress = torch.tensor([1]), Progress()

    def averaged(self) -> Any:
        return nullcontext()

    def train_track(self, batch: Batch) -> StepResult:
        ids = [i for piece in batch.slices for part in piece.head.parts for i in part.ids]
        digest = xxhash.xxh3_64_intdigest(" ".join(ids).encode())
        self.value = torch.tensor([(int(self.value) * 3 + digest) % (1 << 62)])
        self.progress.version += 1
        return StepResult(updates=1)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": self.value.clone()}

    def state(self) -> State:
        return State({"model.w": self.value}, {})

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.state().tensors, World())


def mortal(at: int) -> None:
    """From now on this process kills itself at its `at`-th act; each act counts before and after it happens."""
    acts = count(1)

    def wrapped(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if next(acts) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = act(*args, **named)
            if next(acts) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    for owner, name in ((Link, "_send"), (Path, "rename"), (Path, "touch"), (Path, "unlink"), (shutil, "rmtree")):
        setattr(owner, name, wrapped(getattr(owner, name)))


def live(settings: Settings, job: str, at: int, background: bool) -> None:
    """One life of the real trainer around a Number."""
    mortal(at)
    keys, client, value = JobKeys(job), connect(settings.redis_url), uuid4().hex.encode()
    client.set(assignment("mortal"), value)
    link = Link(client, keys, BodyStore(client, keys, open_bodies(settings.bodies, job)), "mortal", value)
    number: Any = Number()
    incarnation = link.incarnation
    publisher = Publisher(WeightStore(settings.weights(job), "policy"), incarnation, 3, False, link.report)
    saver = Saver(settings.checkpoints(job), World(), background=background)
    trainer = Trainer("policy", number, number, World(), saver, incarnation, link, publisher, lambda: False)
    trainer.start()
    trainer.run()


class Held:
    """A job in the hands of a controller thread; its trainer is the test's."""

    def __init__(self, settings: Settings, model: Path, every: int, steps: int = STEPS, **changes: Any) -> None:
        self.steps = steps
        document = recipe(model, steps=steps, train__checkpoint_every=every, **changes)
        job = prepare(document, settings)
        self.settings, self.name = settings, create(connect(settings.redis_url), job)
        self.runner = Runner(lambda: connect(settings.redis_url), job, settings)
        self.thread = threading.Thread(target=self.runner.run)
        self.workers = Simulated(settings, self.name, trains=False)

    def __enter__(self) -> Held:
        self.thread.start()
        self.workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.__exit__()
        self.runner.stop()
        self.thread.join(20)

    def live(self, at: int, background: bool) -> int | None:
        """Exit code of a trainer that dies at its act `at`; None: it hangs. `background`: checkpoints are written beside it."""
        how = (self.settings, self.name, at, background)
        process = multiprocessing.get_context("fork").Process(target=live, args=how, daemon=True)
        process.start()
        process.join(30)
        return process.exitcode

    def check(self) -> int:
        """Ended, whole, every step once; returns the model."""
        self.thread.join(20)
        assert not self.thread.is_alive()
        _, state = self.runner._load()
        assert state.root.phase == "done" and state.root.batches == self.steps and balanced(state)
        steps = [unpack(row[b"m"], dict)["step"] for _, row in self.runner.client.xrange(self.runner.keys.steps)]
        assert steps == list(range(1, self.steps + 1))
        folder = checkpoints.newest(self.settings.checkpoints(self.name))
        assert folder is not None
        return int(checkpoint.read(folder, "model.")["w"])


@pytest.mark.parametrize("background", [True, False], ids=["beside", "between"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_trainer_killed_at_every_act_trains_everything_once(
    settings: Settings, model_folder: Path, every: int, background: bool
) -> None:
    with Held(settings, model_folder, every) as job:
        assert job.live(0, background) == 0
        straight = job.check()
    with Held(settings, model_folder, every) as job:
        for at in count(1):
            code = job.live(at, background)
            assert code in (0, -signal.SIGKILL), f"life {at}: {code}"
            if code == 0:
                break
        assert at > 20
        assert job.check() == straight


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_jobs_end_wherever_they_are_begun_again(settings: Settings, model_folder: Path, steps: int) -> None:
    """First and last step are one, or next to each other: no word is waited for that nobody will say again."""
    with Held(settings, model_folder, 1, steps) as job:
        assert job.live(0, True) == 0
        straight = job.check()
    with Held(settings, model_folder, 1, steps) as job:
        lives = 0
        for at in count(1):
            lives += 1
            code = job.live(at, True)
            assert code in (0, -signal.SIGKILL), f"life {at}: {code}"
            if code == 0:
                break
        assert lives > steps and job.check() == straight
