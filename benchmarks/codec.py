"""Codec against one memcpy of the payload, alternating, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from shared.types import ARSamplingParams, LatentSegment, Sample, TextSegment
from shared.types.params import DiffusionSamplingParams
from shared.wire import codec


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def latent_sample(size: int) -> Sample:
    params = DiffusionSamplingParams(num_inference_steps=4, height=8, width=8)
    latents = np.random.default_rng(0).standard_normal((2, 5, size // 40), np.float32)
    segment = LatentSegment(
        latents=latents, positions=(0, 1, 2, 3, 4), sigmas=np.linspace(1, 0, 5, dtype=np.float32), sde_indices=(0, 1)
    )
    return Sample.request(["r"], params, n=2, texts=["a cat"]).fill(segment)


def text_sample(tokens: int) -> Sample:
    segment = TextSegment.of([[7] * tokens] * 8)
    return Sample.request(["r"], ARSamplingParams(max_new_tokens=tokens), n=8, texts=["x"], tokens=[[1] * 30]).fill(segment)


def rows() -> list[Row]:
    sample = latent_sample(10_000_000)
    payload = np.random.default_rng(0).integers(0, 256, 10_000_000, np.uint8)
    target = np.empty_like(payload)
    message = codec.encode([sample])
    copies, trips = [], []
    for _ in range(200):
        copies.append(timed(lambda: np.copyto(target, payload)))
        trips.append(timed(lambda: codec.decode(_into(codec.encode_parts([sample])), list[Sample])))
    share = statistics.median(copies) / statistics.median(trips)
    gigabytes = len(message) / statistics.median(trips) / 1e9
    small = text_sample(8)
    body = codec.encode([small])
    encode = statistics.median(timed(lambda: codec.encode([small])) for _ in range(500)) * 1e6
    decode = statistics.median(timed(lambda: codec.decode(body, list[Sample])) for _ in range(500)) * 1e6
    return [
        Row("codec: speed of encode + decode at 10 MB / memcpy", share, 0.9, most=False, note=f"{gigabytes:.1f} GB/s"),
        Row("codec: a group of 8 × 8 tokens, encode, us", encode),
        Row("codec: the same, decode, us", decode),
    ]


def _into(parts: list[Any]) -> memoryview:
    """The message in a buffer that is used again, as a body store's or a pinned batch's is."""
    whole = _BUFFER
    at = 0
    for part in parts:
        whole[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return memoryview(whole.data)[:at]


_BUFFER = np.empty(11_000_000, np.uint8)


if __name__ == "__main__":
    raise SystemExit(publish("codec", rows()) > 0)
