"""HPS v3 (Ma et al., arXiv 2508.03789): Qwen2-VL reads picture, prompt and an instruction; a small network rates what it holds
at a token of its own. The rating is a mean and a deviation; the mean is the score.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from services.reward.scorers.images import mean_over_frames
from services.reward.scorers.weights import device, open_folder, open_tensors
from shared.config.builtin import HpsV3
from shared.config.problems import bad
from shared.config.settings import from_environment
from shared.types.rewards import RewardRequest

FILES = "Qwen/Qwen2-VL-7B-Instruct (config, tokenizer and processor; its weights are not needed)"
WEIGHTS = "HPSv3.safetensors of MizzenAI/HPSv3"
INSTRUCTION = "the text that HPS v3 was trained with, from its own repository, with {prompt} and <|Reward|> in it"
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""To which a picture is brought."""


class HpsV3Scorer:
    """The mean rating; of a video the mean over frames."""

    def __init__(self, params: HpsV3) -> None:
        """BadInput for what is not there, or does not fit; it says what to download."""
        from shared.models.diffusion.qwen_processor import load_processor

        self.params = params
        folder = open_folder(params.path, FILES)
        self.instruction = from_environment().allowed(params.instruction, "instruction").read_text()
        if "{prompt}" not in self.instruction or self.instruction.count(TOKEN) != 1:
            raise bad("instruction", params.instruction, f"must hold {{prompt}}, and {TOKEN} once", INSTRUCTION)
        tensors = open_tensors(params.weights, "weights", WEIGHTS)
        try:
            self.processor: Any = load_processor(folder)
            self.processor.tokenizer.padding_side = "right"
            self.processor.tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
            self.processor.image_processor.size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
            self.model, self.head = _model(json.loads((folder / "config.json").read_text()), tensors)
        except (KeyError, RuntimeError, ValueError, OSError) as error:
            why = str(error).partition("\n")[0][:300]
            raise bad("weights", params.weights, why, f"{WEIGHTS}; in path {FILES}") from error
        self.token = self.processor.tokenizer.convert_tokens_to_ids(TOKEN)

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return mean_over_frames(rows, self.params.frames, self.params.batch_size, self._some)

    @torch.no_grad()
    def _some(self, pictures: Sequence[Any], prompts: Sequence[str]) -> list[float]:
        texts = [self._asked(prompt) for prompt in prompts]
        given = self.processor(text=texts, images=list(pictures), padding=True, return_tensors="pt").to(device())
        ids = given["input_ids"]
        places = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)  # plain ones, as it was trained
        held = self.model(
            input_ids=ids,
            attention_mask=given["attention_mask"],
            pixel_values=given["pixel_values"].to(self.model.dtype),
            image_grid_thw=given["image_grid_thw"],
            position_ids=places,
        ).last_hidden_state
        rated: Tensor = self.head(held[ids == self.token].float())
        if len(rated) != len(prompts):
            raise ValueError(f"{len(rated)} ratings of {len(prompts)} pictures: the instruction's token was lost or doubled")
        return list(map(float, rated[:, 0]))

    def _plain(self, prompt: str) -> str:
        """Without the tokenizer's own words, also those that appear when others go."""
        special = {TOKEN, self.processor.image_token, self.processor.video_token, *self.processor.tokenizer.get_added_vocab()}
        while found := next((token for token in special if token in prompt), None):
            prompt = prompt.replace(found, "")
        return prompt

    def _asked(self, prompt: str) -> str:
        """As the model's chat template puts it. A prompt cannot bring a second token to be rated."""
        words = self.instruction.replace("{prompt}", self._plain(prompt))
        content = [{"type": "image"}, {"type": "text", "text": words}]
        messages = [{"role": "user", "content": content}]
        return str(self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _model(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Any, nn.Sequential]:
    """The model without its output layer, and the rating, whose sizes the tensors say."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    held = {_renamed(name): value for name, value in tensors.items() if not name.startswith("lm_head.")}
    rating = {name.removeprefix("rm_head."): held.pop(name) for name in list(held) if name.startswith("rm_head.")}
    known = Qwen2VLConfig(**config)
    known.text_config.vocab_size = held["language_model.embed_tokens.weight"].shape[0]
    at = device()
    model = Qwen2VLModel._from_config(known, dtype=torch.bfloat16 if at.type == "cuda" else torch.float32)
    model.load_state_dict(held)
    first, second, last = (rating[f"{k}.weight"] for k in (0, 3, 5))
    linear = [nn.Linear(part.shape[1], part.shape[0]) for part in (first, second, last)]
    head = nn.Sequential(linear[0], nn.ReLU(), nn.Dropout(0.0), linear[1], nn.ReLU(), linear[2])
    head.load_state_dict(rating)
    return model.eval().to(at), head.float().eval().to(at)


def _renamed(name: str) -> str:
    """To the names of Qwen2VLModel: older files have `visual.` and `model.`, newer ones `model.visual.` and so on."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return f"language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
