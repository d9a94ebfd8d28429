"""The demo's model, made on the spot: a Stable Diffusion 3 of 1.2 M parameters, and the pictures of a careless painter.

Run as `python -m shared.models.diffusion.tiny FOLDER SEED`, in a process of its own: it needs torch. The VAE learns the
pictures of shared/pictures.py; a job of the domain sft then teaches the transformer what the painter makes of the prompts.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shared.pictures import COLOURS, PROMPTS, SHAPES, SIZE, careless, paint

LATENT, WIDTH, WORDS = 4, 64, 3
"""Channels of latents, width of the text encoder, longest text in tokens."""
SHIFT = 3.0
"""Of the scheduler."""
POOL = 300
"""Pictures of each prompt that the transformer learns from."""
MEASURED = 100
"""Pictures of each prompt by which the latents are scaled."""


class Parts(NamedTuple):
    tokenizer: Any
    text: Any
    vae: Any
    transformer: Any


def make_parts(seed: int) -> Parts:
    """With random weights."""
    import diffusers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    library: Any = diffusers
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<unk>", *COLOURS, *SHAPES, "<eos>"))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=WORDS, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
    text = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=WORDS,
            projection_dim=WIDTH,
            bos_token_id=None,
            eos_token_id=vocabulary["<eos>"],
            pad_token_id=0,
        )
    )
    torch.nn.init.normal_(text.text_model.embeddings.token_embedding.weight)  # it stays as it is: words must differ
    vae = library.AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=LATENT,
        sample_size=SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = library.SD3Transformer2DModel(
        sample_size=SIZE // 4,
        patch_size=2,
        in_channels=LATENT,
        out_channels=LATENT,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=3,
        qk_norm="rms_norm",
    )
    return Parts(tokenizer, text, vae, transformer)


def pipeline(parts: Parts) -> Any:
    """The same text encoder twice, and none of the third kind."""
    import diffusers

    library: Any = diffusers
    return library.StableDiffusion3Pipeline(
        transformer=parts.transformer,
        scheduler=library.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=parts.vae,
        text_encoder=parts.text,
        tokenizer=parts.tokenizer,
        text_encoder_2=parts.text,
        tokenizer_2=parts.tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def prepare(folder: Path, seed: int, vae_steps: int = 500) -> None:
    """Trains the VAE, and writes the pipeline's folder, with the painter's pictures beside it."""
    parts, rng, draws = make_parts(seed), random.Random(seed), np.random.default_rng(1000 + seed)
    _train_vae(parts.vae, rng, draws, vae_steps)
    pipeline(parts).save_pretrained(folder)
    for name, count in (("train", POOL), ("held_out", POOL // 20)):
        _write(folder / name, count, rng, draws)


def _write(folder: Path, count: int, rng: random.Random, draws: np.random.Generator) -> None:
    """`records.jsonl`, and what the painter makes of each prompt, so many times."""
    folder.mkdir(parents=True)
    with (folder / "records.jsonl").open("w") as records:
        for number, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(count)):
            pixels = paint([careless(prompt, rng)], draws)[0].transpose(1, 2, 0)
            Image.fromarray((pixels * 255).round().astype(np.uint8)).save(folder / f"{number}.png")
            records.write(json.dumps({"prompt": prompt, "picture": f"{number}.png"}) + "\n")


def _train_vae(vae: Any, rng: random.Random, draws: np.random.Generator, steps: int) -> None:
    """By AdamW with 30 steps of warm-up and a linear fall to a tenth; its config gets the latents' mean and std."""
    torch.nn.init.constant_(vae.encoder.conv_out.bias[LATENT:], -6.0)  # log-variance: little noise at first

    def loss() -> Tensor:
        pictures = 2 * torch.from_numpy(paint(rng.choices(PROMPTS, k=16), draws)) - 1
        latents = vae.encode(pictures).latent_dist
        decoded = vae.decode(latents.mean + latents.std * torch.randn(latents.mean.shape)).sample
        kl = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).mean()
        found: Tensor = (decoded - pictures).abs().mean() + (decoded - pictures).square().mean() + 1e-5 * kl
        return found

    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 30) * max(0.1, 1 - step / steps)
        error = loss()
        optimizer.zero_grad()
        error.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
    vae.eval().requires_grad_(False)
    pictures = 2 * torch.from_numpy(paint([prompt for prompt in PROMPTS for _ in range(MEASURED)], draws)) - 1
    with torch.no_grad():
        latents = torch.cat([vae.encode(some).latent_dist.mean for some in torch.split(pictures, 240)])
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), int(sys.argv[2]))
