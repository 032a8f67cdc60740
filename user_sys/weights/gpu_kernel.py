"""The Triton kernel of `gpu_copy`. Only torch's GPU builds include Triton, so this module is imported on demand."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def bf16_kernel(source, target, count, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds bits of float32 (count,), as int32, to bfloat16, as int16. Each program takes every n-th block."""
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        wide = tl.load(source + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
        unbounded = (wide & 0x7F800000) == 0x7F800000
        cut = (wide >> 16) | ((wide & 0xFFFF) != 0).to(tl.uint32)
        rounded = tl.where(unbounded, cut, (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)
        overflown = ((rounded & 0x7F80) == 0x7F80) & ~unbounded
        tl.store(target + at, (rounded - overflown.to(tl.uint32)).to(tl.int16), mask=at < count)
