"""The job store: a submission is checked in full before anything is written, and written in one step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import redis

from services.controller import lifecycles, trackers
from services.controller.data.encoder import encoder_of
from services.controller.data.intake import BadPrompt, Intake, MediaIntake, TooLong, check_taught
from services.controller.data.order import DataOrder
from services.controller.data.record import Source
from services.controller.data.sources import open_source
from services.controller.lifecycles.diffusion import check_picture, check_size, sigmas_of, unguided
from services.controller.lifecycles.state import Phase, Plan, Root
from services.controller.models import adapted, fingerprint, frozen_of
from shared.config import specs
from shared.config.problems import BadInput, Problem, bad
from shared.config.sections import Component, LossSuite, MediaModel, Recipe, Sampling, Suite, scorer_place, scorers_of
from shared.config.settings import Settings
from shared.types.params import ARSamplingParams, DiffusionSamplingParams, SamplingParams
from shared.weights.locate import ModelFiles, locate
from shared.wire.codec import pack, unpack
from shared.wire.envelope import ENDED
from shared.wire.hops import meta_fields
from shared.wire.keys import JOBS, NAMES, JobKeys, idempotency

CHECKED_RECORDS = 256
"""Prompts tokenized before a job is accepted; the rest is checked when it is drawn."""


class JobDoc(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is. Never changes."""

    id: str
    created: float
    recipe: dict[str, Any]
    """Plain document, defaults filled in."""
    plan: Plan
    files: str
    """Folder of config and tokenizer."""
    weights: str | None
    """Folder of the weights version that it starts from; None: they stand in `files`."""
    warnings: tuple[str, ...] = ()
    frozen: dict[str, tuple[str, str | None]] = {}
    """Folders, as `files` and `weights`, of the frozen models that the recipe names, by the field that does."""
    fingerprints: dict[str, str] = {}
    """Of the model and the data sources by field, as they were at submission."""


LOOKED_AT = 64
"""Records whose length is measured."""


@dataclass(frozen=True)
class DataSet:
    """A source, its order, and the tokenizer in front of it."""

    source: Source
    order: DataOrder
    intake: Any
    """Intake, or MediaIntake."""


@dataclass(frozen=True)
class Job:
    """A job as its runner holds it: the document and the open sources."""

    doc: JobDoc
    recipe: Any
    train: DataSet
    params: SamplingParams | None
    """None when nothing is rolled out."""
    suites: dict[str, tuple[DataSet, SamplingParams | None]]
    """Evaluations: their data and sampling; None where the loss of targets is measured."""

    @property
    def keys(self) -> JobKeys:
        return JobKeys(self.doc.id)

    @property
    def windowed(self) -> bool:
        """Whether the steps that draw change from batch to batch."""
        media = isinstance(self.params, DiffusionSamplingParams)
        sampling = self.recipe.rollout.sampling
        return media and sampling.sde_window is not None and sampling.eta > 0


def prepare(document: Any, settings: Settings) -> Job:
    """Checks everything that can be checked without a GPU: names, values, files, data, prompts. BadInput otherwise."""
    recipe, plan = lifecycles.parse(document)
    if plan.domain not in lifecycles.RUNNABLE:
        raise bad("domain", plan.domain, "its engines are not there yet", ", ".join(lifecycles.RUNNABLE))
    for place, tracker in enumerate(recipe.logging.trackers):
        trackers.check(tracker.name, tracker.params, f"logging.trackers.{place}")
    for name, scorer in scorers_of(recipe.model_dump(mode="json")).items():
        settings.check_urls(scorer.params, f"{scorer_place(name)}.params")
    files = locate(recipe.model, settings)
    adapted(recipe.model, files)
    doc = JobDoc(
        id=uuid4().hex[:12],
        created=time.time(),
        recipe=recipe.model_dump(mode="json"),
        plan=plan,
        files=str(files.files),
        weights=str(files.weights) if files.weights else None,
        frozen=frozen_of(recipe, files, settings),
    )
    job = open_job(doc, settings)
    _check_budget(job)
    sizes = {name: suite.size or job.suites[name][0].source.size or 0 for name, suite in plan.suites.items()}
    suites = {name: msgspec.structs.replace(suite, size=sizes[name]) for name, suite in plan.suites.items()}
    plan = msgspec.structs.replace(plan, suites=suites)
    warnings = tuple(_warnings(plan, job))
    doc = msgspec.structs.replace(doc, plan=plan, warnings=warnings, fingerprints=_fingerprints(job))
    return replace(job, doc=doc)


