"""Packed replay is padded replay without the padding: same log-probs, same gradients, no sequence sees another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, Lfm2Config, LlamaConfig, MistralConfig, Qwen3Config

from services.trainer.algorithms.grpo import Grpo
from shared.config import algorithms
from shared.config.sections import Lora
from shared.models import lora
from shared.models.ar import packed
from shared.models.ar.bundle import Bundle, add_critic, load
from shared.models.ar.replay import Replayed, replay
from tests.trainer.test_stack import distance, gradient_of, make_batch, make_stack

SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Any] = {
    "qwen3": Qwen3Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=4),
    "gemma": GemmaConfig(**SHAPE),
}


OTHERS: dict[str, Any] = {
    "gemma2 caps its scores": Gemma2Config(**SHAPE),
    "lfm2 has convolutions": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
}
"""Models that packed replay would score wrongly."""


def rows(seed: int) -> tuple[list[Any], list[Any]]:
    """Unequal lengths, two equal ones, an empty completion."""
    rng = np.random.default_rng(seed)
    lengths = [(3, 5), (1, 9), (7, 1), (3, 5), (4, 0), (12, 3)]
    return tuple([rng.integers(1, 99, pair[k]) for pair in lengths] for k in range(2))  # type: ignore[return-value]


def bundle(name: str, implementation: str = "sdpa") -> Bundle:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], attn_implementation=implementation, dtype=torch.float64)
    return Bundle(model.eval(), None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_padded(name: str) -> None:
    prompts, completions = rows(1)
    weights = torch.randn(sum(map(len, completions)), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found: list[Replayed] = []
    gradients = []
    for mode in ("padded", "packed"):
        own = bundle(name)
        add_critic(own)
        torch.nn.init.constant_(own.model.value_head.weight, 0.1)
        if mode == "packed":
            packed.enable(own.model)
        out = replay(own, prompts, completions, 0.7, mode == "packed", entropy=True)
        assert out.entropy is not None and out.values is not None
        ((out.log_probs + 0.3 * out.entropy + out.values) * weights).sum().backward()  # type: ignore[no-untyped-call]
        found.append(out)
        gradients.append(torch.cat([p.grad.flatten() for p in own.model.parameters() if p.grad is not None]))
    padded, together = found
    assert padded.entropy is not None and together.entropy is not None
    assert padded.values is not None and together.values is not None
    assert torch.allclose(padded.log_probs, together.log_probs, rtol=0, atol=1e-12)
    assert torch.allclose(padded.entropy, together.entropy, rtol=0, atol=1e-12)
    assert torch.allclose(padded.values, together.values, rtol=0, atol=1e-12)
    limit = 1e-8 if name == "gemma" else 1e-10  # gemma's norms compute in float32 whatever the weights are
    assert distance(gradients[1], gradients[0]) < limit


def test_no_sequence_sees_another() -> None:
    """Changing one prompt changes its own row alone."""
    own = bundle("qwen3")
    packed.enable(own.model)
    prompts, completions = rows(2)
    with torch.no_grad():
        before = replay(own, prompts, completions, packed=True).log_probs
        prompts[1] = prompts[1] + 1 - 2 * (prompts[1] > 50)
        after = replay(own, prompts, completions, packed=True).log_probs
    starts = np.cumsum([0, *map(len, completions)])
    changed = (before != after).nonzero().flatten().tolist()
    assert changed and set(changed) <= set(range(starts[1], starts[2]))


def test_entropy_is_that_of_the_distribution() -> None:
    own = bundle("llama")
    prompts, completions = [np.array([5, 6, 7])], [np.array([8, 9])]
    found = replay(own, prompts, completions, 0.5, entropy=True)
    logits = own.model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:4] / 0.5
    assert found.entropy is not None
    assert torch.allclose(found.entropy, torch.distributions.Categorical(logits=logits).entropy())  # type: ignore[no-untyped-call]


def test_a_model_with_an_attention_of_its_own_is_refused() -> None:
    class Own:
        _supports_attention_backend = False

    with pytest.raises(ValueError, match="Own computes attention in a way of its own"):
        packed.enable(Own())
    for name, changes in OTHERS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(changes, attn_implementation="eager")
        with pytest.raises(ValueError, match="use padded"):
            packed.enable(model)
            replay(Bundle(model, None, 0), *rows(1), packed=True)  # type: ignore[arg-type]
        assert name


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_any_plan_gives_the_same_gradient(model_folder: Path, dtype: str, limit: float, mode: str) -> None:
    """By tokens, of either cost, packed or padded, any budget, also one that every row exceeds."""
    algorithm = Grpo(algorithms.Grpo(clip_range=0.2, aggregation=mode))
    whole = gradient_of(make_stack(model_folder, dtype, algorithm=algorithm), make_batch())
    for budget, cost, how in ((1, "sum", "packed"), (20, "sum", "packed"), (30, "dense", "padded"), (500, "sum", "packed")):
        stack = make_stack(
            model_folder, dtype, algorithm=algorithm, micro_batch_tokens=budget, micro_batch_cost=cost, replay=how
        )
        if how == "packed":
            packed.enable(stack.backend.model)
        assert distance(gradient_of(stack, make_batch()), whole) < limit, (budget, cost, how)


def test_adapters_train_alone_and_merge_exactly(model_folder: Path, tmp_path: Path) -> None:
    """Only the adapter moves; a version that holds it alone, merged at loading, scores as base and adapter do."""
    section = Lora(rank=3, alpha=6, targets=("q_proj", "up_proj"))
    own = load(model_folder, None, "float64")
    before = {n: v.clone() for n, v in own.model.state_dict().items()}
    modules = lora.inject(own.model, section, seed=1)
    trained = [p for p in own.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=5.0)
    prompts, completions = [np.array([5, 6, 7])] * 2, [np.array([8, 9]), np.array([10, 11, 12])]
    for _ in range(3):
        optimizer.zero_grad()
        (-replay(own, prompts, completions).log_probs.mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, value in own.model.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        assert lora.is_adapter(name) or torch.equal(value, before[plain])
    adapter = {lora.exported_name(n): v.contiguous() for n, v in own.model.state_dict().items() if lora.is_adapter(n)}
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    (tmp_path / lora.CONFIG).write_text(lora.config_text(section, model_folder, modules))
    merged = load(model_folder, tmp_path, "float64")
    assert not lora.has_adapter(merged.model)
    with torch.no_grad():
        wanted, found = (replay(b, prompts, completions).log_probs for b in (own, merged))
        with lora.using(own.model, None):
            base = replay(own, prompts, completions).log_probs
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12) and not torch.allclose(base, wanted, atol=1e-3)
    assert torch.equal(base, replay(load(model_folder, None, "float64"), prompts, completions).log_probs.detach())
