"""Every dtype and odd array travels bit for bit; anything that is not a valid message is refused as such."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.types.arrays import RAW_DTYPES, Array, RawTensor, TensorRef
from shared.wire import codec
from shared.wire.errors import WireError


class Box(msgspec.Struct):
    value: Array
    name: str = ""


def trip(value: Any) -> Any:
    return codec.decode(codec.encode(Box(value)), Box).value


def check_same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


@given(
    hnp.arrays(
        st.one_of(
            hnp.boolean_dtypes(),
            hnp.integer_dtypes(endianness="?"),
            hnp.unsigned_integer_dtypes(endianness="?"),
            hnp.floating_dtypes(endianness="?"),
            hnp.complex_number_dtypes(endianness="?"),
            hnp.datetime64_dtypes(endianness="?"),
            hnp.byte_string_dtypes(min_len=1, max_len=5),
            hnp.unicode_string_dtypes(min_len=1, max_len=5, endianness="?"),
        ),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
)
@settings(max_examples=300, deadline=None)
def test_any_array(array: Any) -> None:
    check_same(trip(array), array)


@pytest.mark.parametrize(
    "array",
    [
        np.asarray([np.nan, np.inf, -np.inf, -0.0, 0.0, 5e-324]),
        np.frombuffer(struct.pack("<Q", 0x7FF8DEADBEEF0001), np.float64),  # a NaN with a payload
        np.arange(24).reshape(2, 3, 4)[:, ::-1, ::2],
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.asarray(7.5, np.float32),
        np.zeros((0, 3), np.float16),
        np.zeros((3, 0, 2), bool),
        np.longdouble(1) / np.arange(1, 4, dtype=np.longdouble),
        np.arange(5000, dtype=np.float64)[1::3],
    ],
    ids=["special", "nan-payload", "strided", "fortran", "0-d", "empty", "empty-bool", "longdouble", "large-strided"],
)
def test_odd_arrays(array: Any) -> None:
    check_same(trip(array), np.ascontiguousarray(array).reshape(array.shape))


@pytest.mark.parametrize("dtype", sorted(RAW_DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5)])
def test_dtypes_that_numpy_lacks(dtype: str, shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 256, (*shape, RAW_DTYPES[dtype]), np.uint8)
    found = trip(RawTensor(data, dtype))
    assert isinstance(found, RawTensor) and found.dtype == dtype and found.shape == shape
    assert found.data.tobytes() == data.tobytes()


def test_a_reference_travels_as_itself() -> None:
    ref = TensorRef("<f4", (2, 3), "dir:1/x", 64, "ab12")
    assert trip(ref) == ref


def test_decoded_arrays_are_aligned_views_of_the_message() -> None:
    message = codec.encode(Box(np.arange(100_000, dtype=np.float64)))
    found = codec.decode(message, Box).value
    assert found.flags.aligned and not found.flags.writeable and not found.flags.owndata


def test_any_messagepack_reader_opens_a_body() -> None:
    array = np.arange(5, dtype=np.int32)
    schema, tree, segments = msgpack.unpackb(codec.encode(Box(array, "x")))
    assert schema == 1 and tree["value"][:2] == ["<i4", [5]]
    assert segments[2 * tree["value"][2] + 1] == array.tobytes()


@pytest.mark.parametrize("value", [np.asarray([object()]), np.zeros(2, [("a", "<i4")]), object()])
def test_what_cannot_travel_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(WireError, match="cannot travel"):
        codec.encode(Box(value))


MESSAGE = codec.encode(Box(np.arange(64, dtype=np.float32), "name"))


@given(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_damaged_message_is_refused_or_decodes(at: int, byte: int) -> None:
    """Nothing but a WireError comes out of damage; damage inside array data is the body checksum's business."""
    damaged = bytearray(MESSAGE)
    damaged[at] = byte
    with contextlib.suppress(WireError):
        codec.decode(bytes(damaged), Box)


@given(st.integers(0, len(MESSAGE) - 1))
@settings(max_examples=200, deadline=None)
def test_a_cut_message_is_refused(size: int) -> None:
    with pytest.raises(WireError):
        codec.decode(MESSAGE[:size], Box)


def test_deep_nesting_is_refused() -> None:
    bomb = b"\x93\x01" + b"\x91" * 200_000 + b"\xc0" + b"\x90"
    with pytest.raises(WireError):
        codec.decode(bomb, Box)


@pytest.mark.parametrize(
    "array",
    [["|O", [1], 0], ["<f4", [9], 0], ["<f4", [-1], 0], ["<f4", [16], 7], ["<f4", [16], -1], [1, 2], "x"],
)
def test_a_lying_array_is_refused(array: Any) -> None:
    segments = [b"", np.arange(16, dtype=np.float32).tobytes()]
    with pytest.raises(WireError):
        codec.decode(msgpack.packb([1, {"value": array}, segments]), Box)
