"""What a field of a Sample may hold as an array: numpy, a dtype that numpy lacks as raw bytes, or a reference to load later."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

RAW_DTYPES = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Item sizes in bytes of the dtypes that numpy has no name for (torch's names)."""


class RawTensor(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A tensor of a dtype in RAW_DTYPES. `data` is its C-contiguous memory as uint8 of shape `(*shape, itemsize)`."""

    data: np.ndarray[Any, Any]
    dtype: str

    def __post_init__(self) -> None:
        size = RAW_DTYPES.get(self.dtype)
        if size is None:
            raise ValueError(f"dtype {self.dtype!r}: legal are {sorted(RAW_DTYPES)}")
        if self.data.dtype != np.uint8 or self.data.ndim < 1 or self.data.shape[-1] != size:
            raise ValueError(f"data of {self.dtype} must be uint8 of shape (*shape, {size}), got {self.data.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape[:-1])


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a body of its own, loaded only where it is used. `checksum` is the xxh3-64 of its bytes, in hex."""

    dtype: str
    shape: tuple[int, ...]
    body: str
    offset: int
    checksum: str


if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:

    class Array(ABC):  # noqa: B024
        """The annotation of every array field; a field that may be spilled can hold a RawTensor or TensorRef instead."""

    for _kind in (np.ndarray, RawTensor, TensorRef):
        Array.register(_kind)
