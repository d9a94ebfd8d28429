"""The sections of a recipe as every domain shares them. Services read the same models from the job's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Component(Section):
    """A component by name with its own parameters (see `unimesh recipes`)."""

    name: str
    params: dict[str, Any] = {}


class Lora(Section):
    """Adapters are trained in place of the model's own weights; versions hold them alone."""

    rank: int = Field(..., ge=1)
    alpha: float = Field(..., gt=0)
    """The adapter is scaled by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Linear modules by the ends of their names."""
    prefix: str = ""
    """Only modules below this one."""

    @pydantic.model_validator(mode="after")
    def _whole(self) -> Lora:
        if self.targets == ():
            raise ValueError("targets () names no module: leave it out for all linear ones")
        if self.prefix and not isinstance(self.targets, tuple):
            raise ValueError("a prefix goes with a list of targets")
        if self.prefix and not self.prefix.strip("."):
            raise ValueError(f"prefix {self.prefix!r} names no module")
        return self


class Model(Section):
    path: str
    """A model folder below the configured roots, or `job:ID`: the newest complete version of another job."""
    track: str = "policy"
    """Of `job:ID`: which of its tracks."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    attention: Literal["sdpa", "eager"] = "sdpa"
    lora: Lora | None = None
    """None: all weights are trained."""


class MediaModel(Model):
    """A folder of a diffusers pipeline (model_index.json)."""

    family: str
    """See `unimesh recipes`: sd3, qwen_image, wan21 …"""


class Data(Section):
    source: Component
    batch_size: int = Field(..., ge=1)
    """Prompts (groups) a step; records for sft."""
    chat: bool = False
    """Render prompts with the model's chat template; otherwise they are taken as they are."""
    system: str | None = None
    """System message put before the prompt (chat only)."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """None: what the model's context leaves beside the completion."""
    on_long: Literal["refuse", "drop", "truncate_left", "truncate_right"] = "refuse"
    """A prompt that is longer: an error at submission; or its group ends as dead and is counted; or it loses tokens."""
    tail: Literal["wrap", "drop", "pad"] = "wrap"
    """Where an epoch is no multiple of the batch: batches run on into the next epoch; the rest is left out; or the epoch is
    filled up with its first records."""


class SftData(Data):
    learn: Literal["all", "last"] = "all"
    """Of a conversation: every turn of the assistant, or the last one, which must end it."""
    max_tokens: int | None = Field(None, ge=2)
    """Prompt and target together; None: the model's context. `on_long` says what becomes of longer ones: truncate_left cuts the
    prompt's beginning, truncate_right the target's end."""


class Sampling(Section):
    max_new_tokens: int = Field(..., ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)


class Rollout(Section):
    engine: Component = Component(name="transformers")
    group_size: int = Field(..., ge=1)
    slice: int | None = Field(None, ge=1)
    """Siblings a message; None: the whole group."""
    sampling: Sampling
    stall_s: float = Field(120.0, gt=0)
    """Without a token for so long the message goes to another worker."""
    deadline_s: float = Field(3600.0, gt=0)
    """Longest time a message may be in one worker's hands."""


class Scorer(Component):
    weight: float = 1.0
    timeout_s: float = Field(30.0, gt=0)
    """Longest time for the rows of one message; then they have failed."""


class Reward(Section):
    scorers: dict[str, Scorer] = Field(..., min_length=1)
    """By component name as it appears in the metrics; each has a stream of its own."""
    aggregation: Literal["weighted_sum", "mean", "min", "max"] = "weighted_sum"
    normalize_weights: bool = True
    truncation: Literal["keep", "zero", "soft"] = "keep"
    overlong_buffer: int = Field(4096, ge=1)
    overlong_factor: float = 1.0
    on_failed: Literal["exclude", "drop_group", "abort"] = "exclude"
    propagate: Literal["mean", "max", "sum"] = "mean"


