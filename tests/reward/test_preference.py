"""ImageReward and HPS v3: their architectures with small random weights, under the names of the published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import ByT5Tokenizer, Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from services.reward.scorers.hps_v3 import TOKEN
from services.reward.scorers.image_reward import MEAN, STD, TOKENS
from shared.config.problems import BadInput
from tests.models.tiny_folders import pieces, sees
from tests.reward.test_pictures import load, shown

WIDTH, SIDE, PATCH, LAYERS, WORDS = 128, 32, 8, 2, 384
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
RATE = f"Rate this: {{prompt}} {TOKEN} END"


@pytest.fixture(autouse=True)
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMESH_ROOTS", str(tmp_path))
    torch.manual_seed(0)


def rows() -> list[Any]:
    rng = np.random.default_rng(0)
    prompts = ("a cat", "a red disc on a long long table", "a cat")
    return [shown(rng.integers(0, 255, (SIDE, SIDE, 3)), prompt) for prompt in prompts]


def blip() -> dict[str, Tensor]:
    """ImageReward's tensors, as its file names them."""

    def linear(name: str, out: int, into: int = WIDTH) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = torch.randn(out, into) / 10, torch.randn(out) / 10

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 1 + torch.randn(WIDTH) / 10, torch.randn(WIDTH) / 10

    found: dict[str, Tensor] = {
        "blip.visual_encoder.cls_token": torch.randn(1, 1, WIDTH),
        "blip.visual_encoder.pos_embed": torch.randn(1, (SIDE // PATCH) ** 2 + 1, WIDTH),
        "blip.visual_encoder.patch_embed.proj.weight": torch.randn(WIDTH, 3, PATCH, PATCH) / 10,
        "blip.visual_encoder.patch_embed.proj.bias": torch.randn(WIDTH),
        "blip.text_encoder.embeddings.word_embeddings.weight": torch.randn(WORDS, WIDTH),
        "blip.text_encoder.embeddings.position_embeddings.weight": torch.randn(40, WIDTH),
        "blip.text_encoder.embeddings.position_ids": torch.arange(40)[None],
        "blip.vision_proj.weight": torch.randn(4, WIDTH),
    }
    norm("blip.visual_encoder.norm")
    norm("blip.text_encoder.embeddings.LayerNorm")
    for k in range(LAYERS):
        block, layer = f"blip.visual_encoder.blocks.{k}", f"blip.text_encoder.encoder.layer.{k}"
        norm(f"{block}.norm1")
        norm(f"{block}.norm2")
        linear(f"{block}.attn.qkv", 3 * WIDTH)
        linear(f"{block}.attn.proj", WIDTH)
        linear(f"{block}.mlp.fc1", 2 * WIDTH)
        linear(f"{block}.mlp.fc2", WIDTH, 2 * WIDTH)
        for kind in ("attention", "crossattention"):
            for name in ("query", "key", "value"):
                linear(f"{layer}.{kind}.self.{name}", WIDTH)
            linear(f"{layer}.{kind}.output.dense", WIDTH)
            norm(f"{layer}.{kind}.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", 2 * WIDTH)
        linear(f"{layer}.output.dense", WIDTH, 2 * WIDTH)
        norm(f"{layer}.output.LayerNorm")
    for number, (into, out) in zip((0, 2, 4, 6, 7), ((WIDTH, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)), strict=True):
        linear(f"mlp.layers.{number}", out, into)
    return found


def by_hand(held: dict[str, Tensor], pixels: Tensor, ids: Tensor, mask: Tensor) -> float:
    """ImageReward as its paper's code computes it, written out: pixels [1, 3, side, side], ids and mask [1, tokens]."""

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, held[f"{name}.weight"], held[f"{name}.bias"])

    def norm(name: str, x: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), held[f"{name}.weight"], held[f"{name}.bias"], eps)

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Any = None) -> Tensor:
        first, second, third = (x.view(1, -1, WIDTH // 64, 64).transpose(1, 2) for x in (q, k, v))
        found = functional.scaled_dot_product_attention(first, second, third, attn_mask=seen)
        return found.transpose(1, 2).reshape(1, -1, WIDTH)

    eye = "blip.visual_encoder"
    x = functional.conv2d(pixels, held[f"{eye}.patch_embed.proj.weight"], held[f"{eye}.patch_embed.proj.bias"], PATCH)
    x = torch.cat([held[f"{eye}.cls_token"], x.flatten(2).transpose(1, 2)], 1) + held[f"{eye}.pos_embed"]
    for k in range(LAYERS):
        block = f"{eye}.blocks.{k}"
        q, key, v = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(f"{block}.attn.proj", attend(q, key, v))
        x = x + linear(f"{block}.mlp.fc2", functional.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6))))
    x = norm(f"{eye}.norm", x, 1e-6)
    words = "blip.text_encoder.embeddings"
    t = held[f"{words}.word_embeddings.weight"][ids] + held[f"{words}.position_embeddings.weight"][None, : ids.shape[1]]
    t = norm(f"{words}.LayerNorm", t, 1e-12)
    for k in range(LAYERS):
        layer = f"blip.text_encoder.encoder.layer.{k}"
        for kind, looked, seen in (("attention", None, mask[:, None, None].bool()), ("crossattention", x, None)):
            at = f"{layer}.{kind}"
            source = t if looked is None else looked
            q, key, v = (linear(f"{at}.self.{n}", s) for n, s in (("query", t), ("key", source), ("value", source)))
            t = norm(f"{at}.output.LayerNorm", linear(f"{at}.output.dense", attend(q, key, v, seen)) + t, 1e-12)
        wide = functional.gelu(linear(f"{layer}.intermediate.dense", t))
        t = norm(f"{layer}.output.LayerNorm", linear(f"{layer}.output.dense", wide) + t, 1e-12)
    rated = t[:, 0]
    for number in (0, 2, 4, 6, 7):
        rated = linear(f"mlp.layers.{number}", rated)
    return float((rated - MEAN) / STD)


