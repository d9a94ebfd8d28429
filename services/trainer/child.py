"""`python -m services.trainer.child`: one rank of a trainer's world. Rank 0 is the agent's child and starts the others."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from services.trainer.ranks import FAILED, GONE_S, LOST, Others, lost_rank, ranks_said
from shared import logs
from shared.agent.health import Watch, show_progress
from shared.agent.process import guard_parent, take_turns

log = logging.getLogger(__name__)

LOAD_S = 3600.0
"""Longest time until the model is loaded and its first version published."""
QUIET_S = 1800.0
"""Longest time between two control words or micro-batches; a checkpoint lies between two words."""


def main() -> None:
    guard_parent()
    take_turns()
    logs.begin("trainer")
    import torch

    import services.trainer.loop  # noqa: F401  (the slow imports are done before there is work)
    from shared.config.settings import from_environment

    settings = from_environment()
    line = os.environ.get("UNIMESH_ORDER", "").encode() or sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line)
    run(settings, order["assignment"], order["agent"], line.decode(), torch.set_num_threads)


def run(settings: Any, assignment: dict[str, str], agent: str, order: str, set_threads: Callable[[int], None]) -> None:
    """Until `stop`, SIGTERM, or a newer trainer."""
    from shared.config.settings import child_threads
    from shared.wire.client import connect
    from shared.wire.keys import JobKeys

    logs.about(job=assignment["job"], worker=agent)
    watch = Watch(limit_s=LOAD_S)
    if "RANK" not in os.environ:  # the agent's child; it starts the other ranks
        show_progress(watch.getting_on)
    client = connect(settings.redis_url)
    document = client.get(JobKeys(assignment["job"]).doc)
    doc = msgspec.msgpack.decode(document)
    set_threads(child_threads(doc, settings))
    ranks = int(doc["recipe"]["placement"]["trainer_ranks"])
    others = Others(ranks, order) if ranks > 1 and "RANK" not in os.environ else None
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    tells: list[Callable[[str], None]] = []

    def tell(text: str) -> None:
        """The job's failure, if this rank has a line to the controller."""
        for one in tells:
            one(text)

    if others is not None:
        others.fail = tell
    try:
        trainer = build(settings, assignment, agent, document, client, stopping, tells)
        trainer.tick = trainer.stack.tick = watch.tick
        gc.collect()
        gc.freeze()  # libraries and model: no collection need walk them again
        trainer.start()
        watch.limit_s = QUIET_S
        trainer.run()
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as error:
        if ranks > 1 and lost_rank(error):
            log.error("another rank is gone, or slower than UNIMESH_RANKS_TIMEOUT_S: %s", error)
            time.sleep(GONE_S)  # whoever watches the ranks knows more
            raise SystemExit(LOST) from error
        log.exception("training failed")
        said = f"{type(error).__name__}: {error}"
        tell(said)
        ranks_said(said)
        raise SystemExit(FAILED) from error
    trainer.world.close()
    if others is not None:
        others.wait()


