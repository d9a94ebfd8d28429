"""Safetensors files that are written and read without copies are what the library reads and writes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from shared.models.tensors import NAMES, decode, encode
from shared.weights import store as weight_store
from shared.weights.store import WeightsDamaged, WeightStore


def tensors() -> dict[str, torch.Tensor]:
    """Every type, odd sizes, 0-d, empty, non-contiguous."""
    found = {f"t{i}": torch.arange(3 + 2 * i).to(dtype) for i, dtype in enumerate(NAMES)}
    found |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "turned": torch.randn(3, 5).T, "é": torch.ones(1)}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and value.shape == b[name].shape, name
        assert value.contiguous().view(-1).view(torch.uint8).equal(b[name].contiguous().view(-1).view(torch.uint8)), name


def test_the_library_reads_what_is_written() -> None:
    state = tensors()
    same(safetensors.torch.load(b"".join(encode(state))), state)


def test_what_the_library_writes_is_read() -> None:
    state = {name: value.contiguous() for name, value in tensors().items()}
    same(decode(bytearray(safetensors.torch.save(state, {"note": "x"}))), state)


def test_a_version_is_read_in_place_and_outlives_its_files(tmp_path: Path) -> None:
    store, state = WeightStore(tmp_path, "policy"), {"w": torch.randn(1000), "b": torch.randn(3)}
    store.publish(1, 1, [("model.safetensors", encode(state))])
    [(name, data)] = store.read(1, 1)
    found = decode(data)
    store.publish(1, 2, [("model.safetensors", encode(state))])
    assert store.collect(1, 1) == [1] and not store.path(1, 1).exists()
    same(found, state)
    found["w"] += 1  # a private mapping: the file of others does not change
    same(decode(store.read(1, 2)[0][1]), state)
    assert name == "model.safetensors"


def test_a_slow_reader_keeps_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads for much longer than a lease lasts, while newer versions come and old ones are collected."""
    monkeypatch.setattr(weight_store, "LEASE_S", 0.2)
    store = WeightStore(tmp_path, "policy")
    for version in range(4):
        store.publish(1, version, [("model.safetensors", [bytes([version]) * 100])])
    with store.leased(1, 0, "reader"):
        for _ in range(10):
            time.sleep(0.1)
            store.collect(1, keep=1)
        assert store.versions(1) == [0, 3]
        assert bytes(store.read(1, 0)[0][1]) == bytes(100)
    assert store.collect(1, keep=1) == [0]


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_damage_is_seen(tmp_path: Path, damage: str) -> None:
    store = WeightStore(tmp_path, "policy")
    store.publish(1, 1, [("model.safetensors", encode({"w": torch.randn(100)}))])
    path = store.path(1, 1) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= damage == "flip"
    path.write_bytes(data[:-4] if damage == "cut" else data + bytes(damage == "grow"))
    with pytest.raises(WeightsDamaged, match="does not match its manifest"):
        store.read(1, 1)
    with pytest.raises(FileNotFoundError):
        store.read(1, 2)


def test_what_is_no_file_is_refused() -> None:
    for data in (b"", b"short", b"\x05\0\0\0\0\0\0\0{not}", np.zeros(64, np.uint8).tobytes()):
        with pytest.raises(ValueError, match="safetensors"):
            decode(data)
    with pytest.raises(ValueError, match="tensor z: safetensors has no"):
        encode({"z": torch.zeros(1, dtype=torch.complex64)})
