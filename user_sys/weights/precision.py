"""Forms of a version: exact, or rounded for inference where the policy allows it, with the error that this makes.

``bf16`` rounds every float to bfloat16 (to nearest, ties to even). ``int8`` keeps floats of two and more dimensions as
integers of [-127, 127] and one scale for each index of the last axis (largest magnitude / 127; the columns of a
``x @ weight`` layer), and everything else as it is.
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
"""Ends the name of the scales that belong to a tensor of integers."""
_ELEMENTS_PER_SLICE = (
    1 << 20
)  # converted at a time: temporary arrays stay small, and there is room for others in between


class RoundingStats(NamedTuple):
    """What rounding did to floats: the largest error, the sum of the errors' squares, and that of the values'."""

    largest: float = 0.0
    error_squared: float = 0.0
    total_squared: float = 0.0

    def merge(self, other: RoundingStats) -> RoundingStats:
        """Of both."""
        squares = self.error_squared + other.error_squared, self.total_squared + other.total_squared
        return RoundingStats(max(self.largest, other.largest), *squares)

    @property
    def rms(self) -> float:
        """The errors' root mean square, relative to that of the values."""
        return (self.error_squared / self.total_squared) ** 0.5 if self.total_squared else 0.0


NO_ROUNDING = RoundingStats()


def quantize(
    arrays: Mapping[str, Array],
    form: Precision,
    breathe: Callable[[int], None] = no_yield,
    before: RoundingStats = NO_ROUNDING,
) -> tuple[dict[str, Array], tuple[float, float]]:
    """`arrays` in another form, and its (largest, relative root-mean-square) error over all floats.

    Args:
        before: of those that come rounded to ``bf16`` already.
    """
    if form == "exact":
        return dict(arrays), (0.0, 0.0)
    converted: dict[str, Array] = {}
    found = before
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            converted[name] = array
            breathe(array.nbytes)
            continue
        parts, rounding = (
            _quantize_int8(name, array, breathe) if form == "int8" else _quantize_bf16(name, array, breathe)
        )
        converted |= parts
        found = found.merge(rounding)
    return converted, (found.largest, found.rms)


def dequantize(arrays: Mapping[str, Array], form: Precision) -> dict[str, Array]:
    """What a policy loads: rounded floats as float32, everything else as it is. Exact bfloat16 stays `state.BF16`."""
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
    """Floats as `BF16`, rounded to nearest, ties to even; a finite value beyond its range becomes its largest.

    What is no number stays none: rounding up would make a zero of one whose bits are all set, as GPUs have it.
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
    """`BF16` as float32, without loss."""
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def has_int8_scales(array: Array) -> bool:
    """Whether ``int8`` keeps it as integers, and their scales as another tensor."""
    return array.dtype.kind == "f" and array.ndim >= 2


def _int8_scales(array: Array) -> Array:
    """float32, of each index of the last axis; 127 of them are never more than the largest magnitude."""
    largest = np.abs(array).max(axis=tuple(range(array.ndim - 1)), initial=0.0).astype(np.float64)
    scales = (largest / 127).astype(np.float32)
    too_large = 127.0 * scales.astype(np.float64) > largest
    return np.asarray(np.where(too_large, np.nextafter(scales, np.float32(0)), scales))


def _quantize_bf16(name: str, array: Array, breathe: Callable[[int], None]) -> tuple[dict[str, Array], RoundingStats]:
    flat, bits, found = array.reshape(-1), np.empty(array.size, BF16), NO_ROUNDING
    for part in slices(flat.size, _ELEMENTS_PER_SLICE):
        bits[part] = to_bf16(flat[part])
        found = found.merge(_rounding_stats(from_bf16(bits[part]), flat[part]))
        breathe(flat[part].nbytes)
    return {name: bits.reshape(array.shape)}, found


def _quantize_int8(name: str, array: Array, breathe: Callable[[int], None]) -> tuple[dict[str, Array], RoundingStats]:
    if not has_int8_scales(array):
        breathe(array.nbytes)
        return {name: array}, _rounding_stats(array, array)
    columns = array.shape[-1]
    rows, found = array.reshape(math.prod(array.shape[:-1]), columns), NO_ROUNDING
    integers, scales = np.empty(rows.shape, np.int8), _int8_scales(array)
    divisors = np.where(scales > 0, scales, np.float32(1))
    for part in slices(len(rows), max(1, _ELEMENTS_PER_SLICE // max(1, columns))):
        integers[part] = np.rint(rows[part] / divisors).clip(-127, 127).astype(np.int8)
        found = found.merge(_rounding_stats(integers[part] * scales, rows[part]))
        breathe(rows[part].nbytes)
    return {name: integers.reshape(array.shape), name + SCALES_SUFFIX: scales}, found


def _rounding_stats(restored: Array, array: Array) -> RoundingStats:
    error = np.subtract(restored, array, dtype=np.float64)
    squares = float(np.sum(error**2)), float(np.sum(np.square(array, dtype=np.float64)))
    return RoundingStats(float(np.abs(error).max(initial=0.0)), *squares)
