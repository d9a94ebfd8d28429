"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC'11), vectorized over rows.

Token t of a sample with seed s draws `uniform(s, t)`: it depends on nothing else, so neither on the batch nor on the worker.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds on arrays of 32-bit words held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: Words, index: int | Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 [rows] in [0, 1) with 53 random bits: draw number `index` (one for all, or one a row) of each seed."""
    zero, number = np.zeros_like(seeds), np.asarray(index, np.uint64)
    counter = (zero + (number & _LOW), zero + (number >> _HALF), zero, zero)
    high, low, _, _ = philox(counter, (seeds & _LOW, seeds >> _HALF))
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def sample_seed(job_seed: int, sample_id: str) -> int:
    """64 bits from the job's seed and the id, which holds root, sibling and turn, but not the issue."""
    digest = hashlib.blake2b(f"{job_seed}::{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