def build(
    settings: Any, assignment: dict[str, str], agent: str, document: bytes, client: Any, stopping: Any, tells: list[Any]
) -> Any:
    """The trainer of this rank, its model loaded. Rank 0 adds to `tells` how the job's failure is told."""
    from services.trainer.algorithms import ALGORITHMS
    from services.trainer.backend import Backend
    from services.trainer.base_stack import Stack
    from services.trainer.checkpoint import Saver
    from services.trainer.flow_stack import FlowStack
    from services.trainer.forward_stack import ForwardStack
    from services.trainer.link import Link
    from services.trainer.loop import Trainer
    from services.trainer.picture_stack import PictureStack
    from services.trainer.preread import Preread
    from services.trainer.publisher import Publisher
    from services.trainer.stack import TrainStack
    from services.trainer.world import World
    from shared.agent.registry import Assignment
    from shared.config import specs
    from shared.config.sections import Component, MediaModel, Model, Placement, Train, Weights
    from shared.models.ar.bundle import copy_side_files, placed
    from shared.models.diffusion.bundle import encoders
    from shared.weights.store import WeightStore
    from shared.wire.bodies import BodyStore, open_bodies
    from shared.wire.client import connect
    from shared.wire.codec import pack, unpack
    from shared.wire.keys import JobKeys

    doc = msgspec.msgpack.decode(document)
    job, recipe, plan = assignment["job"], doc["recipe"], doc["plan"]
    track = plan["tracks"][0]
    world, keys = World(), JobKeys(job)
    link, files = None, open_bodies(settings.bodies, job)
    if world.first:
        bodies = BodyStore(client, keys, files)
        streams = [keys.stage(f"reward.{name}") for name in plan["scorers"][:1]]
        preread = [Preread(lambda: connect(settings.redis_url), stream, bodies, world.size == 1) for stream in streams]
        link = Link(client, keys, bodies, agent, pack(Assignment(**assignment)), *preread)  # type: ignore[arg-type]
        tells.append(functools.partial(_give_up, link))
    start = client.hmget(keys.meta, "incarnation", "base") if world.first else ()
    incarnation, base = unpack(
        world.share(pack((int(start[0]), (start[1] or b"").decode())) if start else None), tuple[int, str]
    )
    media = "family" in recipe["model"]
    what: Any = MediaModel if media else Model
    section, model = Train.model_validate(recipe["train"]), what.model_validate(recipe["model"])
    try:
        named = Component(name=recipe["algorithm"]["name"], params=recipe["algorithm"]["params"])
        make = specs.implementation("algorithm", named.name, ALGORITHMS)
        algorithm = make(specs.check("algorithm", named.name, named.params, "algorithm"))
        bundle, adapter = _model(doc, model, recipe["seed"], named.name, section.replay)
        placement = Placement.model_validate(recipe["placement"])
        backend = Backend(
            bundle, world, model.dtype, placement, section.activation_checkpointing, section.gradient_sync == "last"
        )
        reference = _reference(doc, model, algorithm, section.replay)
        total = section.updates(plan["steps"])
        stack: Stack
        if media:
            teachers = {domain: placed(_frozen(model, place)).model for domain, place in _teachers(doc).items()}
            frozen = (reference and reference.model, recipe["seed"], teachers)
            how: Any = (backend, bundle.family, algorithm, section, world, total, *frozen)
            if not plan["route"]:
                stack = PictureStack(encoders(Path(doc["files"]), bundle), *how)
            else:
                stack = (ForwardStack if algorithm.requires_ema_rollout else FlowStack)(*how)
        else:
            temperature = recipe["rollout"]["sampling"]["temperature"] if plan["route"] else 1.0
            stack = TrainStack(backend, algorithm, section, world, total, temperature, reference, recipe["seed"])
        sampler = _sampler(doc, bundle, stack, world, track, agent) if plan["live"] else None
    except (ValueError, OSError, AttributeError, RuntimeError) as error:
        if lost_rank(error):
            raise
        raise ValueError(f"the model cannot be loaded: {error}") from error
    store = WeightStore(settings.weights(job), track)
    if link is not None:
        if media:
            store.note_pipeline(Path(doc["files"]))
        else:
            copy_side_files(Path(doc["files"]), store.files)
    keep = Weights.model_validate(recipe["weights"]).keep
    replace = plan["need"] == "at_least"
    source = "live" if section.ema is None else "ema"
    tell: Any = (lambda event: None,) if link is None else (link.report, link.announce, link.timed, link.warn)
    about = {"adapter": adapter, "source": source, "rank": world.rank, "ranks": 1 if adapter is not None else world.size}
    publisher = Publisher(store, incarnation, keep, replace, *tell, **about)
    kept = section.keep_checkpoints, section.keep_checkpoints_every
    say = link.warn if link is not None else log.warning
    messages = None
    if sampler is not None and world.first:
        messages = _messages(settings, doc, keys, sampler, incarnation)
    return Trainer(
        track=track,
        sampler=sampler,
        messages=messages,
        stack=stack,
        backend=backend,
        world=world,
        saver=Saver(settings.checkpoints(job), world, *kept, section.checkpoint_in_background, say),
        incarnation=incarnation,
        link=link,
        publisher=publisher,
        stopping=stopping.is_set,
        base=base,
        document=document,
        files=files,
    )


