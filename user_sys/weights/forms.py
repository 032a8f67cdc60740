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
from user_sys.weights.records import Form
from user_sys.weights.state import BF16, at_once, slices

SCALES = "|int8.scales"
"""Ends the name of the scales that belong to a tensor of integers."""
_ROUNDED_ELEMENTS = 1 << 20  # converted at a time: temporary arrays stay small, and there is room for others in between


class Rounding(NamedTuple):
    """What rounding did to floats: the largest error, the sum of the errors' squares, and that of the values'."""

    largest: float = 0.0
    error_squared: float = 0.0
    total_squared: float = 0.0

    def with_more(self, other: Rounding) -> Rounding:
        """Of both."""
        squares = self.error_squared + other.error_squared, self.total_squared + other.total_squared
        return Rounding(max(self.largest, other.largest), *squares)

    @property
    def rms(self) -> float:
        """The errors' root mean square, relative to that of the values."""
        return (self.error_squared / self.total_squared) ** 0.5 if self.total_squared else 0.0


NOTHING_ROUNDED = Rounding()


def convert(
    arrays: Mapping[str, Array],
    form: Form,
    breathe: Callable[[int], None] = at_once,
    before: Rounding = NOTHING_ROUNDED,
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
        parts, rounding = _quantized(name, array, breathe) if form == "int8" else _narrowed(name, array, breathe)
        converted |= parts
        found = found.with_more(rounding)
    return converted, (found.largest, found.rms)


def restore(arrays: Mapping[str, Array], form: Form) -> dict[str, Array]:
    """What a policy loads: rounded floats as float32, everything else as it is. Exact bfloat16 stays `state.BF16`."""
    if form == "exact":
        return dict(arrays)
    if form == "bf16":
        return {name: widen(array) if array.dtype == BF16 else array for name, array in arrays.items()}
    plain = {name: array for name, array in arrays.items() if not name.endswith(SCALES)}
    return {name: array * arrays[name + SCALES] if name + SCALES in arrays else array for name, array in plain.items()}


def narrow(array: Array) -> Array:
    """Floats as `BF16`, rounded to nearest, ties to even; a finite value beyond its range becomes its largest.

    What is no number stays none: rounding up would make a zero of one whose bits are all set, as GPUs have it.
    """
    bits = np.empty(array.size, np.uint16)
    flat = array.reshape(-1)
    for part in slices(flat.size, _ROUNDED_ELEMENTS):
        wide = np.ascontiguousarray(flat[part], np.float32).view(np.uint32)
        rounded = (wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        unbounded = (wide & np.uint32(0x7F800000)) == 0x7F800000
        overflown = ((rounded & np.uint32(0x7F80)) == 0x7F80) & ~unbounded
        rounded[unbounded] = (wide[unbounded] >> np.uint32(16)) | ((wide[unbounded] & np.uint32(0xFFFF)) != 0)
        bits[part] = rounded - overflown
    return bits.view(BF16).reshape(array.shape)


def widen(array: Array) -> Array:
    """`BF16` as float32, without loss."""
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def is_scaled(array: Array) -> bool:
    """Whether ``int8`` keeps it as integers, and their scales as another tensor."""
    return array.dtype.kind == "f" and array.ndim >= 2


def _scales(array: Array) -> Array:
    """float32, of each index of the last axis; 127 of them are never more than the largest magnitude."""
    largest = np.abs(array).max(axis=tuple(range(array.ndim - 1)), initial=0.0).astype(np.float64)
    scales = (largest / 127).astype(np.float32)
    too_large = 127.0 * scales.astype(np.float64) > largest
    return np.asarray(np.where(too_large, np.nextafter(scales, np.float32(0)), scales))


def _narrowed(name: str, array: Array, breathe: Callable[[int], None]) -> tuple[dict[str, Array], Rounding]:
    flat, bits, found = array.reshape(-1), np.empty(array.size, BF16), NOTHING_ROUNDED
    for part in slices(flat.size, _ROUNDED_ELEMENTS):
        bits[part] = narrow(flat[part])
        found = found.with_more(_error(widen(bits[part]), flat[part]))
        breathe(flat[part].nbytes)
    return {name: bits.reshape(array.shape)}, found


def _quantized(name: str, array: Array, breathe: Callable[[int], None]) -> tuple[dict[str, Array], Rounding]:
    if not is_scaled(array):
        breathe(array.nbytes)
        return {name: array}, _error(array, array)
    columns = array.shape[-1]
    rows, found = array.reshape(math.prod(array.shape[:-1]), columns), NOTHING_ROUNDED
    integers, scales = np.empty(rows.shape, np.int8), _scales(array)
    divisors = np.where(scales > 0, scales, np.float32(1))
    for part in slices(len(rows), max(1, _ROUNDED_ELEMENTS // max(1, columns))):
        integers[part] = np.rint(rows[part] / divisors).clip(-127, 127).astype(np.int8)
        found = found.with_more(_error(integers[part] * scales, rows[part]))
        breathe(rows[part].nbytes)
    return {name: integers.reshape(array.shape), name + SCALES: scales}, found


def _error(restored: Array, array: Array) -> Rounding:
    error = np.subtract(restored, array, dtype=np.float64)
    squares = float(np.sum(error**2)), float(np.sum(np.square(array, dtype=np.float64)))
    return Rounding(float(np.abs(error).max(initial=0.0)), *squares)
