"""A trainer that samples by itself: what it samples is what a rollout worker would with the version that it would publish, on
any number of ranks, and training does not notice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.world import World
from shared.config.builtin import Engine
from shared.config.sections import Lora
from shared.engines.base import fill
from shared.engines.transformers_engine import TransformersEngine
from shared.models import lora
from shared.models.ar.bundle import load
from shared.types.sample import Sample
from shared.types.segments import TextSegment
from shared.wire import codec
from tests.trainer import torchrun
from tests.trainer.sampler_rank import play, requests
from tests.trainer.test_stack import make_batch, make_stack, whole

ADAPTER = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "packed": {"replay": "packed"},
    "adapter": {"lora": ADAPTER},
    "averaged": {"ema": {"decay": 0.5, "schedule": "constant"}},
    "recomputed": {"activation_checkpointing": True},
}


def segment(body: bytes) -> TextSegment:
    [sample] = codec.decode(body, list[Sample])
    return sample.frontier.text_segment


def equal(one: TextSegment, other: TextSegment) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.log_probs is not None and other.log_probs is not None
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_samples_what_it_would_publish(model_folder: Path, kind: str) -> None:
    options = KINDS[kind]
    stack, answers = play(model_folder, World(), dict(options))
    undisturbed, _ = play(model_folder, World(), dict(options), samples=False)
    for name, value in whole(undisturbed).items():
        assert torch.equal(value, whole(stack)[name]), "sampling has changed training"
    before = make_stack(model_folder, **dict(options))
    before.train_track(make_batch())
    bundle = load(model_folder, None, "float32")
    if kind == "adapter":
        lora.inject(bundle.model, Lora.model_validate(ADAPTER))
    with before.averaged():
        weights = before.backend.weights()
    engine = TransformersEngine(bundle, Engine())
    engine.adopt("policy", before.progress.version, weights)
    assert "IndexError" in answers[3].error and answers[3].head is None
    for place, request in enumerate(requests()):
        if place == 3:
            continue
        [made] = fill(engine, [codec.decode(request, list[Sample])], alone=True)
        equal(segment(answers[place].body), made[0].frontier.text_segment)
        [part] = answers[place].head.parts
        assert part.versions == (before.progress.version,) * 2 and answers[place].head.spans[0].name == "rollout.policy"
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_sample_what_one_samples(model_folder: Path, tmp_path: Path, kind: str) -> None:
    """Each its share, without waiting for the others: they have unequal numbers of slices, and one fails."""
    one, answers = play(model_folder, World(), dict(KINDS[kind]))
    torchrun.run("tests.trainer.sampler_rank", [str(model_folder), str(tmp_path), json.dumps(KINDS[kind])], ranks=2)
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.allclose(value, found[name], rtol=1e-4, atol=1e-5) for name, value in whole(one).items())
    for place, answer in answers.items():
        assert (tmp_path / f"{place}.error").read_text() == answer.error
        if not answer.error:
            equal(segment((tmp_path / f"{place}.body").read_bytes()), segment(answer.body))