def _sampler(doc: Any, bundle: Any, stack: Any, world: Any, track: str, agent: str) -> Any:
    """Of a trainer that rolls out by itself, on each rank."""
    from services.trainer.sampler import Sampler
    from shared.config import specs
    from shared.engines import LIVE
    from shared.models.ar import packed

    named, attention = doc["recipe"]["rollout"]["engine"], doc["recipe"]["model"].get("attention", "sdpa")
    params = specs.check("engine", named["name"], named["params"], "rollout.engine")
    engine = LIVE[named["name"]](Path(doc["files"]), params, bundle)

    @contextlib.contextmanager
    def ready() -> Iterator[None]:
        with stack.averaged(), stack.backend.whole(), packed.padded(bundle.model, attention), stack.backend.computing():
            yield

    return Sampler(engine, world, ready, track, agent)


def _messages(settings: Any, doc: Any, keys: Any, sampler: Any, incarnation: int) -> Any:
    """Rank 0's line to what is to be rolled out; nothing comes yet."""
    from services.trainer.sampler import Messages
    from shared.wire.bodies import BodyStore, open_bodies
    from shared.wire.client import connect
    from shared.wire.consumer import Consumer, Policy
    from shared.wire.hops import eval_stage

    store = BodyStore(connect(settings.redis_url), keys, open_bodies(settings.bodies, keys.job))
    section, lease, stage = doc["recipe"]["rollout"], settings.lease_s, f"rollout.{sampler.track}"
    policy = Policy(lease, lease / 5, stall_s=section["stall_s"], deadline_s=section["deadline_s"])

    def serve(handler: Any) -> Consumer:
        return Consumer(lambda: connect(settings.redis_url), keys, stage, handler, store, policy, aside=[eval_stage(stage)])

    return Messages(sampler, store, incarnation, serve)


def _model(doc: Any, model: Any, seed: int, algorithm: str, mode: str) -> tuple[Any, Any]:
    """The bundle that is trained, and what its versions say if they hold an adapter alone."""
    from services.trainer.publisher import Adapted
    from shared.config import specs
    from shared.models import lora
    from shared.models.ar import packed
    from shared.models.ar.bundle import add_critic

    files, weights = Path(doc["files"]), Path(doc["weights"]) if doc["weights"] else None
    bundle, adapter = _loaded(model, files, weights), None
    if model.lora is not None:
        base, modules = weights or files, lora.inject(bundle.model, model.lora, seed)
        adapter = Adapted(str(base), lora.config_text(model.lora, base, modules))
    if specs.find("algorithm", algorithm, "algorithm").flags.get("requires_critic"):
        add_critic(bundle)
    if mode == "packed":
        packed.enable(bundle.model)
    return bundle, adapter


def _loaded(model: Any, files: Path, weights: Path | None) -> Any:
    """The bundle of a language model, or the trained part of one that makes pictures."""
    from shared.config.sections import MediaModel
    from shared.models.ar.bundle import load
    from shared.models.diffusion import family
    from shared.models.diffusion.bundle import load_trained

    if isinstance(model, MediaModel):
        return load_trained(files, family(model.family), weights)
    return load(files, weights, model.dtype, model.attention)


def _reference(doc: Any, model: Any, algorithm: Any, mode: str) -> Any:
    """The frozen model beside the trained one; None where none is needed, or where it is that model without its adapters."""
    from shared.models.ar import packed
    from shared.models.ar.bundle import placed

    given = (doc.get("frozen") or {}).get("algorithm.reference")
    if not algorithm.needs_reference or _teachers(doc) or (model.lora is not None and given is None):
        return None
    bundle = _frozen(model, given or (doc["files"], doc["weights"]))
    if mode == "packed":
        packed.enable(bundle.model)
    return placed(bundle)


def _teachers(doc: Any) -> dict[str, Any]:
    """Domain → folders of its teacher."""
    known = "algorithm.params.teachers."
    return {field.removeprefix(known): place for field, place in (doc.get("frozen") or {}).items() if field.startswith(known)}


def _frozen(model: Any, place: Any) -> Any:
    files, weights = place
    bundle = _loaded(model, Path(files), Path(weights) if weights else None)
    bundle.model.requires_grad_(False)
    return bundle


def _give_up(link: Any, error: str) -> None:
    from shared.wire.envelope import Failure

    link.report(Failure(origin="trainer", error=error, fatal=True))


if __name__ == "__main__":
    main()
