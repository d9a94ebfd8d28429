"""The folder of a tiny Stable Diffusion 3 with random weights and a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "red", "green", "blue", "yellow", "disc", "square", "triangle", "cat", "dog")
TEXT, SIZE = 8, 8
"""Longest text in tokens; height and width of latents."""


def make_tokenizer() -> Any:
    """Of WORDS; the last token ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(("<pad>", "<unk>", *WORDS, "<eos>"))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=TEXT, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def make_folder(folder: Path, seed: int) -> Path:
    """As DiffusionPipeline.save_pretrained writes it."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    tokenizer, vocabulary = make_tokenizer(), len(WORDS) + 3
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT,
        projection_dim=32,
        bos_token_id=None,
        eos_token_id=vocabulary - 1,
        pad_token_id=0,
    )
    encoder = CLIPTextModelWithProjection(config)
    library: Any = diffusers
    transformer = library.SD3Transformer2DModel(
        sample_size=SIZE,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=SIZE,
        qk_norm="rms_norm",
    )
    vae = library.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=2 * SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    pipe = library.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=library.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.save_pretrained(folder)
    return folder
