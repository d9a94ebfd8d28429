"""The demo's model, made on the spot: a Stable Diffusion 3 of 1.2 M parameters that imitates a careless painter.

Run as `python -m shared.models.diffusion.tiny FOLDER SEED`, in a process of its own: it needs torch. First the VAE learns
the pictures of shared/pictures.py, then text encoder and transformer learn, by flow matching, what the painter makes of
the prompts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.models.diffusion.sd3 import SD3
from shared.pictures import COLOURS, PROMPTS, SHAPES, SIZE, careless, paint

LATENT, WIDTH, WORDS = 4, 64, 3
"""Channels of latents, width of the text encoder, longest text in tokens."""
SHIFT = 3.0
POOL = 300
"""Encoded pictures of each prompt that the transformer learns from."""


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


def prepare(folder: Path, seed: int, vae_steps: int = 500, flow_steps: int = 500) -> None:
    """Trains all parts, and writes the pipeline's folder."""
    parts, rng, draws = make_parts(seed), random.Random(seed), np.random.default_rng(1000 + seed)
    pool = _train_vae(parts.vae, rng, draws, vae_steps)
    pipe = pipeline(parts)
    family, kinds = SD3(), torch.Generator().manual_seed(1000 + seed)

    def loss() -> Tensor:
        prompts = rng.choices(PROMPTS, k=64)
        painted = torch.tensor([PROMPTS.index(careless(prompt, rng)) for prompt in prompts])
        clean = pool[painted, torch.randint(POOL, (64,), generator=kinds)]
        noise, u = torch.randn(clean.shape, generator=kinds), torch.rand(64, generator=kinds)
        sigma = (SHIFT * u / (1 + (SHIFT - 1) * u)).clamp(1e-3, 1 - 1e-3)
        wide = sigma[:, None, None, None]
        cond = family.encode(pipe, prompts)
        found = family.velocity(parts.transformer, (1 - wide) * clean + wide * noise, sigma, cond)
        return (found - (noise - clean)).square().mean()

    _fit([*parts.text.parameters(), *parts.transformer.parameters()], flow_steps, 3e-3, 0.01, loss)
    pipe.save_pretrained(folder)


def _train_vae(vae: Any, rng: random.Random, draws: np.random.Generator, steps: int) -> Tensor:
    """Returns encoded pictures [prompts, POOL, channels, height, width], of mean 0 and std 1; the VAE knows their scale."""
    torch.nn.init.constant_(vae.encoder.conv_out.bias[LATENT:], -6.0)  # log-variance: little noise at first

    def loss() -> Tensor:
        pictures = 2 * torch.from_numpy(paint(rng.choices(PROMPTS, k=16), draws)) - 1
        latents = vae.encode(pictures).latent_dist
        decoded = vae.decode(latents.mean + latents.std * torch.randn(latents.mean.shape)).sample
        kl = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).mean()
        found: Tensor = (decoded - pictures).abs().mean() + (decoded - pictures).square().mean() + 1e-5 * kl
        return found

    _fit(list(vae.parameters()), steps, 1e-2, 0.0, loss)
    vae.eval().requires_grad_(False)
    pictures = 2 * torch.from_numpy(paint([prompt for prompt in PROMPTS for _ in range(POOL)], draws)) - 1
    with torch.no_grad():
        pool = torch.cat([vae.encode(pictures[i : i + 240]).latent_dist.mean for i in range(0, len(pictures), 240)])
    vae.register_to_config(scaling_factor=1 / pool.std().item(), shift_factor=pool.mean().item())
    scaled: Tensor = (pool - vae.config.shift_factor) * vae.config.scaling_factor
    return scaled.view(len(PROMPTS), POOL, *pool.shape[1:])


def _fit(parameters: list[Tensor], steps: int, peak: float, weight_decay: float, loss_of: Callable[[], Tensor]) -> None:
    """AdamW with 30 steps of warm-up and a linear fall to a tenth."""
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=weight_decay)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 30) * max(0.1, 1 - step / steps)
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), int(sys.argv[2]))