def open_job(doc: JobDoc, settings: Settings) -> Job:
    """The job's sources and tokenizers."""
    recipe, plan = lifecycles.parse(doc.recipe)
    files = ModelFiles.of(doc.files, doc.weights)
    media = isinstance(recipe.model, MediaModel)
    intake: Any
    if media:
        (check_size if plan.route else check_picture)(recipe, files.files)
        facts = specs.find("family", recipe.model.family, "model.family").flags
        encoder = encoder_of(files.files, facts["text"])
        intake = MediaIntake(files.files, recipe.data, settings.allowed, facts["pictured"], encoder)
    else:
        intake = Intake(files.files, recipe.data, recipe.rollout.sampling.max_new_tokens if plan.route else 1)
    train = _data_set(recipe, recipe.data.source, "data.source", intake, settings)
    params: SamplingParams | None = None
    if plan.route:
        params = media_params(recipe, files.files) if media else _params(recipe.rollout.sampling, recipe.seed, intake)
    suites = {name: _suite(recipe, name, suite, intake, settings) for name, suite in recipe.eval.items()}
    size = train.source.size
    if size is not None and plan.batch_size > size:
        raise bad("data.batch_size", plan.batch_size, "larger than the data", f"1 to {size}")
    job = Job(doc, recipe, train, params, suites)
    found = _fingerprints(job) if doc.fingerprints else {}
    for field, known in doc.fingerprints.items():
        if found[field] != known:
            what = "data" if field.endswith("source") else "model"
            raise bad(
                field, None, f"the {what} is not what the job began with", "the same files; or start a new job with these"
            )
    return job


def _fingerprints(job: Job) -> dict[str, str]:
    evaluated = {f"eval.{name}.source": data.source.fingerprint for name, (data, _) in job.suites.items()}
    files = ModelFiles.of(job.doc.files, job.doc.weights)
    found = {"data.source": job.train.source.fingerprint, "model.path": fingerprint(files)} | evaluated
    found |= {field: fingerprint(ModelFiles.of(*place)) for field, place in job.doc.frozen.items()}
    return found


def measured(train: DataSet, rolled: bool) -> list[int]:
    """Tokens of the first records: of the prompts, or where nothing is `rolled` out of prompt and target."""
    lengths = []
    for row in range(min(LOOKED_AT, train.source.size or LOOKED_AT)):
        try:
            record = train.source.get(row)
            lengths.append(len(train.intake.prompt(record).tokens) if rolled else len(train.intake.example(record)))
        except BadPrompt:
            continue  # dropped when it is drawn
    return lengths


def _check_budget(job: Job) -> None:
    """BadInput for a budget of tokens that a sequence of the data exceeds by itself."""
    budget, rolled = job.recipe.train.micro_batch_tokens, bool(job.doc.plan.route)
    if budget is None or isinstance(job.train.intake, MediaIntake) or not (known := measured(job.train, rolled)):
        return
    longest = max(known) + (job.recipe.rollout.sampling.max_new_tokens if rolled else 0)
    if budget < longest:
        why = f"a sequence may have {longest} tokens (of the first {len(known)} records)"
        raise bad("train.micro_batch_tokens", budget, why, f"at least {longest}")


def media_params(recipe: Any, folder: Path, suite: Any = None) -> DiffusionSamplingParams:
    """Sigmas are pinned here, once: every engine and the trainer take them from the request. `suite`: how an evaluation's
    pictures are made."""
    sampling, solver = recipe.rollout.sampling, "euler"
    if suite is not None:
        sampling, solver = suite.applied(sampling), suite.solver
    drawing = sampling.drawing(0) if sampling.eta > 0 else ()
    scale = unguided(recipe) if sampling.guidance_scale is None else sampling.guidance_scale
    given = sampling.model_dump(exclude={"shift", "sde_window", "sigma_grid"}) | {
        "sde_indices": drawing,
        "guidance_scale": scale,
    }
    return DiffusionSamplingParams(
        **given,
        sigmas=sigmas_of(recipe, folder, sampling),
        seed=recipe.seed,
        solver=solver,  # type: ignore[arg-type]
    )


