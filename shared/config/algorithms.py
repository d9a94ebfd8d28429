"""Parameters and contracts of the algorithms. Formulas stand with the implementations (services/trainer/algorithms)."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Schedule = Literal["constant", "linear_decay", "cosine_decay"]


class Params(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Policy(Params):
    """What all policy losses can have."""

    aggregation: Aggregation = "token-mean"
    horizon: int = pydantic.Field(8192, ge=1)
    """Divisor of seq-mean-token-sum-norm, in tokens."""
    kl_coef: float = pydantic.Field(0.0, ge=0)
    """Weight of the KL to the reference: the frozen initial model, with LoRA the model without its adapter."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: bool = False
    """Report the policy's entropy; costs a pass over the logits."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    correction: Literal["token", "sequence"] | None = None
    """Truncated importance sampling for what the engine sampled otherwise than the trainer scores it."""
    correction_cap: float = pydantic.Field(2.0, gt=0)
    correction_mode: Literal["clamp", "mask"] = "clamp"
    """Beyond the cap: the weight is the cap, or 0."""


class Grpo(Policy):
    clip_range: float = pydantic.Field(1e-4, gt=0)
    clip_range_high: float | None = pydantic.Field(None, gt=0)
    clip_schedule: Schedule = "constant"
    dual_clip: float | None = pydantic.Field(None, gt=1)
    """Where the advantage is negative, token losses are at most this multiple of it."""


class Gspo(Policy):
    aggregation: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
    """Of the penalties; the loss has one term a sequence."""
    clip_range: float = pydantic.Field(3e-4, gt=0)
    clip_range_high: float | None = pydantic.Field(None, gt=0)
    clip_schedule: Schedule = "constant"


class Dppo(Policy):
    delta: float = pydantic.Field(0.15, gt=0)
    """Largest change of a token's probability that keeps its gradient."""


class Cppo(Dppo):
    delta: float = pydantic.Field(0.2, gt=0)
    least_weight: float = pydantic.Field(0.8, gt=0, le=1)
    delta_b: float = pydantic.Field(0.02, ge=0)


class Drpo(Policy):
    epsilon: float = pydantic.Field(12.5, gt=0)
    weighted: bool = True
    """The penalty is weighted by the old probability."""


class Ppo(Policy):
    clip_range: float = pydantic.Field(0.2, gt=0)
    clip_range_high: float | None = pydantic.Field(None, gt=0)
    clip_schedule: Schedule = "constant"
    cliprange_value: float = pydantic.Field(0.2, ge=0)
    vf_coef: float = pydantic.Field(0.5, ge=0)
    gamma: float = pydantic.Field(1.0, ge=0, le=1)
    lam: float = pydantic.Field(0.95, ge=0, le=1)
    normalize_advantages: bool = True
    """Over the tokens of the batch that count."""


class Distillation(Policy):
    """The teacher is the recipe's `algorithm.reference`."""

    clip_range: float = pydantic.Field(0.2, gt=0)
    kl_coef: Literal[0] = 0
    """The reference is the teacher: there is none besides."""


class CrossEntropy(Params):
    aggregation: Aggregation = "token-mean"
    horizon: int = pydantic.Field(8192, ge=1)


class Flow(Params):
    """What losses over the stochastic steps of a denoising policy can have."""

    beta: float = pydantic.Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL to the reference: the frozen initial model, with LoRA the model without its adapter."""


class FlowGrpo(Flow):
    clip_range: float = pydantic.Field(1e-4, gt=0)
    clip_schedule: Schedule = "constant"


class FlowUniGrpo(FlowGrpo):
    ratio_norm: bool = False
    grad_reweight: bool = False
    """Steps weigh as much as they move sigma; with `ratio_norm` only."""
    mse_weight: float = pydantic.Field(0.0, ge=0)
    """Weight of the squared distance of velocities to the reference's."""

    @pydantic.model_validator(mode="after")
    def _centred(self) -> FlowUniGrpo:
        if self.ratio_norm and (self.beta or self.clip_schedule != "constant"):
            raise ValueError("ratio_norm: its loss has neither beta nor clip_schedule; mse_weight is its penalty")
        return self


class FlowDppo(Flow):
    kl_mask_threshold: float = pydantic.Field(1e-5, ge=0)
    add_kl_coefficient: bool = True
    """The KL that masks has the step's own std; otherwise 1."""


