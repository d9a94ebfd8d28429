"""Scorers by name. Each is loaded only when a job asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from services.reward.scorers.base import Scorer
from shared.config import specs

BUILTIN = {
    "exact_match": "services.reward.scorers.exact_match:ExactMatchScorer",
    "regex": "services.reward.scorers.regex_format:RegexScorer",
    "length": "services.reward.scorers.length:LengthScorer",
    "reasoning_gym": "services.reward.scorers.reasoning_gym_grader:ReasoningGymScorer",
    "contains": "services.reward.scorers.contains:ContainsScorer",
    "multiple_choice": "services.reward.scorers.multiple_choice:MultipleChoiceScorer",
    "math_verify": "services.reward.scorers.math_verify_scorer:MathVerifyScorer",
    "json_schema": "services.reward.scorers.json_schema:JsonSchemaScorer",
    "brightness": "services.reward.scorers.pictures:BrightnessScorer",
    "colour": "services.reward.scorers.pictures:ColourScorer",
    "shapes": "services.reward.scorers.pictures:ShapesScorer",
    "jpeg_size": "services.reward.scorers.pictures:JpegSizeScorer",
    "ocr": "services.reward.scorers.ocr:OcrScorer",
    "geneval2": "services.reward.scorers.geneval2:Geneval2Scorer",
    "clip_score": "services.reward.scorers.image_text:ImageTextScorer",
    "pick_score": "services.reward.scorers.image_text:PickScoreScorer",
    "hps_v2": "services.reward.scorers.image_text:HpsV2Scorer",
    "hps_v3": "services.reward.scorers.hps_v3:HpsV3Scorer",
    "image_reward": "services.reward.scorers.image_reward:ImageRewardScorer",
    "aesthetic": "services.reward.scorers.image_text:AestheticScorer",
    "llm_judge": "services.reward.scorers.llm_judge:LlmJudgeScorer",
    "remote_http": "services.reward.scorers.remote_http:RemoteHttpScorer",
}


def implementation(name: str) -> str:
    """`module:object` of a scorer: a built-in one, or the entry point that an installed package's spec declares."""
    spec = specs.find("scorer", name, "scorer")
    found = spec.entry_point or BUILTIN.get(name)
    if found is None:
        raise LookupError(f"scorer {name!r} has a spec but no implementation")
    return found


def load(name: str, params: Any) -> Scorer:
    module, _, attribute = implementation(name).partition(":")
    checked = specs.check("scorer", name, params, f"scorer {name}")
    made: Scorer = vars(import_module(module))[attribute](checked)
    return made


def isolated(name: str) -> bool:
    """Whether it runs in a process of its own: anything that may hang or hold the interpreter, and all from outside."""
    spec = specs.find("scorer", name, "scorer")
    return bool(spec.flags.get("isolated", spec.entry_point is not None))
