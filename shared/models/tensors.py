"""The safetensors format without copies: what is written are views of the tensors, what is read are views of the file.

(The library's own functions build the whole file in memory first, and read it a second time after its checksum.)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shared.wire.codec import Buffer

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def encode(state: Mapping[str, Tensor]) -> list[Buffer]:
    """A safetensors file in pieces: its header, then a view of each tensor, which must not change until it is written.

    ValueError names a tensor of a type that the format does not have.
    """
    header: dict[str, Any] = {}
    pieces: list[Buffer] = []
    at = 0
    for name, value in state.items():
        if value.dtype not in NAMES:
            raise ValueError(f"tensor {name}: safetensors has no {value.dtype}")
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [at, at + flat.numel()]}
        at += flat.numel()
        if flat.numel():
            pieces.append(flat.numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *pieces]


def decode(data: Buffer) -> dict[str, Tensor]:
    """Tensors that are views of a file's bytes (writable ones: a private mapping). ValueError if it is no safetensors file."""
    view = memoryview(data)
    if len(view) < 8:
        raise ValueError(f"{len(view)} bytes are no safetensors file")
    (size,) = struct.unpack("<Q", view[:8])
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except ValueError as error:
        raise ValueError(f"no safetensors header: {error}") from error
    out: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, (low, high) = DTYPES[entry["dtype"]], entry["data_offsets"]
        start = 8 + size + low
        if high == low:
            out[name] = torch.empty(entry["shape"], dtype=dtype)
        elif start % dtype.itemsize:  # other writers may leave tensors unaligned
            out[name] = torch.frombuffer(bytearray(view[start : 8 + size + high]), dtype=dtype).reshape(entry["shape"])
        else:
            count = (high - low) // dtype.itemsize
            out[name] = torch.frombuffer(view, dtype=dtype, count=count, offset=start).reshape(entry["shape"])
    return out
