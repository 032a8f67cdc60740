"""What a full outbox may give up, and its durable note of what it gave up.

Each record of an outbox carries marks in its `schema`, so that episodes are told apart without reading their chunks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Literal, Self

import msgspec
from crc32c import crc32c

from hal.undecodable import UNDECODABLE
from user_sys.episode import Phase, Source, open_chunk
from user_sys.store.files import Files, replace_durably
from user_sys.store.log import RecordRef

logger = logging.getLogger(__name__)

WhenFull = Literal["pause", "drop_oldest_autonomous"]
_FIRST, _LAST, _KEPT = 1, 2, 4
_MARKS = _FIRST | _LAST | _KEPT
_CRC_BYTES = 4


def mark(packet: bytes) -> int:
    """What the outbox must know of a chunk: its episode's fingerprint, and the marks first, last, and to be kept.

    Everything is kept but what a policy alone did online: demonstrations, evaluations, steps in which a person took
    part, and chunks that do not say who was in control. Raises WireError for what is no chunk.
    """
    chunk = open_chunk(packet)
    header, phase = chunk.header, chunk.column("phase")
    autonomous = header.source is Source.ONLINE and phase is not None and bool((phase == Phase.POLICY).all())
    marks = _FIRST * (header.index == 0) | _LAST * (header.end is not None) | _KEPT * (not autonomous)
    return crc32c(header.episode.encode()) & ~_MARKS | marks


def oldest_autonomous(
    waiting: Sequence[RecordRef], offered: int, recording: Iterable[int], need_bytes: int
) -> list[RecordRef]:
    """The chunks of as many of the oldest episodes as free `need_bytes`, or of all that may go.

    An episode may go when it is whole in `waiting`, a policy alone acted in it, and none of it was sent.

    Args:
        waiting: in order.
        offered: chunks up to this sequence were handed to the tunnel.
        recording: marks of chunks that are being recorded; their episodes stay.
    """
    episodes: dict[int, list[RecordRef]] = {}
    for ref in waiting:
        episodes.setdefault(ref.schema & ~_MARKS, []).append(ref)
    stay = {schema & ~_MARKS for schema in recording}
    if waiting and not waiting[-1].schema & _LAST:
        stay.add(waiting[-1].schema & ~_MARKS)
    found: list[RecordRef] = []
    freed = 0
    for name, chunks in episodes.items():
        whole = chunks[0].schema & _FIRST and chunks[0].sequence > offered
        if freed < need_bytes and whole and name not in stay and not any(ref.schema & _KEPT for ref in chunks):
            found += chunks
            freed += sum(ref.length for ref in chunks)
    return found


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """What an outbox has dropped since it was made.

    Attributes:
        ranges: (first, last) sequence numbers of dropped chunks that its log may still hold; ascending.
    """

    episodes: int = 0
    chunks: int = 0
    size_bytes: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def sequences(self) -> Set[int]:
        return {sequence for first, last in self.ranges for sequence in range(first, last + 1)}

    def and_also(self, chunks: Sequence[RecordRef], unreclaimed: Set[int]) -> Self:
        """With `chunks`; of those dropped before, the log still holds `unreclaimed`."""
        return type(self)(
            episodes=self.episodes + sum(ref.schema & _FIRST for ref in chunks),
            chunks=self.chunks + len(chunks),
            size_bytes=self.size_bytes + sum(ref.length for ref in chunks),
            ranges=_ranges({ref.sequence for ref in chunks} | unreclaimed),
        )


def _ranges(sequences: Set[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for sequence in sorted(sequences):
        if found and found[-1][1] == sequence - 1:
            found[-1] = (found[-1][0], sequence)
        else:
            found.append((sequence, sequence))
    return tuple(found)


def read_dropped(files: Files, path: Path) -> Dropped:
    """The note at `path`. One that is damaged counts as none: what it named and is still there is sent after all."""
    try:
        fd = files.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return Dropped()
    try:
        raw = files.pread(fd, files.size(fd), 0)
    finally:
        files.close(fd)
    body = raw[_CRC_BYTES:]
    if body and crc32c(body) == int.from_bytes(raw[:_CRC_BYTES], "little"):  # of nothing it is 0
        with contextlib.suppress(*UNDECODABLE):
            return msgspec.msgpack.decode(body, type=Dropped)
    logger.error("outbox.note-damaged path=%s: chunks that were dropped may be sent", path)
    return Dropped()


def write_dropped(files: Files, path: Path, dropped: Dropped) -> None:
    """Replaces the note; it is durable on return, and after a crash the old one or the new. Raises OSError."""
    body = msgspec.msgpack.encode(dropped)
    replace_durably(files, path, crc32c(body).to_bytes(_CRC_BYTES, "little") + body)
