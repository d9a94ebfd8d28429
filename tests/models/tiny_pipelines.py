"""Tiny pipelines of every family: the real classes of diffusers with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from shared.models.diffusion import family
from shared.models.diffusion.family import Conditions, Family, pixels_of
from shared.models.diffusion.qwen_image import patches
from shared.models.diffusion.wan import Wan21I2V, Wan22
from shared.models.diffusion.z_image import ragged

B = 2
d: Any = diffusers
d.utils.logging.set_verbosity_error()


@dataclass
class Tiny:
    """A pipeline, what its own call takes, and the same for the family."""

    family: Family
    pipe: Any
    size: tuple[int, int, int]
    """Height, width, frames."""
    cond: Conditions
    negative: Conditions | None
    guidance: float
    call: dict[str, Any]
    """Of the pipeline, besides sizes, steps and latents."""
    packed: Callable[[Tensor], Tensor] = lambda x: x
    """From the family's latents to those that the pipeline takes."""
    returned: Callable[[Tensor], Tensor] = lambda x: x
    """From the family's latents to those that the pipeline returns."""
    one_by_one: bool = False
    """The pipeline decodes single samples alone."""

    @property
    def scales(self) -> tuple[float, float | None]:
        """Of guidance; the second one is of the second expert."""
        return self.guidance, self.call.get("guidance_scale_2")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.family.latent_shape(self.pipe, *self.size)

    def own(self, steps: int, latents: Tensor, output: str, **more: Any) -> Tensor:
        """The pipeline's own result."""
        height, width, frames = self.size
        video = {"num_frames": frames} if self.family.video else {}
        given = {"height": height, "width": width, **video, "num_inference_steps": steps, **self.call, **more}
        with patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda *_: (width, height, None)):  # a megapixel
            found = self.pipe(**given, latents=self.packed(latents.clone()), output_type=output)
        result: Tensor = found.frames if self.family.video else found.images
        return result


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def drawn(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def filled(module: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module.eval()


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sd3() -> Tiny:
    model = d.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    blocks: dict[str, Any] = {
        "block_out_channels": (4, 8, 8, 8),
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }
    vae = d.AutoencoderKL(
        sample_size=32,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
        **blocks,
    )
    none = {f"{kind}{n}": None for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")}
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = d.StableDiffusion3Pipeline(transformer=filled(model), scheduler=scheduler, vae=filled(vae), **none)
    cond, negative = ({"text": rand(B, 7, 32), "pooled": rand(B, 64)} for _ in range(2))
    call = {
        "prompt_embeds": cond["text"],
        "pooled_prompt_embeds": cond["pooled"],
        "negative_prompt_embeds": negative["text"],
        "negative_pooled_prompt_embeds": negative["pooled"],
        "guidance_scale": 4.0,
    }
    return Tiny(family("sd3"), quiet(pipe), (64, 64, 1), cond, negative, 4.0, call)


def _qwen_parts() -> dict[str, Any]:
    model = d.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = d.AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, 0.2, 0.3, -0.4],
        latents_std=[1.5, 2.0, 0.5, 1.0],
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    none = dict.fromkeys(("text_encoder", "tokenizer"))
    return {"scheduler": scheduler, "vae": filled(vae), "transformer": filled(model), **none}


def _qwen_texts() -> tuple[Conditions, Conditions, dict[str, Any]]:
    mask = torch.ones(B, 7, dtype=torch.long)
    mask[1, 5:] = 0
    cond = {"text": rand(B, 7, 16), "mask": mask}
    negative = {"text": rand(B, 3, 16), "mask": torch.ones(B, 3, dtype=torch.long)}
    call = {
        "prompt_embeds": cond["text"],
        "prompt_embeds_mask": cond["mask"],
        "negative_prompt_embeds": negative["text"],
        "negative_prompt_embeds_mask": negative["mask"],
        "true_cfg_scale": 4.0,
    }
    return cond, negative, call


def qwen_image() -> Tiny:
    pipe = d.QwenImagePipeline(**_qwen_parts())
    cond, negative, call = _qwen_texts()
    size = (8 * pipe.vae_scale_factor, 4 * pipe.vae_scale_factor, 1)
    return Tiny(family("qwen_image"), quiet(pipe), size, cond, negative, 4.0, call, packed=patches, returned=patches)


def qwen_image_edit() -> Tiny:
    pipe = d.QwenImageEditPipeline(**_qwen_parts(), processor=None)
    cond, negative, call = _qwen_texts()
    size = (8 * pipe.vae_scale_factor, 4 * pipe.vae_scale_factor, 1)
    own, picture = family("qwen_image_edit"), drawn(*size[:2])
    with torch.no_grad():
        cond["reference"] = own.clean(pipe, pixels_of(pipe, [picture] * B))
    call |= {"image": picture}
    return Tiny(own, quiet(pipe), size, cond, negative, 4.0, call, packed=patches, returned=patches)


def flux2_klein() -> Tiny:
    model = d.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=False,
    )
    vae = d.AutoencoderKLFlux2(
        sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    filled(vae)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    scheduler = d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = d.Flux2KleinPipeline(scheduler=scheduler, vae=vae, text_encoder=None, tokenizer=None, transformer=filled(model))
    cond, negative = {"text": rand(B, 7, 24)}, {"text": rand(B, 7, 24)}
    call = {"prompt_embeds": cond["text"], "negative_prompt_embeds": negative["text"], "guidance_scale": 4.0}

    def returned(x: Tensor) -> Tensor:
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
        found: Tensor = pipe._unpatchify_latents(x * std + vae.bn.running_mean.view(1, -1, 1, 1))
        return found

    return Tiny(family("flux2_klein"), quiet(pipe), (64, 96, 1), cond, negative, 4.0, call, returned=returned)


def z_image() -> Tiny:
    model = d.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    vae = d.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 8, 8],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = d.ZImagePipeline(scheduler=scheduler, vae=filled(vae), text_encoder=None, tokenizer=None, transformer=filled(model))
    texts, negatives = [rand(5, 16), rand(9, 16)], [rand(3, 16), rand(4, 16)]
    call = {"prompt_embeds": texts, "negative_prompt_embeds": negatives, "guidance_scale": 3.0}
    return Tiny(family("z_image"), quiet(pipe), (64, 64, 1), ragged(texts), ragged(negatives), 3.0, call)


def wan(name: str) -> Tiny:
    pictured, two = name.endswith("_i2v"), name.startswith("wan22")
    sees = {"image_dim": 16} if pictured and not two else {}

    def expert(seed: int) -> Any:
        return filled(
            d.WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=16 + (20 if pictured else 0),
                out_channels=16,
                text_dim=32,
                freq_dim=256,
                ffn_dim=32,
                num_layers=2,
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
                **sees,
            ),
            seed,
        )

    vae = d.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    own = family(name)
    both: dict[str, Any] = {"transformer_2": expert(2), "boundary_ratio": own.boundary} if isinstance(own, Wan22) else {}
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0 if both else 5.0)
    kind = d.WanImageToVideoPipeline if pictured else d.WanPipeline
    pipe = kind(tokenizer=None, text_encoder=None, vae=filled(vae), scheduler=scheduler, transformer=expert(1), **both)
    cond, negative = {"text": rand(B, 7, 32)}, {"text": rand(B, 7, 32)}
    call = {"prompt_embeds": cond["text"], "negative_prompt_embeds": negative["text"], "guidance_scale": 4.0}
    if both:
        call["guidance_scale_2"] = 2.5
    if isinstance(own, Wan21I2V):
        if sees:
            pipe.register_modules(image_encoder=clip_eyes(), image_processor=CLIPImageProcessorPil(size=8, crop_size=8))
            pipe.image_processor = pipe.components["image_processor"]
        picture = drawn(32, 48)
        with torch.no_grad():
            cond |= own.seen(pipe, [picture] * B, 9)
        call["image"] = picture
    return Tiny(own, quiet(pipe), (32, 48, 9), cond, negative, 4.0, call)