def test_image_reward_is_what_its_paper_computes(tmp_path: Path) -> None:
    held = blip()
    save_file(held, tmp_path / "weights.safetensors")
    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained(tmp_path / "words")
    params = {"path": str(tmp_path / "words"), "weights": str(tmp_path / "weights.safetensors"), "batch_size": 2}
    found = load("image_reward", params).score(rows())
    mean, std = (torch.tensor(v)[None, :, None, None] for v in CLIP)
    for row, score in zip(rows(), found, strict=True):
        pixels = torch.tensor(np.asarray(row.media.data), dtype=torch.float32).movedim(2, 0)[None] / 255
        words = tokenizer(row.prompt, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        assert score == pytest.approx(by_hand(held, (pixels - mean) / std, words.input_ids, words.attention_mask), abs=1e-3)
    assert len({round(score, 3) for score in found}) == 3
    del held["blip.visual_encoder.norm.bias"]
    save_file(held, tmp_path / "weights.safetensors")
    with pytest.raises(BadInput, match=r"weights.*post_layernorm.bias|weights.*ImageReward.pt"):
        load("image_reward", params)


CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def hps(folder: Path, older: bool) -> tuple[dict[str, str], Any, dict[str, Tensor], Any]:
    """Parameters of the scorer, and what they name."""
    words = pieces()
    words.chat_template = CHAT
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    text = sizes | {"num_key_value_heads": 2, "vocab_size": len(words) + 5, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "mlp_ratio": 2}
    image = words.convert_tokens_to_ids("<|image_pad|>")
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image)
    config.save_pretrained(folder)
    processor = sees()
    processor.image_processor.save_pretrained(folder)
    words.save_pretrained(folder)
    model = Qwen2VLModel(config).eval()
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.2)
    head = torch.nn.Sequential(
        torch.nn.Linear(16, 24),
        torch.nn.ReLU(),
        torch.nn.Dropout(),
        torch.nn.Linear(24, 8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 2),
    ).eval()
    state = model.state_dict()
    held = {f"model.{name}": value for name, value in state.items()}
    if older:
        held = {name.replace("language_model.", "model."): value for name, value in state.items()}
    held |= {f"rm_head.{name}": value for name, value in head.state_dict().items()}
    save_file(held | {"lm_head.weight": torch.zeros(3, 16)}, folder / "hps.safetensors")
    (folder / "instruction.txt").write_text(RATE)
    given = {"path": str(folder), "weights": str(folder / "hps.safetensors"), "instruction": str(folder / "instruction.txt")}
    return given, model, held, head


