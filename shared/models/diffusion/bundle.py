"""A denoising model as the trainer holds it: what is trained, and its family. Encoders and VAE stay with the rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.models.diffusion.family import Family


@dataclass
class DiffusionBundle:
    model: Any
    """The trained part of a diffusers pipeline."""
    family: Family
    tied: frozenset[str] = frozenset()
    """State-dict names that are views of others: there are none."""
