"""ImageReward (arXiv 2304.05977): BLIP's text encoder looks at the picture; a small network rates its first token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.reward.scorers.images import mean_over_frames
from services.reward.scorers.weights import device, open_folder, open_tensors, rating_head
from shared.config.builtin import ImageReward
from shared.config.problems import bad
from shared.types.rewards import RewardRequest

FILES = "google-bert/bert-base-uncased (its tokenizer)"
WEIGHTS = "a safetensors file of the tensors of zai-org/ImageReward's ImageReward.pt, a pickle: convert it once, elsewhere"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the ratings that it was trained on, as published with it."""
TOKENS = 35
HEAD = 64
"""Width of an attention head, in both parts."""
RENAMED = (
    (r"^visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^visual_encoder\.blocks\.(\d+)\.norm(\d)\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^visual_encoder\.blocks\.", "vision.encoder.layers."),
    (r"^text_encoder\.", "text."),
)
"""From BLIP's own names to transformers'."""
UNUSED = re.compile(r"^(vision_proj|text_proj)\.|\.position_ids$")


class ImageRewardScorer:
    """Scores have about mean 0 and deviation 1 over people's choices; of a video the mean over frames."""

    def __init__(self, params: ImageReward) -> None:
        """BadInput for what is not there, or does not fit; it says what to download."""
        from transformers import AutoTokenizer
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.params = params
        folder = open_folder(params.path, FILES)
        tensors = open_tensors(params.weights, "weights", WEIGHTS)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model = _model(tensors).eval().to(device())
        except (KeyError, RuntimeError, ValueError, OSError) as error:
            raise bad("weights", params.weights, str(error).partition("\n")[0][:300], f"{WEIGHTS}; in path {FILES}") from error
        side = self.model["vision"].config.image_size
        self.pictures = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return mean_over_frames(rows, self.params.frames, self.params.batch_size, self._some)

    @torch.no_grad()
    def _some(self, pictures: Sequence[Any], prompts: Sequence[str]) -> list[float]:
        how: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
        words = self.tokenizer(list(prompts), **how).to(device())
        seen = self.model["vision"](**self.pictures(list(pictures), return_tensors="pt").to(device())).last_hidden_state
        found = self.model["text"](words.input_ids, attention_mask=words.attention_mask, encoder_hidden_states=seen)
        rated: Tensor = (self.model["mlp"](found.last_hidden_state[:, 0])[:, 0] - MEAN) / STD
        return list(map(float, rated))


def _model(tensors: dict[str, Tensor]) -> Any:
    """BLIP's two encoders and the rating, their sizes read from the tensors. ValueError or KeyError for others."""
    from transformers import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    held = {_renamed(name): value for name, value in tensors.items()}
    held = {name: value for name, value in held.items() if not UNUSED.search(name)}
    patch, places = held["vision.embeddings.patch_embedding.weight"], held["vision.embeddings.position_embedding"]
    across = held["text.encoder.layer.0.crossattention.self.key.weight"]
    words, positions = (held[f"text.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
    vision = BlipVisionConfig(
        hidden_size=patch.shape[0],
        intermediate_size=held["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_count(held, r"^vision\.encoder\.layers\.(\d+)\."),
        num_attention_heads=patch.shape[0] // HEAD,
        patch_size=patch.shape[-1],
        image_size=patch.shape[-1] * round((places.shape[1] - 1) ** 0.5),
        layer_norm_eps=1e-6,
    )
    text = BlipTextConfig(
        vocab_size=words.shape[0],
        hidden_size=words.shape[1],
        encoder_hidden_size=across.shape[1],
        intermediate_size=held["text.encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_count(held, r"^text\.encoder\.layer\.(\d+)\."),
        num_attention_heads=words.shape[1] // HEAD,
        max_position_embeddings=positions.shape[0],
        layer_norm_eps=1e-12,
        is_decoder=True,  # what gives its layers eyes
    )
    parts = {"vision": BlipVisionModel(vision), "text": BlipTextModel(text, add_pooling_layer=False)}
    found = torch.nn.ModuleDict({**parts, "mlp": rating_head(words.shape[1])})
    found.load_state_dict(held)
    return found


def _renamed(name: str) -> str:
    name = name.removeprefix("blip.")
    for pattern, into in RENAMED:
        name = re.sub(pattern, into, name)
    return re.sub(r"^mlp\.layers\.", "mlp.", name)


def _count(held: dict[str, Tensor], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in held if (found := re.match(pattern, name)))
