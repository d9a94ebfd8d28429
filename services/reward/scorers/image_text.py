"""How well pictures fit their prompts by a CLIP-like model (CLIP score, PickScore, HPS v2); how they please by its embedding.

Weights are folders below the configured roots: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from services.reward.scorers.images import frames
from services.reward.scorers.weights import device, open_tensors, rating_head
from shared.config.builtin import Aesthetic, ImageText
from shared.config.problems import bad
from shared.config.settings import from_environment
from shared.types.rewards import RewardRequest

DOWNLOADS = {
    "clip_score": "openai/clip-vit-large-patch14",
    "pick_score": "yuvalkirstain/PickScore_v1",
    "hps_v2": "adams-story/HPSv2-hf",
    "aesthetic": "openai/clip-vit-large-patch14, and of christophschuhmann/improved-aesthetic-predictor "
    "sac+logos+ava1-l14-linearMSE.pth",
}


class ClipModel:
    """A transformers CLIP model with its processor, in float32, where there is a device on it."""

    def __init__(self, path: str, name: str, batch_size: int) -> None:
        """BadInput if the folder is not below a configured root or holds no such model; it says what to download."""
        from transformers import AutoProcessor, CLIPModel

        try:
            folder = from_environment().allowed(path, "path")
            if not (folder / "preprocessor_config.json").exists():
                raise bad("path", path, "the folder has no preprocessor_config.json", "a CLIP model's folder")
            how: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
            self.device = device()
            self.model = CLIPModel.from_pretrained(folder, **how).eval().to(self.device)
            self.processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise bad("path", path, str(error)[:300], f"a folder with the files of {DOWNLOADS[name]}") from error
        self.batch_size = batch_size

    @torch.no_grad()
    def pictures(self, rows: Sequence[RewardRequest], count: int) -> list[Tensor]:
        """Unit vectors [frames, width] of each row."""
        shown = [frames(row, count) for row in rows]
        flat = [picture for own in shown for picture in own]
        found = [self._images(flat[i : i + self.batch_size]) for i in range(0, len(flat), self.batch_size)]
        return list(torch.split(torch.cat(found), [len(own) for own in shown]))

    def _images(self, some: Sequence[Any]) -> Tensor:
        inputs = self.processor(images=list(some), return_tensors="pt").to(self.device)
        return _unit(self.model.get_image_features(**inputs))

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [prompts, width]; longer texts are cut at the model's end."""
        inputs = self.processor(text=list(prompts), return_tensors="pt", padding=True, truncation=True, max_length=self.longest)
        return _unit(self.model.get_text_features(**inputs.to(self.device)))

    @property
    def longest(self) -> int:
        return int(self.model.config.text_config.max_position_embeddings)


def _unit(found: Any) -> Tensor:
    value: Tensor = found if isinstance(found, Tensor) else found.pooler_output
    return torch.nn.functional.normalize(value, dim=-1)


class ImageTextScorer:
    """The cosine of picture and prompt, of a video the mean over frames; for `clip_score` negative ones count as 0.

    CLIPScore (Hessel et al., arXiv 2104.08718), PickScore (Kirstain et al., arXiv 2305.01569: the model's own logit scale, over
    26), HPS v2 (Wu et al., arXiv 2306.09341).
    """

    name = "clip_score"

    def __init__(self, params: ImageText) -> None:
        self.params = params
        self.clip = ClipModel(params.path, self.name, params.batch_size)

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        pictures = self.clip.pictures(rows, self.params.frames)
        texts = self.clip.texts([row.prompt for row in rows])
        return [self.scaled(float((own @ text).mean())) for own, text in zip(pictures, texts, strict=True)]

    def scaled(self, cosine: float) -> float:
        return max(0.0, cosine)


class PickScoreScorer(ImageTextScorer):
    name = "pick_score"

    def scaled(self, cosine: float) -> float:
        return float(self.clip.model.logit_scale.exp()) * cosine / 26


class HpsV2Scorer(ImageTextScorer):
    name = "hps_v2"

    def scaled(self, cosine: float) -> float:
        return cosine


class AestheticScorer:
    """The LAION predictor: a small network on CLIP's embedding, trained on ratings from 1 to 10; over 10."""

    def __init__(self, params: Aesthetic) -> None:
        self.params = params
        self.clip = ClipModel(params.path, "aesthetic", params.batch_size)
        legal = f"a safetensors file of the tensors of {DOWNLOADS['aesthetic']}, a pickle: convert it once, elsewhere"
        tensors = open_tensors(params.head, "head", legal)
        self.head = nn.ModuleDict({"layers": rating_head(int(self.clip.model.config.projection_dim))})
        try:
            self.head.load_state_dict(tensors)
        except RuntimeError as error:
            raise bad("head", params.head, str(error).partition("\n")[0], legal) from error
        self.head.eval().to(self.clip.device)

    @torch.no_grad()
    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        found = self.clip.pictures(rows, self.params.frames)
        return [float(self.head["layers"](own).mean()) / 10 for own in found]