def _params(sampling: Sampling, seed: int, intake: Intake) -> ARSamplingParams:
    return ARSamplingParams(**sampling.model_dump(), seed=seed, stop_token_ids=intake.stop_tokens)


def _suite(
    recipe: Any, name: str, suite: Suite | LossSuite, intake: Any, settings: Settings
) -> tuple[DataSet, SamplingParams | None]:
    """BadInput if its source is smaller than the suite, or has no end and the suite no size."""
    data = _data_set(recipe, suite.source, f"eval.{name}.source", intake, settings, shuffle=False)
    if suite.size is None and data.source.size is None:
        raise bad(f"eval.{name}.size", None, "the source never ends", "a number of records")
    if data.source.size is not None and suite.size is not None and suite.size > data.source.size:
        raise bad(f"eval.{name}.size", suite.size, "more records than the source has", f"at most {data.source.size}")
    if isinstance(suite, LossSuite):
        return data, None
    if isinstance(intake, MediaIntake):
        params = media_params(recipe, intake.files, suite.sampling)
        return data, msgspec.structs.replace(params, eta=0.0, sde_indices=(), noise_by_prompt=True)
    sampling = suite.sampling or recipe.rollout.sampling.model_copy(update={"temperature": 0.0})
    return data, _params(sampling, recipe.seed, intake)


def _data_set(
    recipe: Recipe, component: Component, at: str, intake: Any, settings: Settings, shuffle: bool | None = None
) -> DataSet:
    source = open_source(component, settings, at)
    mixed = source.shuffle if shuffle is None else shuffle
    tail = recipe.data.tail if at == "data.source" else "wrap"
    order = DataOrder(component.name, source.size, mixed, recipe.seed, recipe.data.batch_size, tail)
    _check_records(source, intake, at, recipe)
    return DataSet(source, order, intake)


def _check_records(source: Source, intake: Any, at: str, recipe: Recipe) -> None:
    """BadInput for the first prompts that cannot be used, each named."""
    problems: list[Problem] = []
    targets = recipe.domain == "sft"
    for row in range(min(source.size or 16, CHECKED_RECORDS)):
        try:
            record = source.get(row)
            if targets:
                intake.example(record)
            else:
                intake.prompt(record)
                if at == "data.source":
                    check_taught(recipe, record)
        except BadPrompt as error:
            if isinstance(error, TooLong) and intake.data.on_long == "drop":
                continue
            legal = f"1 to {intake.limit} tokens" if intake.limit else "at least 1 token"
            if isinstance(intake, MediaIntake):
                reference = "with a reference" if intake.pictured else "and no reference"
                legal = f"a text of 1 to {intake.encoder.limit} tokens {reference}"
            if targets:
                legal = "a target of at least 1 token that fits behind its prompt"
            problems.append(Problem(field=f"{at} record {row + 1}", message=str(error), legal=legal))
    if problems:
        raise BadInput(problems[:10])


def _warnings(plan: Plan, job: Job) -> list[str]:
    found = []
    algorithm = job.recipe.algorithm
    baseline = bool(specs.find("algorithm", algorithm.name, "").flags.get("requires_advantages"))
    if plan.route and plan.group_size == 1 and baseline and algorithm.advantage.scope == "group":
        found.append("rollout.group_size is 1: a group baseline makes every advantage 0, so nothing is learned")
    media = isinstance(job.recipe.model, MediaModel)
    averaged = plan.route and job.recipe.train.ema is not None
    wanted = specs.find("algorithm", algorithm.name, "").flags.get("requires_ema_rollout")
    if averaged and not wanted and not algorithm.params.get("correction"):
        remedy = "; leave it out" if media else "; consider algorithm.params.correction"
        found.append("train.ema: rollouts sample from the average, not from what is trained" + remedy)
    if isinstance(intake := job.train.intake, MediaIntake):
        cut = f"the text encoder reads {intake.encoder.limit} tokens of a prompt"
        if intake.encoder.tokenizer is None:
            found.append(f"{cut}, and its tokenizer cannot be read here: whether prompts are longer is not checked")
        elif intake.data.on_long == "truncate_right":
            found.append(f"data.on_long is truncate_right: {cut}, and the rest of longer ones is without effect")
    if plan.max_staleness > 1 and not algorithm.params.get("correction"):
        known = "algorithm.params.correction" if "correction" in _known(algorithm) else "a smaller schedule.max_staleness"
        found.append(f"schedule.max_staleness is {plan.max_staleness}, and nothing corrects for old rollouts; consider {known}")
    if plan.max_inflight < math.ceil((plan.max_staleness + 1) * plan.batch_size * plan.oversample) and plan.route:
        found.append("schedule.max_inflight is less than the staleness allows: rollouts will run ahead less than they may")
    size = job.train.source.size
    if size is not None and plan.steps * plan.batch_size > size:
        found.append(f"{plan.steps} steps of {plan.batch_size} draw {plan.steps * plan.batch_size / size:.1f} epochs")
    return found


