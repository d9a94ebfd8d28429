"""What the golden vectors leave out, by hand in float64: penalties, corrections, dual clip, distillation, other estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import ALGORITHMS
from services.trainer.algorithms.base import Micro, Tally
from shared.config import specs
from shared.config.problems import BadInput
from shared.types.advantages import group_advantages

LENGTHS = (3, 2)
NEW = np.array([-0.5, -1.2, -0.1, -2.0, -0.7])
ANCHOR = NEW + np.array([0.1, -0.3, 0.05, 0.4, -0.2])
ROLLOUT = ANCHOR - np.array([0.2, 0.9, -0.1, 0.3, 0.0])
REFERENCE = NEW + np.array([0.2, -0.4, 0.0, 0.6, -0.1])
ENTROPY = np.array([1.0, 0.5, 2.0, 0.1, 0.7])
MASK = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
ADVANTAGES = np.array([1.5, -2.0])


def micro(new: torch.Tensor) -> Micro:
    return Micro(
        new=new,
        anchor=torch.tensor(ANCHOR),
        rollout=torch.tensor(ROLLOUT),
        advantages=torch.tensor(ADVANTAGES),
        mask=torch.tensor(MASK),
        lengths=torch.tensor(LENGTHS),
        reference=torch.tensor(REFERENCE),
        entropy=torch.tensor(ENTROPY),
    )


def value_and_gradient(name: str, **params: Any) -> tuple[float, Any, dict[str, float]]:
    algorithm: Any = ALGORITHMS[name](specs.check("algorithm", name, params, "algorithm"))
    new, tally = torch.tensor(NEW, requires_grad=True), Tally()
    loss = algorithm.loss(micro(new), tally)
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad.numpy(), tally.figures()


def grpo(new: Any, weights: Any = 1.0, dual: float | None = None) -> Any:
    """Token losses of the vectors above, clip 0.2."""
    a, ratio = np.repeat(ADVANTAGES, LENGTHS), np.exp(new - ANCHOR)
    losses = np.maximum(-a * ratio, -a * ratio.clip(0.8, 1.2))
    if dual is not None:
        losses = np.where(a < 0, np.minimum(losses, -a * dual), losses)
    return losses * weights


def mean(tokens: Any) -> float:
    return float((tokens * MASK).sum() / MASK.sum())


def numeric(function: Any, at: Any = NEW) -> Any:
    """Central differences."""
    step = 1e-6
    moves = np.eye(len(at)) * step
    return np.array([(function(at + move) - function(at - move)) / (2 * step) for move in moves])


KL = {
    "k1": lambda new: new - REFERENCE,
    "k2": lambda new: 0.5 * (REFERENCE - new) ** 2,
    "k3": lambda new: np.exp(REFERENCE - new) - (REFERENCE - new) - 1,
}


@pytest.mark.parametrize("estimator", KL)
def test_kl_to_the_reference(estimator: str) -> None:
    found, gradient, figures = value_and_gradient("grpo", clip_range=0.2, kl_coef=0.3, kl_estimator=estimator)
    assert figures["kl_reference"] == pytest.approx(mean(KL[estimator](NEW)))

    def by_hand(new: Any) -> float:
        return mean(grpo(new) + 0.3 * KL[estimator](new))

    assert found == pytest.approx(by_hand(NEW))
    np.testing.assert_allclose(gradient, numeric(by_hand), atol=1e-6)


def test_entropy_bonus() -> None:
    found, _, figures = value_and_gradient("grpo", clip_range=0.2, entropy_coef=0.1)
    assert found == pytest.approx(mean(grpo(NEW) - 0.1 * ENTROPY)) and figures["entropy"] == pytest.approx(mean(ENTROPY))


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    found, gradient, figures = value_and_gradient("grpo", clip_range=0.2, dual_clip=1.05)
    assert found == pytest.approx(mean(grpo(NEW, dual=1.05))) and found < mean(grpo(NEW))
    np.testing.assert_allclose(gradient, numeric(lambda new: mean(grpo(new, dual=1.05))), atol=1e-6)
    assert 0 < figures["dual_clip_fraction"] < 1


@pytest.mark.parametrize("mode", ["clamp", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(level: str, mode: str) -> None:
    """A constant of the gradient: weights of the old policy over the engine's, beyond the cap clamped or left out."""
    cap = 1.3
    log_weight = (ANCHOR - ROLLOUT) * MASK
    if level == "sequence":
        log_weight = np.repeat([log_weight[:3].sum(), log_weight[3:].sum()], LENGTHS)
    weight = np.exp(log_weight)
    used = np.minimum(weight, cap) if mode == "clamp" else np.where(weight > cap, 0.0, weight)
    found, gradient, figures = value_and_gradient(
        "grpo", clip_range=0.2, correction=level, correction_mode=mode, correction_cap=cap
    )
    assert found == pytest.approx(mean(grpo(NEW, used)))
    np.testing.assert_allclose(gradient, numeric(lambda new: mean(grpo(new, used))), atol=1e-6)
    assert figures["correction"] == pytest.approx(mean(weight))
    assert figures["correction_beyond_cap"] == pytest.approx(mean(weight > cap)) and (weight > cap).any()


def test_distillation_pulls_to_its_teacher() -> None:
    """Each token's advantage is what the teacher has over the old policy; within the clip a step goes towards it."""
    a = REFERENCE - ANCHOR

    def by_hand(new: Any) -> float:
        ratio = np.exp(new - ANCHOR)
        return mean(np.maximum(-a * ratio, -a * ratio.clip(0.5, 1.5)))

    found, gradient, figures = value_and_gradient("distillation", clip_range=0.5)
    assert found == pytest.approx(by_hand(NEW)) and figures["teacher_kl"] == pytest.approx(mean(-a))
    np.testing.assert_allclose(gradient, numeric(by_hand), atol=1e-6)
    assert (np.sign(-gradient) == np.sign(a))[MASK > 0].all() and not gradient[MASK == 0].any()


def test_rloo_and_reinforce_pp() -> None:
    ids = [f"s:0:{row}/{i}" for row in range(2) for i in range(3)]
    rewards = np.array([1.0, 0.0, 0.5, 2.0, np.nan, 4.0], np.float32)
    rloo = group_advantages(ids, rewards, estimator="rloo")
    np.testing.assert_allclose(rloo, [1 - 0.25, 0 - 0.75, 0.5 - 0.5, 2 - 4, 0, 4 - 2], rtol=1e-6)
    centred = np.array([0.5, -0.5, 0.0, -1.0, 1.0])
    whitened = (centred - centred.mean()) / (centred.std() + 1e-8)
    plus = group_advantages(ids, rewards, estimator="reinforce_pp")
    np.testing.assert_allclose(plus, np.insert(whitened, 4, 0.0), rtol=1e-5)


def test_several_updates_are_refused_by_name_where_an_algorithm_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.controller.lifecycles.common import check_algorithm
    from shared.config.sections import Component

    known = dict(specs.registry())
    old = known["algorithm", "grpo"]
    flags = dict(old.flags) | {"supports_multi_update": False}
    known["algorithm", "single"] = specs.Spec("algorithm", "single", old.params, "one update", flags)
    monkeypatch.setattr(specs, "registry", lambda: known)
    check_algorithm(Component(name="single", params={"clip_range": 0.2}), 1, supervised=False)
    with pytest.raises(BadInput, match=r"train.num_updates_per_batch: single makes one update a batch \(got 2\); legal: 1"):
        check_algorithm(Component(name="single", params={"clip_range": 0.2}), 2, supervised=False)
