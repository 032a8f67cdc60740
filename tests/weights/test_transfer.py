"""Weights as bytes: round trip, damage, and what is never published."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from user_sys.errors import WireError
from user_sys.weights.transfer import NotFinite, decode, encode_full

arrays = hnp.arrays(
    dtype=st.sampled_from([np.float32, np.float64, np.int64, np.uint8]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
    elements={"allow_nan": False, "allow_infinity": False},
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text("abc.xyz0123", min_size=1, max_size=12), arrays, max_size=4))
def test_what_was_encoded_comes_back_bit_identical(weights: dict[str, np.ndarray]) -> None:
    manifest, payload = encode_full(weights, version=3, updates=70)
    assert (manifest.version, manifest.updates, manifest.size_bytes) == (3, 70, len(payload))
    decoded = decode(manifest, memoryview(payload))
    assert decoded.keys() == weights.keys()
    for name, value in weights.items():
        assert decoded[name].dtype == value.dtype and decoded[name].shape == value.shape
        assert decoded[name].tobytes() == value.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_found(draw: st.DataObject) -> None:
    manifest, payload = encode_full({"w": np.arange(30, dtype=np.float32)}, version=0, updates=0)
    damaged = bytearray(payload)
    damaged[draw.draw(st.integers(0, len(payload) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="digest"):
        decode(manifest, bytes(damaged))
    with pytest.raises(WireError, match="announced"):
        decode(manifest, payload[: draw.draw(st.integers(0, len(payload) - 1))])


def test_bytes_that_are_no_safetensors_are_refused_even_with_the_right_digest() -> None:
    manifest, _ = encode_full({}, version=0, updates=0)
    junk = b"\xff" * 40
    forged = msgspec.structs.replace(
        manifest, size_bytes=len(junk), digest=hashlib.blake2b(junk, digest_size=32).hexdigest()
    )
    with pytest.raises(WireError, match="safetensors"):
        decode(forged, junk)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_never_published(value: float) -> None:
    with pytest.raises(NotFinite, match="mean.bias"):
        encode_full({"ok": np.zeros(3), "mean.bias": np.array([0.0, value])}, version=1, updates=1)