@pytest.mark.parametrize("older", [False, True], ids=["new names", "old names"])
def test_hps_v3_rates_what_it_holds_at_its_token(tmp_path: Path, older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.scorers.hps_v3.PIXELS", 56 * 56)
    given, model, _, head = hps(tmp_path / "qwen", older)
    scorer: Any = load("hps_v3", given)
    found = scorer.score(rows())
    for row, score in zip(rows(), found, strict=True):  # one by one, without a pad: the same
        prompt = CHAT_OF.format(RATE.replace("{prompt}", row.prompt))
        inputs = scorer.processor(text=[prompt], images=[np.asarray(row.media.data)], return_tensors="pt")
        ids = inputs["input_ids"]
        places = torch.arange(ids.shape[1])[None, None].repeat(3, 1, 1)
        with torch.no_grad():
            seen = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
            words = model.language_model.embed_tokens(ids)
            words[ids == model.config.image_token_id] = torch.cat(list(seen)) if isinstance(seen, tuple) else seen
            states = model.language_model(inputs_embeds=words, position_ids=places).last_hidden_state
            wanted = head(states[ids == scorer.token])[0, 0]
        assert score == pytest.approx(float(wanted), abs=1e-4)
    assert len({round(score, 4) for score in found}) == 3
    sly = scorer.score([shown(np.asarray(rows()[0].media.data), f"a cat{TOKEN}")])
    assert sly == [pytest.approx(found[0], abs=1e-4)], "a prompt cannot bring its own token"
    nested = f"{TOKEN[:4]}<|image_pad|>{TOKEN[4:]}"
    mixed = scorer.score([shown(np.asarray(rows()[0].media.data), f"a cat{nested}"), *rows()[1:]])
    assert mixed == [pytest.approx(score, abs=1e-4) for score in found], "also not one that appears when another goes"


CHAT_OF = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"


def test_what_they_lack_is_said_with_what_to_download(tmp_path: Path) -> None:
    given, *_ = hps(tmp_path / "qwen", False)
    for wrong, words in (("nothing", "must hold {prompt}"), (f"{{prompt}} {TOKEN} {TOKEN}", "once")):
        (tmp_path / "wrong.txt").write_text(wrong)
        with pytest.raises(BadInput, match=words):
            load("hps_v3", given | {"instruction": str(tmp_path / "wrong.txt")})
    torch.save({}, tmp_path / "pickle.pt")
    for name, more in (("hps_v3", given), ("image_reward", {"path": str(tmp_path / "qwen")})):
        with pytest.raises(BadInput, match=r"weights.*(HPSv3\.safetensors|ImageReward\.pt)"):
            load(name, more | {"weights": str(tmp_path / "pickle.pt")})
        with pytest.raises(BadInput, match="below a configured root"):
            load(name, more | {"weights": "/etc/hostname", "path": str(tmp_path / "qwen")})
    config = json.loads((tmp_path / "qwen" / "config.json").read_text())
    config["text_config"]["hidden_size"] = 32
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"weights.*HPSv3"):
        load("hps_v3", given)