class Advantage(Section):
    normalize: bool = True
    eps: float = Field(1e-8, ge=0)
    scope: Literal["group", "global"] = "group"
    use_global_std: bool = False
    estimator: Literal["group", "rloo", "reinforce_pp"] = "group"
    """rloo: less the mean of the others; reinforce_pp: less the group's mean, whitened over the batch. Others as in GRPO."""

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> Advantage:
        if self.estimator != "group" and (self.scope != "group" or self.use_global_std or not self.normalize):
            raise ValueError(f"estimator {self.estimator} has its own way: leave scope, normalize and use_global_std out")
        return self


class Algorithm(Component):
    advantage: Advantage = Advantage()
    reference: str | None = None
    """The frozen model of a KL penalty, or the teacher: a model folder or `job:ID`. None: the model that training starts from,
    with adapters the model without them."""


class Schedule(Section):
    """How far rollout may run ahead, and when weights and checkpoints are due."""

    max_staleness: int = Field(0, ge=0)
    """Batches; 0 is synchronous."""
    max_inflight: int | None = Field(None, ge=1)
    """Groups; None: (max_staleness + 1) × batch_size."""
    weight_sync_interval: int = Field(1, ge=1)
    """Batches between publishes."""
    max_reissues: int = Field(3, ge=0)
    per_worker_inflight: int | None = Field(None, ge=1)
    """Groups that one rollout worker has in hand; None: as many as its engine takes, whatever others lack."""
    version_mixing: Literal["allow", "never"] = "allow"
    """never: all groups of a batch, also those issued again, are of one version, which is kept until the batch has formed."""
    on_stale: Literal["drop_and_reissue", "wait"] = "drop_and_reissue"
    """wait: no batch forms that would make a group in flight too old; nothing is dropped, and the trainer may stand idle."""
    interrupt: Literal["drain", "keep"] = "drain"
    """When a rollout worker gets a new version, or has to stop. drain: it finishes what it has. keep: what it has goes on with
    the new version from the next token on, each token's own version noted, or goes to another worker as far as it is."""
    eval_share: float = Field(0.5, gt=0, le=1)
    """Of a track's rollout workers, how many evaluate at once while there is something to roll out for training; at least one.
    Without a staleness budget training waits for evaluations anyway, so all do."""
    filter: Literal["none", "zero_variance"] = "none"
    """zero_variance: a group of equal rewards teaches nothing; it is dropped, and the next prompt comes in its place."""
    max_backfill: int | None = Field(None, ge=0)
    """Most groups that the filter replaces for one batch, then it lets all pass; None: batch_size."""
    oversample: float = Field(1.0, ge=1, le=16)
    """So many times the groups are issued; those left over when a batch has formed are dropped, the slowest first."""
    group_deadline_s: float | None = Field(None, gt=0)
    """A group that is not complete by then is dropped and issued again; None: its workers' deadlines alone count."""


