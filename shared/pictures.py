"""The demo's pictures: coloured shapes on a dark ground, drawn and judged by rule. Numpy only."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

COLOURS = {"red": (0.9, 0.15, 0.15), "green": (0.15, 0.75, 0.2), "blue": (0.15, 0.3, 0.95), "yellow": (0.95, 0.85, 0.1)}
SHAPES = {"disc": (math.pi, 0.0), "square": (4 * 0.86**2, 0.0), "triangle": (1.62, 0.2)}
"""Area over r squared, and how far the centre of mass lies above the centre, over r."""
PROMPTS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
SIZE = 24
"""Pixels of height and width."""
GROUND = 0.12


def coverage(shape: str, x: Array, y: Array, r: Array, size: int = SIZE) -> Array:
    """How much of each pixel a shape of radius r around (x, y) covers: [N, size, size] in 0 … 1."""
    axis = np.arange(size) + 0.5
    dx, dy, r = axis - x[:, None, None], axis[:, None] - y[:, None, None], r[:, None, None]
    if shape == "disc":
        distance = np.sqrt(dx**2 + dy**2) - r
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - 0.86 * r
    else:
        distance = np.maximum(dy - 0.8 * r, (2 * np.abs(dx) - dy - r) / math.sqrt(5))
    return np.clip(0.5 - distance, 0, 1)


def paint(wanted: Sequence[str], rng: np.random.Generator) -> Array:
    """float32 [N, 3, SIZE, SIZE] in 0 … 1 of what each prompt says, at a slightly random place and size."""
    count = len(wanted)
    x, y = SIZE / 2 + 2 * rng.random((2, count)) - 1
    r = SIZE * (0.3 + 0.06 * rng.random(count))
    names = [prompt.split() for prompt in wanted]
    cover = np.concatenate([coverage(n[1], x[i : i + 1], y[i : i + 1], r[i : i + 1]) for i, n in enumerate(names)])
    colour = np.asarray([COLOURS[n[0]] for n in names])[:, :, None, None]
    return np.asarray(GROUND + (colour - GROUND) * cover[:, None], np.float32)


def careless(prompt: str, rng: random.Random) -> str:
    """What a careless painter really paints: the prompt (30 %), the next colour (45 %) or the next shape (25 %)."""
    (colour, shape), draw = prompt.split(), rng.random()
    if draw < 0.30:
        return prompt
    return f"{_next(colour, COLOURS)} {shape}" if draw < 0.75 else f"{colour} {_next(shape, SHAPES)}"


def _next(name: str, names: Iterable[str]) -> str:
    order = list(names)
    return order[(order.index(name) + 1) % len(order)]


def near(pictures: Array, colour: Array) -> Array:
    """Of each pixel [..., 3] how near it is to a colour: 1 within 0.1, 0 beyond 0.5."""
    return np.asarray(np.clip(1.25 - np.sqrt(((pictures - colour) ** 2).sum(-1)) / 0.4, 0, 1))


def likeness(pictures: Array, prompts: Sequence[str]) -> Array:
    """[N] in 0 … 1. `pictures`: [N, size, size, 3] in 0 … 1. ValueError for a prompt that names no known colour and shape.

    The pixels near the wanted colour are compared with each shape, drawn at their centre of mass with their area. The score is
    the intersection over the union with the wanted one, faded to 0 as another shape fits better (margin +0.1 to -0.1).
    """
    wanted = [prompt.split() for prompt in prompts]
    for words in wanted:
        if len(words) != 2 or words[0] not in COLOURS or words[1] not in SHAPES:
            raise ValueError(
                f"prompt {' '.join(words)!r}: must be a colour ({', '.join(COLOURS)}) and a shape ({', '.join(SHAPES)})"
            )
    size = pictures.shape[1]
    axis = np.arange(size) + 0.5
    colour = np.asarray([COLOURS[words[0]] for words in wanted])[:, None, None, :]
    hit = near(pictures, colour)
    area = np.maximum(hit.sum((1, 2)), 1.0)
    x, y = (hit * axis).sum((1, 2)) / area, (hit * axis[:, None]).sum((1, 2)) / area
    overlaps = []
    for shape, (unit, centre) in SHAPES.items():
        r = np.sqrt(area / unit)
        drawn = coverage(shape, x, y - centre * r, r, size)
        overlaps.append(np.minimum(hit, drawn).sum((1, 2)) / np.maximum(hit, drawn).sum((1, 2)))
    table = np.stack(overlaps, 1)
    own = np.asarray([list(SHAPES).index(words[1]) for words in wanted])
    rows = np.arange(len(own))
    best = table.copy()
    best[rows, own] = -1.0
    score = table[rows, own]
    return np.asarray(score * np.clip(0.5 + (score - best.max(1)) / 0.2, 0, 1))
