"""`python -m shared.models.diffusion.sheet FOLDER BEFORE AFTER FILE`: the demo's contact sheet as PNG, in a process with torch.

What the pipeline of FOLDER makes, left with the weights of the version BEFORE, right with those of AFTER: a row a prompt,
and the same noise on both sides.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from shared.models.ar.bundle import assign
from shared.models.diffusion.bundle import load_pipeline
from shared.models.diffusion.sd3 import SD3
from shared.pictures import PROMPTS, SIZE
from shared.sde import loop
from shared.sde.sigmas import static_sigmas

COLUMNS, STEPS, SHIFT, ZOOM = 8, 8, 3.0, 2


@torch.no_grad()
def pictures(pipe: Any) -> np.ndarray[Any, Any]:
    """uint8 [prompts, COLUMNS, SIZE, SIZE, 3], without noise on the way."""
    family = SD3()
    prompts = [prompt for prompt in PROMPTS for _ in range(COLUMNS)]
    cond = family.encode(pipe, prompts)
    names = [f"sheet/{i}" for i in range(len(prompts))]
    x = loop.initial_noise(12345, names, family.latent_shape(pipe, SIZE, SIZE))
    sigmas = torch.from_numpy(static_sigmas(STEPS, SHIFT))
    found = loop.sample(
        lambda x, sigma: family.velocity(pipe.transformer, x, sigma, cond), x, sigmas, "flow", 0.0, (), lambda i: x
    )
    pixels = (family.decode(pipe, found.final) / 2 + 0.5).clamp(0, 1).movedim(1, -1).mul(255).round().to(torch.uint8)
    return np.asarray(pixels.reshape(len(PROMPTS), COLUMNS, SIZE, SIZE, 3).numpy())


def main() -> None:
    folder, *versions, target = map(Path, sys.argv[1:5])
    pipe, halves = load_pipeline(folder), list[Any]()
    for version in versions:
        assign(pipe.transformer, {n: v for path in version.glob("*.safetensors") for n, v in load_file(path).items()})
        halves.append(pictures(pipe).transpose(0, 2, 1, 3, 4).reshape(len(PROMPTS) * SIZE, COLUMNS * SIZE, 3))
    gap = np.full((len(PROMPTS) * SIZE, SIZE // 2, 3), 255, np.uint8)
    sheet = Image.fromarray(np.concatenate([halves[0], gap, halves[1]], 1))
    sheet.resize((sheet.width * ZOOM, sheet.height * ZOOM), Image.Resampling.NEAREST).save(target, optimize=True)


if __name__ == "__main__":
    main()