def clip_eyes() -> Any:
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return filled(CLIPVisionModel(config))


def hunyuan_video() -> Tiny:
    model = d.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    vae = d.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipe = d.HunyuanVideoPipeline(transformer=filled(model), vae=filled(vae), scheduler=scheduler, **none)
    mask = torch.ones(B, 7)
    mask[1, 5:] = 0
    cond = {"text": rand(B, 7, 16), "pooled": rand(B, 8), "mask": mask}
    call = {
        "prompt_embeds": cond["text"],
        "pooled_prompt_embeds": cond["pooled"],
        "prompt_attention_mask": mask,
        "guidance_scale": 6.0,
    }
    return Tiny(family("hunyuan_video"), quiet(pipe), (32, 32, 9), cond, None, 6.0, call)


def hunyuan_video15() -> Tiny:
    model = d.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    vae = d.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = d.HunyuanVideo15Pipeline(
        transformer=filled(model),
        vae=filled(vae),
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=d.ClassifierFreeGuidance(guidance_scale=5.0),
        **none,
    )
    mask = torch.ones(B, 7)
    mask[1, 5:] = 0

    def made() -> Conditions:
        return {"text": rand(B, 7, 16), "mask": mask, "glyph": rand(B, 6, 32), "glyph_mask": torch.ones(B, 6)}

    cond, negative = made(), made()
    call: dict[str, Any] = {}
    for prefix, held in (("", cond), ("negative_", negative)):
        call |= {f"{prefix}prompt_embeds": held["text"], f"{prefix}prompt_embeds_mask": held["mask"]}
        call |= {f"{prefix}prompt_embeds_2": held["glyph"], f"{prefix}prompt_embeds_mask_2": held["glyph_mask"]}
    return Tiny(family("hunyuan_video15"), quiet(pipe), (16, 16, 5), cond, negative, 5.0, call, one_by_one=True)


TINY: dict[str, Callable[[], Tiny]] = {
    "sd3": sd3,
    "qwen_image": qwen_image,
    "qwen_image_edit": qwen_image_edit,
    "flux2_klein": flux2_klein,
    "z_image": z_image,
    "wan21": lambda: wan("wan21"),
    "wan22": lambda: wan("wan22"),
    "wan21_i2v": lambda: wan("wan21_i2v"),
    "wan22_i2v": lambda: wan("wan22_i2v"),
    "hunyuan_video": hunyuan_video,
    "hunyuan_video15": hunyuan_video15,
}