class DiffusionNft(Params):
    beta: float = pydantic.Field(1.0, gt=0)
    adv_std_saturate: float = pydantic.Field(5.0, gt=0)
    """Advantages beyond it count as it."""
    use_adaptive_weight: bool = True
    training_timestep_fraction: float = pydantic.Field(0.99, gt=0, le=1)
    ref_deviation_coef: float = pydantic.Field(0.0, ge=0)


class DiffusionOpd(Params):
    teachers: dict[str, str] = pydantic.Field(..., min_length=1)
    """Domain → model folder or `job:ID` of its adapter."""
    guidance_scales: dict[str, float] = {}
    """Of teachers that have their own."""
    add_kl_coefficient: bool = False
    """The KL has the step's own std, which is why eta must then be above 0; otherwise 1."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> DiffusionOpd:
        unknown = sorted(self.guidance_scales.keys() - self.teachers.keys())
        if unknown:
            raise ValueError(f"guidance_scales names {unknown[0]!r}, which is no teacher: {', '.join(self.teachers)}")
        return self


class FlowMatching(Params):
    timestep_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    timestep_shift: float = pydantic.Field(1.0, gt=0)
    logit_mean: float = 0.0
    logit_std: float = pydantic.Field(1.0, gt=0)
    sigma_min: float = pydantic.Field(1e-4, gt=0, lt=0.5)


_POLICY: dict[str, Any] = {
    "requires_advantages": True,
    "supports_multi_update": True,
    "anchor_fields": ("anchor",),
    "recomputes_anchor": True,
    "requires_ema_rollout": False,
}

_FLOW = _POLICY | {"media": True}

TABLE: tuple[tuple[Any, str, type[Params], str, dict[str, Any]], ...] = (
    ("algorithm", "grpo", Grpo, "group-relative policy optimization", _POLICY),
    ("algorithm", "gspo", Gspo, "one clipped ratio a sequence", _POLICY),
    ("algorithm", "dppo", Dppo, "tokens masked by how far their probability moved", _POLICY),
    ("algorithm", "cppo", Cppo, "as dppo, with a budget for each sequence", _POLICY),
    ("algorithm", "drpo", Drpo, "a quadratic penalty on the ratio", _POLICY),
    (
        "algorithm",
        "ppo",
        Ppo,
        "a critic and advantages per token",
        _POLICY | {"requires_advantages": False, "anchor_fields": ("anchor", "values"), "requires_critic": True},
    ),
    (
        "algorithm",
        "distillation",
        Distillation,
        "on-policy distillation from a frozen teacher",
        _POLICY | {"requires_advantages": False, "requires_reference": True},
    ),
    ("algorithm", "flow_grpo", FlowGrpo, "GRPO over the steps of a flow-matching sampler", _FLOW),
    (
        "algorithm",
        "flow_dppo",
        FlowDppo,
        "steps masked by how far their transition moved",
        _FLOW | {"anchor_fields": ("anchor", "anchor_means")},
    ),
    (
        "algorithm",
        "flow_unigrpo",
        FlowUniGrpo,
        "flow_grpo with a centred ratio",
        _FLOW | {"anchor_fields": ("anchor", "anchor_means")},
    ),
    (
        "algorithm",
        "diffusion_nft",
        DiffusionNft,
        "reinforcement on the forward process: any sampler, no log-prob",
        _FLOW | {"anchor_fields": (), "recomputes_anchor": False, "requires_ema_rollout": True, "any_sampler": True},
    ),
    (
        "algorithm",
        "diffusion_opd",
        DiffusionOpd,
        "on-policy distillation from a teacher for each domain of prompts",
        _FLOW | {"requires_advantages": False, "anchor_fields": (), "recomputes_anchor": False, "requires_teachers": True},
    ),
    (
        "algorithm",
        "flow_matching",
        FlowMatching,
        "supervised fine-tuning of a model that makes pictures",
        _FLOW | {"requires_advantages": False, "anchor_fields": (), "recomputes_anchor": False, "supervised": True},
    ),
    (
        "algorithm",
        "cross_entropy",
        CrossEntropy,
        "supervised fine-tuning",
        {
            "requires_advantages": False,
            "supports_multi_update": True,
            "anchor_fields": (),
            "recomputes_anchor": False,
            "requires_ema_rollout": False,
            "supervised": True,
        },
    ),
)