def _known(algorithm: Any) -> dict[str, Any]:
    """All its parameters, also those that the recipe leaves out."""
    return dict(specs.check("algorithm", algorithm.name, algorithm.params, "algorithm").model_dump())


def create(client: Any, job: Job, idempotency_key: str | None = None) -> str:
    """Writes a prepared job; the id of an earlier submission with the same key wins. Safe to break off anywhere: it shows in
    the list last, and a repetition with the key finishes what another had begun. BadInput if a job that has not ended bears the
    same name: two could not be told apart, and trackers would mix their series.
    """
    doc, keys = job.doc, job.keys
    with client.pipeline(transaction=True) as pipe:
        pipe.set(keys.doc, pack(doc))
        pipe.hset(keys.meta, mapping=meta_fields(1, doc.plan.route, doc.plan.scorers, doc.plan.eval_scorers))
        pipe.execute()
    if idempotency_key is not None and not client.set(idempotency(idempotency_key), doc.id, nx=True, ex=86400):
        client.delete(keys.doc, keys.meta)
        first = client.get(idempotency(idempotency_key)).decode()
        if client.hexists(JOBS, first):
            return str(first)
        doc = load_doc(client, first) or doc
    try:
        enter(client, doc)
    except BadInput:
        names = JobKeys(doc.id)
        client.delete(names.doc, names.meta, *([] if idempotency_key is None else [idempotency(idempotency_key)]))
        raise
    return doc.id


def summary_of(doc: JobDoc, restored: int = 0) -> bytes:
    """Its entry in the list of jobs; `restored`: the incarnation that it was restored with, if it was."""
    facts = {"name": doc.recipe["name"], "domain": doc.plan.domain, "created": doc.created, "steps": doc.plan.steps}
    return pack(facts | ({"restored": restored} if restored else {}))


def enter(client: Any, doc: JobDoc) -> None:
    """Into the list of jobs, together with its name. BadInput if that is taken."""
    name, summary = doc.recipe["name"], summary_of(doc)
    while True:
        with client.pipeline() as pipe:
            pipe.watch(NAMES)
            holder = pipe.hget(NAMES, name) if name else None
            held = holder.decode() if holder is not None else doc.id
            if held != doc.id and phase_of(client, held) not in ENDED:
                legal = f"another name, or name= for none; or cancel job {held}"
                raise bad("name", name, "a job of this name has not ended", legal)
            pipe.multi()
            if name:
                pipe.hset(NAMES, name, doc.id)
            pipe.hsetnx(JOBS, doc.id, summary)
            try:
                pipe.execute()
                return
            except redis.WatchError:
                continue


def phases(client: Any, jobs: Sequence[str]) -> dict[str, Phase]:
    """The phase of each job, in one round trip."""
    with client.pipeline(transaction=False) as pipe:
        for job in jobs:
            pipe.hget(JobKeys(job).state, "snapshot")
        snapshots = pipe.execute()
    return {j: unpack(packed, Root).phase if packed else "starting" for j, packed in zip(jobs, snapshots, strict=True)}


def active(client: Any) -> list[str]:
    """Jobs that have not ended."""
    found = phases(client, [raw.decode() for raw in client.hkeys(JOBS)])
    return [job for job, phase in found.items() if phase not in ENDED]


def phase_of(client: Any, job: str) -> Phase:
    return phases(client, [job])[job]


def load_doc(client: Any, job: str) -> JobDoc | None:
    packed = client.get(JobKeys(job).doc)
    return None if packed is None else _decoded(packed)


@lru_cache(64)
def _decoded(packed: bytes) -> JobDoc:
    """Asked for again and again, and never changed."""
    return unpack(packed, JobDoc)
