"""The Triton kernel of `gpu_copy`. Only torch's GPU builds include Triton, so this module is imported on demand."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def bf16_kernel(source, target, errors, count, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds bits of float32 (count,), as int32, to bfloat16, as int16. Each program takes every n-th block.

    Writes a row of `errors`, float32, per program: its largest error, and the sums of squared errors and squared
    values.
    """
    largest = tl.zeros([BLOCK], tl.float32)
    squared = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        wide = tl.load(source + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
        unbounded = (wide & 0x7F800000) == 0x7F800000
        cut = (wide >> 16) | ((wide & 0xFFFF) != 0).to(tl.uint32)
        rounded = tl.where(unbounded, cut, (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)
        overflown = ((rounded & 0x7F80) == 0x7F80) & ~unbounded
        narrowed = rounded - overflown.to(tl.uint32)
        tl.store(target + at, narrowed.to(tl.int16), mask=at < count)
        value = wide.to(tl.float32, bitcast=True)
        error = tl.abs((narrowed << 16).to(tl.float32, bitcast=True) - value)
        largest = tl.maximum(largest, error)
        squared += error * error
        total += value * value
    row = errors + 3 * tl.program_id(0)
    tl.store(row, tl.max(largest, axis=0))
    tl.store(row + 1, tl.sum(squared, axis=0))
    tl.store(row + 2, tl.sum(total, axis=0))