class Optimizer(Section):
    lr: float = Field(..., gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine", "linear_warmup"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Floor of linear and cosine decay, as a share of lr."""
    grad_clip: float = Field(1.0, gt=0)
    group_lrs: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Learning rates of parameters by a part of their names; the first that fits counts."""

    def check_total(self, total: int) -> None:
        """ValueError unless the decaying schedules have steps left after their warm-up."""
        if self.schedule in ("linear", "cosine") and not 0 <= self.warmup_steps < total:
            raise ValueError(f"warmup_steps {self.warmup_steps} of {total} optimizer steps: must be less")


class Ema(Section):
    """A moving average of what is trained, published in its place."""

    schedule: Literal["full", "constant", "linear", "warmup"] = "full"
    decay: float = Field(0.9999, ge=0, lt=1)
    """full: its limit; constant: itself."""
    flat_steps: int = Field(0, ge=0)
    uprate: float = Field(0.001, ge=0)
    uphold: float = Field(0.5, ge=0, lt=1)
    timing: Literal["optimizer_step", "rollout_end"] = "optimizer_step"
    """After each optimizer step, or once after a batch's last."""


class Train(Section):
    optimizer: Optimizer
    num_updates_per_batch: int = Field(1, ge=1)
    accumulate_rollouts: int = Field(1, ge=1)
    """Batches whose gradients make one update: each is a mean of its own, and all have one weight."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Sequences a forward pass and rank; None: a mini-batch at once, or as many as micro_batch_tokens allows."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens a forward pass and rank, prompts included, in place of a number of sequences; not less than the longest
    sequence has."""
    micro_batch_cost: Literal["dense", "sum"] = "sum"
    """What is counted: the padded tensor, or the tokens alone (right for packed replay)."""
    replay: Literal["padded", "packed"] = "padded"
    """packed: the sequences of a micro-batch stand in one row, without padding and without attention across them."""
    steps_at_once: bool = False
    """Pictures: the steps of a micro-batch that drew are scored in one forward pass, which takes so many times the memory."""
    activation_checkpointing: bool = False
    """Activations of the model's blocks are computed again in the backward pass: less memory, about a third more work."""
    ema: Ema | None = None
    gradient_sync: Literal["last", "every"] = "last"
    """When ranks add up an update's gradients: after its last micro-batch (until then each rank holds whole gradients of what
    is trained), or after every one (each holds its shard alone)."""
    shuffle_updates: bool = False
    """With several updates a batch: rows in a new order each time, by the job's seed and the step. Not by tokens."""

    @pydantic.model_validator(mode="after")
    def _one_planner(self) -> Train:
        if self.micro_batch_tokens is not None and self.micro_batch_size is not None:
            raise ValueError("micro_batch_tokens and micro_batch_size: give one of them")
        if self.micro_batch_tokens is not None and self.shuffle_updates:
            raise ValueError("shuffle_updates: not with micro_batch_tokens, which orders rows by length")
        if self.accumulate_rollouts > 1 and self.num_updates_per_batch > 1:
            raise ValueError("accumulate_rollouts and num_updates_per_batch: give one of them")
        return self

    def updates(self, steps: int) -> int:
        """Of the optimizer, in so many steps."""
        return steps * self.num_updates_per_batch // self.accumulate_rollouts

    checkpoint_every: int = Field(0, ge=0)
    """Steps; 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest ones."""
    keep_checkpoints_every: int = Field(0, ge=0)
    """Steps: checkpoints of their multiples stay for ever; 0: none."""
    checkpoint_in_background: bool = True
    """Training goes on while one is written; costs a copy of what is written in host memory either way."""
    log_budget_mb: float = Field(1024.0, gt=0)
    """Retained bodies of the train log: at 70 % a checkpoint is made, at 100 % admission waits."""


class Weights(Section):
    keep: int = Field(2, ge=1)
    """Complete versions kept besides those in use."""


class Placement(Section):
    layout: Literal["separate", "colocate", "trainside"] = "separate"
    rollout: int | None = Field(None, ge=1)
    """Rollout workers for the job; None: its fair share of all that there are."""
    priority: int = Field(0, ge=-100, le=100)
    """Jobs of a higher one get free agents first; one that has not started gains one for every ten minutes that it waits."""
    trainer_ranks: int = Field(1, ge=1)
    sharding: Literal["full", "hybrid", "no_shard"] = "full"
    """How ranks hold the trained model: shards of one copy; a copy for each `shard_ranks` of them; a copy each."""
    shard_ranks: int | None = Field(None, ge=2)
    """hybrid: ranks that share a copy; None: those of half the world."""
    cpu_offload: bool = False
    """Trained parameters, their gradients and the optimizer's state stay in host memory; layers visit the device to compute."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each child; None: what the host's supervisor planned."""

    @pydantic.model_validator(mode="after")
    def _shards(self) -> Placement:
        if self.shard_ranks is not None and self.sharding != "hybrid":
            raise ValueError(f"shard_ranks {self.shard_ranks}: goes with sharding hybrid")
        if self.sharding == "hybrid":
            if self.trainer_ranks < 4 or self.trainer_ranks % 2:
                raise ValueError(f"sharding hybrid: trainer_ranks {self.trainer_ranks} must be 4 or more, and even")
            if self.shard_ranks is not None and (
                self.trainer_ranks % self.shard_ranks or self.shard_ranks == self.trainer_ranks
            ):
                legal = [n for n in range(2, self.trainer_ranks) if self.trainer_ranks % n == 0]
                raise ValueError(f"shard_ranks {self.shard_ranks}: must be a part of trainer_ranks, such as {legal}")
        return self

    def mesh(self) -> tuple[int, int]:
        """(copies, ranks that share one)."""
        if self.sharding == "full":
            return 1, self.trainer_ranks
        shared = 1 if self.sharding == "no_shard" else self.shard_ranks or self.trainer_ranks // 2
        return self.trainer_ranks // shared, shared


class Suite(Section):
    """One evaluation suite. Its prompts are the first of its own source."""

    source: Component
    size: int = Field(..., ge=1)
    """Prompts."""
    reward: Reward | None = None
    """None: scored as in training."""
    at: tuple[Literal["start", "end"], ...] = ("start", "end")
    every: int = Field(0, ge=0)
    """Steps; 0: not in between."""
    sampling: Sampling | None = None
    """None: greedy, with the rollout's max_new_tokens."""
    n: int = Field(1, ge=1)
    """Samples for each prompt; pass@k is reported for k = 1, 2, 4 … n."""
    solved: float = 1.0
    """Reward from which on a sample has solved its prompt."""


def _empty(value: Any) -> Any:
    return {} if value is None else value


Suites = Annotated[dict[str, Suite], pydantic.BeforeValidator(_empty)]
"""By name; null means none."""


def _by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Logging(Section):
    trackers: tuple[Annotated[Component, pydantic.BeforeValidator(_by_name)], ...] = ()
    """Besides the JSON lines that are always written: names, or names with parameters."""
    previews: int = Field(3, ge=0, le=64)
    """Evaluation samples kept with their text."""
    texts: int = Field(4, ge=0)
    """Groups of each step whose text is kept for people."""
    keep_steps: int = Field(1000, ge=1)
    """Steps whose samples are kept for people."""


class Recipe(Section):
    """What all domains have. Each domain's own model beside its lifecycle adds its sections."""

    domain: str
    name: str = Field("", max_length=200)
    seed: int = Field(0, ge=0)
    steps: int = Field(..., ge=1)
    deterministic: bool = False
    model: Model
    data: Data
    train: Train
    weights: Weights = Weights()
    placement: Placement = Placement()
    logging: Logging = Logging()


class RolloutRecipe(Recipe):
    """What domains with one rolled-out track add."""

    rollout: Rollout
    reward: Reward
    algorithm: Algorithm
    schedule: Schedule = Schedule()
    eval: Suites = Field({})


def scorer_name(suite: str, name: str) -> str:
    """What a scorer of a suite's own is called among the job's streams."""
    return f"{suite}.{name}"


def scorer_place(name: str) -> str:
    """Where a scorer stands in the recipe, by what it is called among the streams."""
    suite, _, own = name.rpartition(".")
    return f"eval.{suite}.reward.scorers.{own}" if suite else f"reward.scorers.{own}"


def scorers_of(recipe: Mapping[str, Any]) -> dict[str, Scorer]:
    """Every scorer stream of a job, by name, from its plain recipe: those of training, and those of suites of their own."""
    sections = [("", recipe.get("reward"))]
    sections += [(name, suite.get("reward")) for name, suite in (recipe.get("eval") or {}).items()]
    return {
        scorer_name(suite, name) if suite else name: scorer
        for suite, section in sections
        if section is not None
        for name, scorer in Reward.model_validate(section).scorers.items()
    }


class LossSuite(Section):
    """Records that are held out: the loss of their targets is measured, over all of them, at one version."""

    source: Component
    size: int | None = Field(None, ge=1)
    """Records; None: all that the source has."""
    at: tuple[Literal["start", "end"], ...] = ("start", "end")
    every: int = Field(0, ge=0)
    """Steps; 0: not in between."""
    batch_size: int = Field(64, ge=1)
    """Records measured at once; the last batch may have fewer, and counts for as many."""


class SftRecipe(Recipe):
    data: SftData
    algorithm: Component = Component(name="cross_entropy")
    eval: Annotated[dict[str, LossSuite], pydantic.BeforeValidator(_empty)] = {}
