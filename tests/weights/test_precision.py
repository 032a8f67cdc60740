"""Rounded forms: what they keep, how far they are off, and that they say so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from user_sys.algorithms.rlpd import Rlpd
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.codec import Array
from user_sys.messages import Precision
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.weights.precision import dequantize, from_bf16, quantize, to_bf16
from user_sys.weights.state import BF16, SLICE_BYTES, NotFinite, build_tensor_set

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=8),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_large_tensor_is_rounded_in_slices_with_room_for_others_between(form: Precision) -> None:
    values = np.random.default_rng(0).standard_normal((3000, 1001)).astype(np.float32)
    done: list[int] = []
    converted, (largest, rms) = quantize({"w": values, "steps": np.arange(3)}, form, done.append)
    assert sum(done) == values.nbytes + 3 * 8 and max(done) <= SLICE_BYTES
    error = dequantize(converted, form)["w"].astype(np.float64) - values
    assert largest == np.abs(error).max()
    assert rms == pytest.approx(np.sqrt(np.mean(error**2) / np.mean(values.astype(np.float64) ** 2)))


@settings(max_examples=200, deadline=None)
@given(FLOATS)
def test_bf16_rounds_as_torch_does_and_stays_finite(values: Array) -> None:
    found = to_bf16(values)
    assert found.dtype == BF16 and found.shape == values.shape
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    restored = from_bf16(found)
    assert np.isfinite(restored).all()
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(restored[finite], expected[finite])


@settings(max_examples=100, deadline=None)
@given(FLOATS.filter(lambda values: values.ndim >= 2))
def test_int8_is_off_by_half_a_step_of_its_column_at_most(values: Array) -> None:
    converted, (largest, _) = quantize({"w": values}, "int8")
    restored = dequantize(converted, "int8")["w"]
    scales = np.abs(values).max(axis=tuple(range(values.ndim - 1))) / 127
    assert np.all(np.abs(restored.astype(np.float64) - values) <= 0.5001 * scales + 1e-30)
    assert largest == pytest.approx(np.abs(restored.astype(np.float64) - values).max(), rel=1e-3, abs=1e-30)


def test_what_is_no_float_and_what_is_a_vector_stays() -> None:
    weights = {
        "n": np.array(7),
        "bias": np.ones(3, np.float32) / 3,
        "w": np.array([[0.3, 0.1], [0.04, 0.2]], np.float32),
    }
    for form in ("exact", "bf16", "int8"):
        converted, errors = quantize(weights, form)  # type: ignore[arg-type]
        restored = dequantize(converted, form)  # type: ignore[arg-type]
        assert restored.keys() == weights.keys() and restored["n"] == 7
        assert build_tensor_set(converted, form).size_bytes <= build_tensor_set(dict(weights)).size_bytes + 8  # type: ignore[arg-type]
        assert (errors == (0.0, 0.0)) is (form == "exact")
        if form == "int8":
            np.testing.assert_array_equal(restored["bias"], weights["bias"])


@pytest.mark.parametrize(("form", "smaller", "error"), [("bf16", 1.9, 0.003), ("int8", 3.0, 0.01)])
def test_the_policy_acts_much_the_same_with_a_rounded_form(form: str, smaller: float, error: float) -> None:
    spec = example_spec()
    weights = Rlpd(RlpdConfig(actor_hidden=(128, 128)), spec, seed=0).policy_weights()
    exact, rounded = MlpPolicy(spec), MlpPolicy(spec)
    exact.load(weights)
    converted, (_, rms) = quantize(weights, form)  # type: ignore[arg-type]
    rounded.load(dequantize(converted, form))  # type: ignore[arg-type]
    assert 0 < rms < error
    size = build_tensor_set(converted, form).size_bytes  # type: ignore[arg-type]
    assert size * smaller < sum(array.nbytes for array in weights.values())
    rng = np.random.default_rng(0)
    for _ in range(20):
        observation = example_observation(rng)
        a, b = (p.act(observation, "", deterministic=True).actions for p in (exact, rounded))
        assert np.abs(a - b).max() < 0.02 * (np.asarray(spec.action.high) - np.asarray(spec.action.low)).max()


def test_what_is_no_number_is_none_in_any_form_and_stays_at_its_source() -> None:
    """0x7FFFFFFF is what a GPU gives; rounded up as if it were a number it would become a zero."""
    bits = np.array([[0x7FFFFFFF, 0x7FC00000], [0xFFFFFFFF, 0xFFC00001]], np.uint32)
    for values in bits.view(np.float32).reshape(-1, 1):
        assert np.isnan(from_bf16(to_bf16(values))).all()
        for form in ("exact", "bf16"):
            with pytest.raises(NotFinite):
                build_tensor_set(quantize({"w": values.reshape(1, 1)}, form)[0], form)  # type: ignore[arg-type]
    assert from_bf16(to_bf16(np.array([np.inf, -np.inf], np.float32))).tolist() == [np.inf, -np.inf]
