"""`python -m services.rollout.child`: one engine for one job's track, and the consumer of its stream."""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from shared import logs
from shared.agent.health import Watch, show_progress
from shared.agent.process import guard_parent, take_turns


def main() -> None:
    guard_parent()
    take_turns()
    logs.begin("rollout")
    import torch

    import shared.models.ar.generate  # noqa: F401  (the slow imports are done before there is work)
    from shared.config.settings import from_environment

    settings = from_environment()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line)
    run(settings, order["assignment"], order["agent"], torch.set_num_threads)


def run(settings: Any, assignment: dict[str, str], agent: str, set_threads: Callable[[int], None]) -> None:
    """Serves the job's stream until SIGTERM."""
    from services.rollout.handler import RolloutHandler
    from services.rollout.prefetch import Prefetch
    from services.rollout.seat import Seat
    from shared.config import specs
    from shared.config.settings import child_threads
    from shared.engines import ENGINES
    from shared.weights.store import WeightStore
    from shared.wire.bodies import BodyStore, open_bodies
    from shared.wire.client import connect
    from shared.wire.consumer import Consumer, Policy
    from shared.wire.keys import JobKeys

    job, track = assignment["job"], assignment["track"]
    logs.about(job=job, worker=agent)
    consumer: Consumer | None = None
    loading = Watch(limit_s=3600)
    show_progress(lambda: loading.getting_on() if consumer is None else consumer.getting_on())
    keys, client = JobKeys(job), connect(settings.redis_url)
    doc = msgspec.msgpack.decode(client.get(keys.doc))
    set_threads(child_threads(doc, settings))
    section = doc["recipe"]["rollout"]
    named = section["engine"]
    params = specs.check("engine", named["name"], named["params"], "rollout.engine")
    weights = Path(doc["weights"]) if doc["weights"] else None
    make = specs.implementation("engine", named["name"], ENGINES)
    engine = make(doc["recipe"], Path(doc["files"]), weights, params)
    store = BodyStore(client, keys, open_bodies(settings.bodies, job))
    weight_store = WeightStore(settings.weights(job), track)
    prefetch = Prefetch(lambda: connect(settings.redis_url), keys, weight_store, engine.load, agent)
    schedule = doc["recipe"]["schedule"]
    groups = schedule["per_worker_inflight"]
    most = None if groups is None else groups * -(-section["group_size"] // (section["slice"] or section["group_size"]))
    handler = RolloutHandler(engine, weight_store, prefetch, store, track, agent, section["deadline_s"], most)
    lease = settings.lease_s
    policy = Policy(lease, lease / 5, stall_s=section["stall_s"], deadline_s=section["deadline_s"])
    share = schedule["eval_share"] if schedule["max_staleness"] else 1.0
    seat = Seat(keys, track, uuid4().hex, share, lambda stage: consumer.held(stage) if consumer else 0)
    consumer = Consumer(
        lambda: connect(settings.redis_url),
        keys,
        seat.training,
        handler,
        store,
        policy,
        aside=[seat.evaluating],
        wanted=seat.wanted,
    )
    handler.say = consumer.say
    gc.collect()
    gc.freeze()  # libraries and model: no collection need walk them again

    def stop(*_: object) -> None:
        handler.suspend()
        consumer.stop()

    signal.signal(signal.SIGTERM, stop)
    consumer.run()
    handler.close()


if __name__ == "__main__":
    main()
