"""CRC-32C of bytes that are in memory."""

from __future__ import annotations

from crc32c import crc32c

HELD_BYTES = 1 << 20


def checksum(body: bytes | bytearray | memoryview) -> int:
    """CRC-32C of contiguous bytes; keeps the interpreter for up to `HELD_BYTES` of them, which takes 0.1 ms at most.

    `crc32c` itself lets go of it from 32 KiB on, to have it back, beside a busy thread, only after that one's time
    slice: milliseconds for a sum of microseconds. Bytes of a file that is mapped may have to be read first; for those
    letting go is right.
    """
    return crc32c(body, 0, 0 if len(body) <= HELD_BYTES else -1)
