"""The tensors of a version: digests, limits, and rounding to bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace
from weights_kit import manifest_of, random_weights

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import BF16, Array
from user_sys.errors import WireError
from user_sys.messages import BLOB_BYTES
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.weights.state import NotFinite, build_tensor_set, decode_table, dequantize, from_bf16, quantize, to_bf16

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=8),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
)


@given(FLOATS)
def test_bf16_rounds_as_torch_does_and_stays_finite(values: Array) -> None:
    found = to_bf16(values)
    assert found.dtype == BF16 and found.shape == values.shape
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    restored = from_bf16(found)
    assert np.isfinite(restored).all()
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(restored[finite], expected[finite])


def test_policy_acts_much_the_same_with_bf16_weights() -> None:
    spec = example_spec()
    weights = policy_arrays(MlpPolicy.make_module(spec, settings=MlpSettings((128, 128))))
    exact, rounded = MlpPolicy(spec), MlpPolicy(spec)
    exact.load(weights)
    rounded.load(dequantize(quantize(weights, "bf16"), "bf16"))
    rng = np.random.default_rng(0)
    for _ in range(20):
        observation = example_observation(rng)
        a, b = (p.act(observation, "", deterministic=True).actions for p in (exact, rounded))
        assert np.abs(a - b).max() < 0.02 * (np.asarray(spec.action.high) - np.asarray(spec.action.low)).max()


def test_weights_that_are_not_finite_are_refused_in_any_precision() -> None:
    """0x7FFFFFFF is the NaN of a GPU; rounded up as a number it would become a zero."""
    bits = np.array([[0x7FFFFFFF, 0x7FC00000], [0xFFFFFFFF, 0xFFC00001]], np.uint32)
    for values in bits.view(np.float32).reshape(-1, 1):
        assert np.isnan(from_bf16(to_bf16(values))).all()
        for precision in ("exact", "bf16"):
            with pytest.raises(NotFinite, match="'w'"):
                build_tensor_set(quantize({"w": values.copy()}, precision))  # type: ignore[arg-type]
    assert from_bf16(to_bf16(np.array([np.inf, -np.inf], np.float32))).tolist() == [np.inf, -np.inf]


def test_unchanged_read_only_arrays_are_not_hashed_again() -> None:
    weights = random_weights(1)
    first = build_tensor_set(weights)
    hashed = list[int]()
    second = build_tensor_set({**weights, "steps": np.array(2)}, first, hashed.append)
    assert sum(hashed) == 8 and first.digest != second.digest
    assert build_tensor_set(random_weights(1)).digest == first.digest


def test_large_tensor_is_cut_into_blobs_of_which_only_changed_ones_differ() -> None:
    large = np.zeros(BLOB_BYTES // 2 + 10, np.float32)
    changed = large.copy()
    changed[-1] = 1
    (before,), (after,) = (build_tensor_set({"w": array}).entries for array in (large, changed))
    assert len(before.blobs) == 3
    assert [a == b for a, b in zip(before.blobs, after.blobs, strict=True)] == [True, True, False]


def test_million_tensors_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(WireError, match="1000000 tensors exceed the limits of 32768 tensors"):
        build_tensor_set(dict.fromkeys(map(str, range(1_000_000)), np.zeros(0, np.uint8)))
    with pytest.raises(WireError, match="dtype complex64 is unsupported"):
        build_tensor_set({"w": np.zeros(2, np.complex64)})


def test_table_that_contradicts_its_manifest_is_refused() -> None:
    state = build_tensor_set(random_weights(1))
    manifest = manifest_of(state, 1)
    assert decode_table(manifest, state.table) == state.entries
    for wrong, table in (
        (manifest, state.table[:-1]),
        (manifest, state.table[:-1] + b"!"),
        (replace(manifest, size_bytes=manifest.size_bytes + 1), state.table),
    ):
        with pytest.raises(WireError):
            decode_table(wrong, table)
