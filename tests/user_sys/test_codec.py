"""Packets: round trips, and WireError for any invalid bytes."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from user_sys.codec import (
    ALIGN_BYTES,
    DTYPES,
    MAX_CACHED_LAYOUTS,
    PacketLayout,
    decode_packet,
    encode_packet,
    parse_packet,
)
from user_sys.errors import WireError


class NoteRecord(msgspec.Struct, frozen=True):
    text: str
    number: int = 0


ARRAYS = st.dictionaries(
    st.text(max_size=20),
    st.sampled_from(sorted(DTYPES)).flatmap(
        lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    ),
    max_size=5,
)


@given(text=st.text(), arrays=ARRAYS)
def test_packet_round_trip(text: str, arrays: dict[str, np.ndarray]) -> None:
    note, decoded = decode_packet(encode_packet(NoteRecord(text, 7), arrays), NoteRecord)
    assert note == NoteRecord(text, 7)
    assert list(decoded) == list(arrays)
    for name, array in arrays.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].shape == array.shape
        assert decoded[name].tobytes() == array.tobytes()


def test_arrays_are_read_only_aligned_views() -> None:
    packet = encode_packet(NoteRecord("a"), {"x": np.arange(3.0), "y": np.ones((2, 2), np.uint8)})
    start = np.frombuffer(packet, np.uint8).__array_interface__["data"][0]
    _, arrays = decode_packet(packet, NoteRecord)
    for array in arrays.values():
        assert not array.flags.writeable
        assert (array.__array_interface__["data"][0] - start) % ALIGN_BYTES == 0


def test_strided_array_is_copied_in_order() -> None:
    grid = np.arange(12).reshape(3, 4)[:, ::2]
    _, arrays = decode_packet(encode_packet(NoteRecord("a"), {"grid": grid}), NoteRecord)
    assert np.array_equal(arrays["grid"], grid)


@given(st.binary(max_size=300))
def test_invalid_bytes_are_refused(garbage: bytes) -> None:
    with pytest.raises(WireError):
        decode_packet(b"USP2" + garbage, NoteRecord)
    with pytest.raises(WireError):
        decode_packet(garbage, NoteRecord)


@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_wrong_byte_never_reads_outside_the_packet(position: int, value: int) -> None:
    packet = bytearray(encode_packet(NoteRecord("hello", 3), {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}))
    packet[position % len(packet)] = value
    try:
        _, arrays = decode_packet(bytes(packet), NoteRecord)
    except WireError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(packet)


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_truncated_packet_is_refused(length: int) -> None:
    packet = encode_packet(NoteRecord("hello"), {"x": np.zeros(64)})
    assert length < len(packet)
    with pytest.raises(WireError):
        decode_packet(packet[:length], NoteRecord)


@pytest.mark.parametrize("dtype", ["object", "datetime64[s]", "complex64"])
def test_unsupported_dtype_is_refused_by_the_encoder(dtype: str) -> None:
    with pytest.raises(WireError, match="dtype"):
        encode_packet(NoteRecord("a"), {"x": np.zeros(2, dtype)})


def test_equal_layouts_are_shared_and_fingerprints_differ() -> None:
    def layout(text: str, rows: int) -> PacketLayout:
        return parse_packet(
            encode_packet(NoteRecord(text), {"x": np.zeros((rows, 3)), "y": np.ones(rows, bool)})
        ).layout

    assert layout("a", 4) is layout("another", 4)
    assert layout("a", 4).fingerprint == layout("b", 4).fingerprint != layout("a", 5).fingerprint


@pytest.mark.parametrize(
    "layout",
    [
        [("x", "float32", (1 << 40,))],
        [("x", "float32", (1 << 29, 1 << 29, 1 << 29))],
        [("x", "float64", (2, 0, 1 << 30, 1 << 30)), ("y", "uint8", (64,))],
        [("x", "float32", (-1,))],
        [("x", "float32", (1,) * 9)],
        [("x", "object", (1,))],
        [("x", "uint8", (64,)), ("x", "uint8", (64,))],
        [("x", "uint8", (65,))],
        [("x", "uint8", ("64",))],
        "xyz",
    ],
)
def test_inconsistent_layout_is_refused(layout: object) -> None:
    record, raw = msgspec.msgpack.encode(NoteRecord("a")), msgspec.msgpack.encode(layout)
    head = struct.pack("<4sII", b"USP2", len(record), len(raw)) + record + raw
    packet = head + bytes(-len(head) % 64) + bytes(64)
    with pytest.raises(WireError):
        parse_packet(packet)


def test_layout_cache_is_bounded() -> None:
    packets = [encode_packet(NoteRecord("a"), {f"column-{n}": np.zeros(1)}) for n in range(3 * MAX_CACHED_LAYOUTS)]
    layouts = [parse_packet(packet).layout for packet in packets]
    newest_first = zip(packets[::-1], layouts[::-1], strict=True)
    assert 0 < sum(parse_packet(packet).layout is layout for packet, layout in newest_first) <= MAX_CACHED_LAYOUTS
    names = {f"a-long-name-of-column-{n}": np.zeros(1) for n in range(300)}
    long = encode_packet(NoteRecord("a"), names)
    assert len(parse_packet(long).arrays()) == 300
    assert parse_packet(long).layout is not parse_packet(long).layout


def test_record_of_another_type_is_refused() -> None:
    class Other(msgspec.Struct, frozen=True):
        text: int

    with pytest.raises(WireError, match="Other"):
        decode_packet(encode_packet(NoteRecord("a"), {}), Other)
