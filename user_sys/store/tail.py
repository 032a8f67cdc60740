"""The segment that takes records: what was appended, what of it is in the file, and what of that is durable."""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from user_sys.checksum import checksum
from user_sys.store.files import Buffer, Files, consume, next_buffers, write_all
from user_sys.store.frame import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    RecordRef,
    SegmentHeader,
    encode_record_header,
    record_bytes,
)
from user_sys.store.sealing import Finished
from user_sys.store.segments import TEMPORARY, SegmentName

JOIN_BELOW_BYTES = 16 << 10  # copying a smaller payload beside its header costs less than two more buffers


class Ticket(NamedTuple):
    """A place in the log: all that was appended before it has been written, and waits for its sync."""

    segment: int
    end: int


@dataclass(eq=False)
class Tail:
    """The thread that appends changes it, but for `fd`, `synced` and `before`, which whoever syncs the log does.

    Attributes:
        first_sequence: the lowest number that its records can have.
        fd: open for reading and writing; -1 while there is no file yet.
        end, written, synced: where the records end that were added, written to the file, made durable.
        flat: the fields of its records' references, one after the other.
        before: the segment before it, while that may not be durable or this one has no file.
    """

    number: int
    first_sequence: int
    fd: int = -1
    end: int = SEGMENT_HEADER_BYTES
    written: int = SEGMENT_HEADER_BYTES
    synced: int = SEGMENT_HEADER_BYTES
    flat: array[int] = field(default_factory=lambda: array("q"))
    before: Tail | None = None
    _pending: deque[Buffer] = field(default_factory=deque)

    @classmethod
    def resumed(cls, found: Finished) -> Tail:
        """What recovery found to be the last segment, all of which is durable."""
        end = found.end
        return cls(found.name.number, found.sequences.start, found.fd, end, end, end, found.flat)

    def create(self, files: Files, path: Path, log_id: bytes, previous_bytes: int) -> None:
        """Makes its file in the log at `path`; the one before ends at `previous_bytes` and is durable. Raises OSError.

        The header is synced before the file gets its name, so that no segment is ever without one; the folder is synced
        before a record goes in, since a record is acknowledged by a sync of its file only.
        """
        target = path / str(SegmentName(self.number))
        temporary = target.with_suffix(TEMPORARY)
        header = SegmentHeader(self.number, self.first_sequence, previous_bytes, time.time_ns(), log_id)
        fd = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(files, fd, [header.encode()], 0)
            files.fsync(fd)
            files.rename(temporary, target)
            files.sync_folder(path)
        except OSError:
            files.close(fd)
            raise
        self.fd = fd

    def add(self, kind: int, payload: Buffer, sequence: int, schema: int) -> RecordRef:
        """Queues a record. A payload that may change is copied."""
        body = bytes(payload)
        ref = RecordRef(self.number, self.end, len(body), kind, sequence, schema)
        header = encode_record_header(ref, checksum(body))
        size = record_bytes(len(body))
        padding = bytes(size - RECORD_HEADER_BYTES - len(body))
        if len(body) < JOIN_BELOW_BYTES:
            self._pending.append(b"".join((header, body, padding)))
        else:
            self._pending.extend(part for part in (header, body, padding) if part)
        self.flat.extend(ref)
        self.end += size
        return ref

    @property
    def pending_bytes(self) -> int:
        """Bytes added that are not in the file yet."""
        return self.end - self.written

    def write(self, files: Files) -> None:
        """Writes what is queued. Raises OSError; what is not written stays queued."""
        while self._pending:
            count = files.pwritev(self.fd, next_buffers(self._pending), self.written)
            consume(self._pending, count)
            self.written += count

    def finished(self, next_sequence: int) -> Finished:
        """It as what is to be sealed; the record after its last one has the number `next_sequence`."""
        name, sequences = SegmentName(self.number), range(self.first_sequence, next_sequence)
        return Finished(name, self.fd, self.end, self.flat, sequences)

    def close(self, files: Files) -> None:
        """Closes its file where it has one."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            files.close(fd)
