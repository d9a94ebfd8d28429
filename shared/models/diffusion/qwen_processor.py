"""What Qwen2.5-VL reads of a text and a picture, without transformers' own processor, which needs torchvision for videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class PictureProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """Of texts and pictures."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **given: Any) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, **given)


def load_processor(folder: Path) -> PictureProcessor:
    """Of a pipeline's `processor` folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return PictureProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True), tokenizer)
