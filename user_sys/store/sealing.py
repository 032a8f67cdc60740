"""Sealing a segment that is full: after its last record come index, summary and trailer, and it never changes again.

A crash in the middle leaves records that were durable before, and bytes after them that are no trailer. The next writer
finds the segment unsealed, cuts those bytes off and seals it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from user_sys.store.files import Files, write_all
from user_sys.store.footer import Footer, Records, copy_footer, encode_footer
from user_sys.store.frame import (
    RECORD_HEADER_BYTES,
    RecordRef,
    SegmentScan,
    aligned,
)
from user_sys.store.manifest import Entry
from user_sys.store.segments import SegmentName, read_header

Summarise = Callable[[Iterable[tuple[RecordRef, memoryview]]], bytes]


@dataclass(frozen=True, eq=False)
class Finished:
    """A segment that gets no more records and is durable up to `end`, which is a multiple of 8.

    Attributes:
        fd: open for writing; whoever seals it closes it.
        flat: the fields of its records' references, one after the other.
        sequences: from its first number to the first number after it.
    """

    name: SegmentName
    fd: int
    end: int
    flat: array[int]
    sequences: range


def seal(files: Files, path: Path, finished: Finished, summarise: Summarise | None) -> Entry:
    """Writes the footer and makes it durable; the manifest may list the segment from then on.

    The sync is what a manifest that lists it relies on: else a power cut could leave a listed segment without footer. A
    log whose owner summarises its records keeps a copy of the footer beside the file.

    Raises:
        OSError: the footer could not be written. It may be tried again, unless it was the sync that failed.
    """
    name, fd = finished.name, finished.fd
    records = Records.from_flat(name.number, finished.flat)
    summary = summary_of(files, fd, finished.end, records, summarise)
    if files.size(fd) > finished.end:
        files.ftruncate(fd, finished.end)
    encoded = encode_footer(name, records, summary, finished.end, finished.sequences)
    size = write_all(files, fd, encoded, finished.end)
    files.fdatasync(fd)
    if summarise is not None:
        copy_footer(files, path, name, encoded)
    footer = Footer(records, summary, finished.end, finished.sequences.start, finished.sequences.stop, size)
    return Entry.of(name, footer)


def summary_of(files: Files, fd: int, end: int, records: Records, summarise: Summarise | None) -> bytes:
    """What the owner says of the records of a file whose first `end` bytes hold them; empty where it says nothing."""
    if summarise is None:
        return b""
    view = files.map(fd, min(end, files.size(fd)))
    return summarise(_payloads(view, records))


def _payloads(view: memoryview, records: Records) -> Iterator[tuple[RecordRef, memoryview]]:
    for ref in records:
        start = ref.offset + RECORD_HEADER_BYTES
        yield ref, view[start : start + ref.length]


def find_finished(files: Files, path: Path, name: SegmentName, records_end: int) -> Finished:
    """A segment that a predecessor left unsealed, as its scan finds it.

    Args:
        records_end: where the header of the next segment says that its records end; 0 where that is not known.

    Raises:
        OSError: it cannot be read.
    """
    fd = files.open(path / str(name), os.O_RDWR)
    try:
        return _scan_finished(files, fd, name, records_end)
    except BaseException:
        files.close(fd)
        raise


def _scan_finished(files: Files, fd: int, name: SegmentName, records_end: int) -> Finished:
    header = read_header(files, fd)
    first = header.first_sequence if header else 0
    scan = SegmentScan(files, fd, name.number, name.generation, sequence=first)
    scan.stop = records_end or scan.stop
    refs = [item for item in scan if isinstance(item, RecordRef)]
    flat = array("q")
    for ref in refs:
        flat.extend(ref)
    # What follows the last whole record may be a damaged one: it stays, and the gap in the index tells of it.
    end = scan.end if scan.at_footer else max(scan.end, records_end or aligned(files.size(fd)))
    if header is None and refs:
        first = refs[0].sequence
    return Finished(name, fd, end, flat, range(first, scan.sequence))
