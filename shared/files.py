"""What several stores do with files."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash


def sync(path: Path) -> None:
    """Until the file's bytes, or the folder's names, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """XXH3-64 of the file, in hex; read in pieces."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
