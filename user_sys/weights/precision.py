"""Precisions of a version: exact, or rounded for inference if the policy allows it, with the rounding error.

``bf16`` rounds every float to bfloat16 (to nearest, ties to even). ``int8`` stores floats of two and more dimensions as
integers of [-127, 127] with one scale per index of the last axis (largest magnitude / 127): the columns of an
``x @ weight`` layer. All other tensors stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from user_sys.codec import Array
from user_sys.messages import Precision
from user_sys.weights.state import BF16, no_yield, slices

SCALES_SUFFIX = "|int8.scales"
"""Suffix of the tensor that holds the scales of an integer tensor."""
_ELEMENTS_PER_SLICE = (
    1 << 20
)  # converted at a time, so that temporary arrays stay small and the CPU is yielded in between


class RoundingStats(NamedTuple):
    """The error of rounding floats: the largest error, the sum of squared errors, and the sum of squared values."""

    largest: float = 0.0
    error_squared: float = 0.0
    total_squared: float = 0.0

    def merge(self, other: RoundingStats) -> RoundingStats:
        """Combines the statistics of two sets of values."""
        squares = self.error_squared + other.error_squared, self.total_squared + other.total_squared
        return RoundingStats(max(self.largest, other.largest), *squares)

    @property
    def rms(self) -> float:
        """The root mean square of the errors, relative to that of the values."""
        return (self.error_squared / self.total_squared) ** 0.5 if self.total_squared else 0.0


NO_ROUNDING = RoundingStats()


def quantize(
    arrays: Mapping[str, Array],
    form: Precision,
    yield_cpu: Callable[[int], None] = no_yield,
    before: RoundingStats = NO_ROUNDING,
) -> tuple[dict[str, Array], tuple[float, float]]:
    """Converts `arrays` to a precision. Returns them with the (largest, relative root-mean-square) error over all
    floats.

    Args:
        before: the error of arrays that are rounded to ``bf16`` already.
    """
    if form == "exact":
        return dict(arrays), (0.0, 0.0)
    converted: dict[str, Array] = {}
    found = before
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            converted[name] = array
            yield_cpu(array.nbytes)
            continue
        parts, rounding = (
            _quantize_int8(name, array, yield_cpu) if form == "int8" else _quantize_bf16(name, array, yield_cpu)
        )
        converted |= parts
        found = found.merge(rounding)
    return converted, (found.largest, found.rms)


def dequantize(arrays: Mapping[str, Array], form: Precision) -> dict[str, Array]:
    """Returns the arrays that a policy loads: rounded floats as float32, the rest unchanged. Exact bfloat16 stays
    `BF16`.
    """
    if form == "exact":
        return dict(arrays)
    if form == "bf16":
        return {name: from_bf16(array) if array.dtype == BF16 else array for name, array in arrays.items()}
    plain = {name: array for name, array in arrays.items() if not name.endswith(SCALES_SUFFIX)}
    return {
        name: array * arrays[name + SCALES_SUFFIX] if name + SCALES_SUFFIX in arrays else array
        for name, array in plain.items()
    }


def to_bf16(array: Array) -> Array:
    """Rounds floats to `BF16`, to nearest, ties to even. A finite value beyond the range becomes the largest finite
    one.

    NaN stays NaN: rounding up would turn a NaN with all bits set, as GPUs produce, into zero.
    """
    bits = np.empty(array.size, np.uint16)
    flat = array.reshape(-1)
    for part in slices(flat.size, _ELEMENTS_PER_SLICE):
        wide = np.ascontiguousarray(flat[part], np.float32).view(np.uint32)
        rounded = (wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        unbounded = (wide & np.uint32(0x7F800000)) == 0x7F800000
        overflown = ((rounded & np.uint32(0x7F80)) == 0x7F80) & ~unbounded
        rounded[unbounded] = (wide[unbounded] >> np.uint32(16)) | ((wide[unbounded] & np.uint32(0xFFFF)) != 0)
        bits[part] = rounded - overflown
    return bits.view(BF16).reshape(array.shape)


def from_bf16(array: Array) -> Array:
    """Returns `BF16` as float32, without loss."""
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def has_int8_scales(array: Array) -> bool:
    """Whether ``int8`` stores the array as integers with a tensor of scales."""
    return array.dtype.kind == "f" and array.ndim >= 2


def _int8_scales(array: Array) -> Array:
    """Returns the float32 scale per index of the last axis; 127 scales never exceed the largest magnitude."""
    largest = np.abs(array).max(axis=tuple(range(array.ndim - 1)), initial=0.0).astype(np.float64)
    scales = (largest / 127).astype(np.float32)
    too_large = 127.0 * scales.astype(np.float64) > largest
    return np.asarray(np.where(too_large, np.nextafter(scales, np.float32(0)), scales))


def _quantize_bf16(name: str, array: Array, yield_cpu: Callable[[int], None]) -> tuple[dict[str, Array], RoundingStats]:
    flat, bits, found = array.reshape(-1), np.empty(array.size, BF16), NO_ROUNDING
    for part in slices(flat.size, _ELEMENTS_PER_SLICE):
        bits[part] = to_bf16(flat[part])
        found = found.merge(_rounding_stats(from_bf16(bits[part]), flat[part]))
        yield_cpu(flat[part].nbytes)
    return {name: bits.reshape(array.shape)}, found


def _quantize_int8(name: str, array: Array, yield_cpu: Callable[[int], None]) -> tuple[dict[str, Array], RoundingStats]:
    if not has_int8_scales(array):
        yield_cpu(array.nbytes)
        return {name: array}, _rounding_stats(array, array)
    columns = array.shape[-1]
    rows, found = array.reshape(math.prod(array.shape[:-1]), columns), NO_ROUNDING
    integers, scales = np.empty(rows.shape, np.int8), _int8_scales(array)
    divisors = np.where(scales > 0, scales, np.float32(1))
    for part in slices(len(rows), max(1, _ELEMENTS_PER_SLICE // max(1, columns))):
        integers[part] = np.rint(rows[part] / divisors).clip(-127, 127).astype(np.int8)
        found = found.merge(_rounding_stats(integers[part] * scales, rows[part]))
        yield_cpu(rows[part].nbytes)
    return {name: integers.reshape(array.shape), name + SCALES_SUFFIX: scales}, found


def _rounding_stats(restored: Array, array: Array) -> RoundingStats:
    error = np.subtract(restored, array, dtype=np.float64)
    squares = float(np.sum(error**2)), float(np.sum(np.square(array, dtype=np.float64)))
    return RoundingStats(float(np.abs(error).max(initial=0.0)), *squares)
