"""How one blob is encoded, and the cache of blobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from user_sys.errors import WireError
from user_sys.weights.catalog import BlobCache, BlobCacheFull, decode_blob, encode_blob

RNG = np.random.default_rng(0)


def as_blob(array: np.ndarray) -> memoryview:
    return memoryview(array.tobytes())


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_any_blob_survives_its_encoding(content: bytes, base: bytes, width: int, is_similar: bool) -> None:
    base = content[:-1] + b"!" if is_similar and content else base
    encoded = encode_blob(memoryview(content), b"base", memoryview(base), width)
    assert bytes(decode_blob(encoded, len(content), memoryview(base))) == content
    assert len(encoded.payload) <= len(content)


@pytest.mark.parametrize(
    ("dtype", "share", "codec", "times"),
    [(np.uint16, 0.01, "xor", 40), (np.float32, 0.01, "xor", 15), (np.float32, 1.0, "xor", 1.3), (None, 1.0, "raw", 1)],
)
def test_smallest_encoding_is_chosen(dtype: type | None, share: float, codec: str, times: float) -> None:
    """A difference of few values, and one of all values by a small step; values without a relation travel raw."""
    if dtype is np.uint16:
        old = RNG.integers(0x3B80, 0x4380, 1 << 20).astype(np.uint16)
        step = RNG.integers(0, 2, old.size).astype(np.uint16) * 2 - 1
        new = np.where(RNG.random(old.size) < share, old + step, old).astype(np.uint16)
    else:
        old = RNG.normal(size=1 << 19).astype(np.float32)
        fresh = RNG.normal(size=old.size).astype(np.float32) if dtype is None else old * np.float32(1.0001)
        new = np.where(RNG.random(old.size) < share, fresh, old).astype(np.float32)
    encoded = encode_blob(as_blob(new), b"base", as_blob(old), new.itemsize)
    assert encoded.codec == codec
    assert new.nbytes >= times * len(encoded.payload)


def test_damaged_encoding_is_refused() -> None:
    old, new = as_blob(np.zeros(1000, np.float32)), as_blob(np.eye(1000, 1, dtype=np.float32))
    encoded = encode_blob(new, b"base", old, 4)
    assert encoded.codec in ("xor", "zstd")
    for damaged, size, base in (
        (replace(encoded, payload=encoded.payload[:-1]), 4000, old),
        (replace(encoded, payload=memoryview(b"no zstd")), 4000, old),
        (encoded, 4001, old),
        (replace(encoded, codec="xor", planes=3), 4000, old),
        (replace(encoded, codec="xor"), 4000, None),
        (replace(encoded, codec="raw"), 4000, old),
    ):
        with pytest.raises(WireError):
            decode_blob(damaged, size, base)


def digest_of(content: memoryview) -> bytes:
    return blake3(content).digest()


def test_cache_is_bound_in_bytes_and_drops_encoded_blobs_first() -> None:
    cache = BlobCache(max_bytes=10_000)
    blobs = [as_blob(np.full(1000, n, np.float32)) for n in range(3)]
    for blob in blobs[:2]:
        cache.put(digest_of(blob), blob)
    first = cache.encoded(digest_of(blobs[0]), digest_of(blobs[1]), 4)
    assert first is cache.encoded(digest_of(blobs[0]), digest_of(blobs[1]), 4), "it is computed once"
    with pytest.raises(BlobCacheFull, match="the cache of weights is full"):
        cache.put(digest_of(blobs[2]), blobs[2])
    cache.retain({digest_of(blobs[0])})
    assert len(cache) == 1 and cache.size_bytes == 4000
    cache.put(digest_of(blobs[2]), blobs[2])


def test_unknown_base_and_unknown_blob() -> None:
    cache, blob = BlobCache(), as_blob(RNG.normal(size=1000))
    assert cache.encoded(digest_of(blob), b"", 8) is None
    cache.put(digest_of(blob), blob)
    found = cache.encoded(digest_of(blob), b"x" * 32, 8)
    assert found is not None and found.base == b"" and found.codec == "raw"
