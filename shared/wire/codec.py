"""Bodies: MessagePack with arrays as aligned `bin` segments behind the tree, decoded as views without a copy.

A body is `[schema, tree, [pad, data, pad, data, …]]`. In the tree an array is `[dtype, shape, segment]`, a RawTensor is
`[array of its bytes, dtype]`, a TensorRef is `[dtype, shape, body, offset, checksum]`. The whole
is plain MessagePack: any reader of the format opens it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from shared.types.arrays import Array, RawTensor, TensorRef
from shared.wire.errors import WireError

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

SCHEMA = 1
MAX_BODY = 1 << 30
"""Bytes; a larger message is refused on both sides."""
_KINDS = "biufcmMSU"
_PLAIN = msgspec.msgpack.Encoder()


class _Segments:
    """Arrays of one message in the order in which the encoder meets them."""

    def __init__(self) -> None:
        self.data: list[memoryview] = []

    def place(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in _KINDS:
                raise WireError(f"dtype {value.dtype} cannot travel: legal are numbers, bool, dates and fixed strings")
            return self._add(value, value.dtype.str, value.shape)
        if isinstance(value, np.generic):
            return value.item()
        raise WireError(f"{type(value).__name__} cannot travel in a message")

    def _add(self, data: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> list[Any]:
        flat = np.ascontiguousarray(data).reshape(-1)
        raw: Any = flat.view(np.uint8) if flat.size else b""
        self.data.append(memoryview(raw).cast("B"))
        return [dtype, shape, len(self.data) - 1]


def encode_parts(value: Any) -> list[Buffer]:
    """The message as buffers to be written one after the other; array bytes are not copied."""
    segments = _Segments()
    tree = msgspec.msgpack.Encoder(enc_hook=segments.place).encode(value)
    start = b"\x93" + bytes([SCHEMA]) + tree + b"\xdd" + (2 * len(segments.data)).to_bytes(4, "big")
    out: list[Buffer] = [start]
    position = len(start)
    for data in segments.data:
        align = 64 if data.nbytes >= 4096 else 8
        pad = -(position + 2 + 5) % align
        header = b"\xc4" + bytes([pad]) + bytes(pad) + b"\xc6" + data.nbytes.to_bytes(4, "big")
        out += [header, data]
        position += len(header) + data.nbytes
    if position > MAX_BODY:
        raise WireError(f"message of {position} bytes: the limit is {MAX_BODY}")
    return out


def encode(value: Any) -> bytes:
    """The message as one buffer: one copy of the arrays."""
    return b"".join(encode_parts(value))


def decode(buffer: Buffer, kind: type[T]) -> T:
    """The message as `kind`; its arrays are read-only views of `buffer`. WireError for anything else."""
    if len(buffer) > MAX_BODY:
        raise WireError(f"message of {len(buffer)} bytes: the limit is {MAX_BODY}")
    try:
        schema, tree, segments = _FRAME.decode(buffer)
        if schema != SCHEMA:
            raise WireError(f"schema version {schema}: this mesh reads {SCHEMA}")
        return msgspec.msgpack.decode(tree, type=kind, dec_hook=_Reader(segments).hook)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError, TypeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"not a valid {kind.__name__} message: {error}") from error


_FRAME = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw, list[memoryview]])


@lru_cache(maxsize=256)
def _dtype(name: str) -> np.dtype[Any]:
    kind = np.dtype(name)
    if kind.kind not in _KINDS:
        raise WireError(f"dtype {name}")
    return kind


class _Reader:
    def __init__(self, segments: list[memoryview]) -> None:
        self.segments = segments

    def hook(self, kind: type, value: Any) -> Any:
        if kind is not Array:
            raise WireError(f"{kind} is no wire type")
        if not isinstance(value, list) or len(value) not in (2, 3, 5):
            raise WireError("an array must be [dtype, shape, segment], raw bytes, or a reference")
        if len(value) == 2:
            return RawTensor(self.hook(Array, value[0]), value[1])
        dtype, shape = value[0], tuple(value[1])
        if not isinstance(dtype, str):
            raise WireError("array dtype")
        for side in shape:
            if not isinstance(side, int) or side < 0:
                raise WireError("array shape")
        if len(value) == 5:
            return TensorRef(dtype, shape, *value[2:])
        return self.array(dtype, shape, value[2])

    def array(self, dtype: str, shape: tuple[int, ...], index: int) -> Any:
        if not isinstance(index, int) or not 0 <= 2 * index + 1 < len(self.segments):
            raise WireError(f"array segment {index} does not exist")
        data = self.segments[2 * index + 1]
        kind = _dtype(dtype)
        if kind.itemsize == 0 or not data.nbytes:
            return np.zeros(shape, kind)
        return np.frombuffer(data, kind).reshape(shape)


def pack(value: Any) -> bytes:
    """A small structure without arrays (heads, rows, registrations) as plain MessagePack."""
    return _PLAIN.encode(value)


def unpack(buffer: Buffer, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(buffer, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a valid {kind.__name__}: {error}") from error
