"""`python -m tests.trainer.full_disk REDIS FOLDER MODEL WHO`: a job whose disk is full for a while. FOLDER is a small
file system; WHO meets it first: `trainer`, or `rollout.policy` (its bodies are too large for Redis).

Prints one JSON line: what was said meanwhile, where the job stood, and how it ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from services.trainer.checkpoint import Saver
from services.trainer.link import Link
from services.trainer.loop import Trainer
from services.trainer.publisher import Publisher
from services.trainer.world import World
from shared import files
from shared.config.settings import Settings
from shared.weights.store import WeightStore
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.client import connect
from shared.wire.keys import JobKeys, assignment
from tests.simulated import Simulated
from tests.trainer.test_crash import Held, Number

PATIENCE_S = 40.0


def train(settings: Settings, job: str) -> None:
    keys, client, value = JobKeys(job), connect(settings.redis_url), uuid4().hex.encode()
    client.set(assignment("me"), value)
    link = Link(client, keys, BodyStore(client, keys, open_bodies(settings.bodies, job)), "me", value)
    number: Any = Number()
    store = WeightStore(settings.weights(job), "policy")
    publisher = Publisher(store, 1, 2, False, link.report, say=link.warn)
    saver = Saver(settings.checkpoints(job), World(), say=link.warn)
    trainer = Trainer("policy", number, number, World(), saver, 1, link, publisher, lambda: False)
    trainer.start()
    trainer.run()


def main() -> None:
    files.PAUSE_S = 0.2
    url, folder, model, who = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    settings = Settings(url, folder, (model.parent,), f"dir:{folder}/bodies", 1, None)
    job = Held(settings, model, every=2, logging={"texts": 0})
    job.workers = Simulated(settings, job.name, delay=0.05, trains=False, text="abc" if who == "trainer" else "long " * 20_000)
    trainer = threading.Thread(target=train, args=(settings, job.name), daemon=True)
    with job:
        trainer.start()
        until(lambda: steps(job) >= 2)
        fill(folder / "filler")
        until(lambda: who in {origin for origin, _ in said(job)})
        time.sleep(1.5)  # a step that was under way
        stalled = steps(job)
        time.sleep(1.5)
        still = steps(job)
        (folder / "filler").unlink()
        job.check()
        trainer.join(10)
    told = [json.loads(line)["step"] for line in (settings.tracking(job.name) / "metrics.jsonl").read_text().splitlines()]
    assert not (folder / "bodies" / job.name).exists(), "an ended job leaves no bodies"
    assert told == list(range(1, 13)), told
    print(json.dumps({"said": said(job), "stalled": [stalled, still], "ended": steps(job)}))


def fill(path: Path) -> None:
    """Until not a byte is left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                assert files.no_space(error)


def steps(job: Held) -> int:
    return int(job.runner.client.xlen(job.runner.keys.steps))


def said(job: Held) -> list[tuple[str, str]]:
    """(origin, text) of warnings about space."""
    rows = [fields[b"text"].decode() for _, fields in job.runner.client.xrange(job.runner.keys.events)]
    found = [text.partition(": ") for text in rows if "no space left" in text]
    return [(origin, text) for origin, _, text in found]


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, check
        time.sleep(0.02)


if __name__ == "__main__":
    main()
