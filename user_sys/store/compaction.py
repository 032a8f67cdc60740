"""Giving space back: segments rewritten without some of their records, and old segments dropped.

Nothing is deleted before what takes its place is durable. The new file is synced before it gets its name, and the
folder is synced before the old files are deleted: from the rename on, the higher generation counts, and whichever name
a power cut leaves has whole content behind it. The manifest is switched in between; it decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from crc32c import crc32c

from user_sys.errors import StoreCorrupt, StoreError
from user_sys.store.files import NO_SPACE, Buffer, Files, write_all
from user_sys.store.footer import Footer, read_footer, read_footer_copy
from user_sys.store.frame import (
    RECORD_HEADER_BYTES,
    Damage,
    RecordRef,
    SegmentHeader,
    decode_record_header,
    encode_record_header,
    record_bytes,
)
from user_sys.store.manifest import Catalog, Entry, Manifest
from user_sys.store.sealing import Finished, Summarise, seal
from user_sys.store.segments import TEMPORARY, SegmentName, choose, list_segments, read_header, remove_segment

MAX_GENERATION = (1 << 16) - 1
MAX_SPAN = (1 << 16) - 1

_logger = logging.getLogger(__name__)


def drop_before(files: Files, path: Path, catalog: Catalog, segment: int) -> None:
    """Deletes the segments that lie wholly below `segment`. Raises OSError.

    Without space for a manifest they are deleted first, which is what gives the space; until the next switch the
    manifest then lists files that are missing.
    """
    names = list_segments(path, files)
    # A file that stands for numbers on both sides stays whole.
    segment = min([segment, *(name.number for name in choose(names)[0] if name.number < segment < name.stop)])
    doomed = [name for name in names if name.stop <= segment]
    if not doomed and catalog.manifest.first >= segment:
        return
    _switch(catalog, lambda old: old.from_number(segment))
    files.sync_folder(path)  # the names come off the disk only once the manifest that does not list them is there
    for name in doomed:
        remove_segment(files, path, name)


def _switch(catalog: Catalog, change: Callable[[Manifest], Manifest]) -> None:
    """Switches the manifest; without space for it the next switch makes up for it, and space is given first."""
    try:
        catalog.switch(change)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        _logger.warning("store.manifest-late: %s", error)


def rewrite(
    files: Files,
    path: Path,
    catalog: Catalog,
    segments: Sequence[int],
    keep: Callable[[RecordRef], bool],
    summarise: Summarise | None,
) -> Entry:
    """See `LogWriter.rewrite`. The caller holds ``catalog.maintenance``."""
    names = _neighbours(path, files, catalog, segments)
    target = SegmentName(names[0].number, names[-1].stop - names[0].number, 1 + max(name.generation for name in names))
    if target.generation > MAX_GENERATION or target.span > MAX_SPAN:
        raise StoreError(f"{path}: segment {target} would be rewritten too often, or stand for too many")
    temporary = path / f"{target}{TEMPORARY}"
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_Source.opened(files, path, name)) for name in names]
        fd = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        stack.callback(files.close, fd)
        try:
            finished = _Copy(files, fd, target).run(sources, keep, catalog.manifest)
            entry = seal(files, path, finished, summarise)
        except BaseException:
            files.unlink(temporary)
            raise
    files.rename(temporary, path / str(target))
    _switch(catalog, lambda old: old.with_entry(entry))
    files.sync_folder(path)
    for name in names:
        remove_segment(files, path, name)
    return entry


def _neighbours(path: Path, files: Files, catalog: Catalog, segments: Sequence[int]) -> list[SegmentName]:
    listed = {entry.name for entry in catalog.manifest.segments}
    chosen = choose(list_segments(path, files))[0]
    names = [name for name in chosen if name.number in set(segments)]
    if not names or len(names) != len(set(segments)) or not listed.issuperset(names):
        raise StoreError(f"{path}: segments {sorted(segments)} are not all sealed segments of this log")
    if any(left.stop != right.number for left, right in zip(names, names[1:], strict=False)):
        raise StoreError(f"{path}: segments {sorted(segments)} are no neighbours")
    return names


class _Source:
    """A sealed segment to copy from."""

    def __init__(self, files: Files, fd: int, name: SegmentName, footer: Footer) -> None:
        self.name, self.footer, self.header = name, footer, read_header(files, fd)
        self._view = files.map(fd, min(footer.end, files.size(fd)))

    @classmethod
    @contextlib.contextmanager
    def opened(cls, files: Files, path: Path, name: SegmentName) -> Iterator[_Source]:
        fd = files.open(path / str(name), os.O_RDONLY)
        try:
            footer = read_footer(files, fd, name) or read_footer_copy(files, path, name)
            if footer is None:
                raise StoreCorrupt(f"{path / str(name)} has lost its footer; verify the log")
            yield cls(files, fd, name, footer)
        finally:
            files.close(fd)

    def payload(self, ref: RecordRef) -> tuple[memoryview, int] | None:
        """A record's payload and its CRC; None where it is damaged."""
        start = ref.offset + RECORD_HEADER_BYTES
        found = decode_record_header(self._view[ref.offset : start], self.name.number, self.name.generation, ref.offset)
        payload = self._view[start : start + ref.length]
        if found is None or found[0] != ref or crc32c(payload) != found[1]:
            return None
        return payload, found[1]


class _Copy:
    """The new segment while it is being written."""

    def __init__(self, files: Files, fd: int, target: SegmentName) -> None:
        self._files, self._fd, self._target = files, fd, target
        self._flat = array("q")
        self._end = 0

    def run(self, sources: list[_Source], keep: Callable[[RecordRef], bool], manifest: Manifest) -> Finished:
        first, last = sources[0], sources[-1]
        sequences = range(first.footer.first_sequence, last.footer.next_sequence)
        header = SegmentHeader(
            self._target.number,
            sequences.start,
            first.header.previous_bytes if first.header else 0,
            time.time_ns(),
            manifest.log_id,
            self._target.generation,
            self._target.span,
        )
        self._end = write_all(self._files, self._fd, [header.encode()], 0)
        for source in sources:
            _require_told(source, manifest)
            for ref in filter(keep, source.footer.records):
                self._take(source, ref, manifest)
        return Finished(self._target, self._fd, self._end, self._flat, sequences)

    def _take(self, source: _Source, ref: RecordRef, manifest: Manifest) -> None:
        found = source.payload(ref)
        if found is None:
            damage = Damage(
                ref.segment, ref.offset, record_bytes(ref.length), "payload", ref.sequence, source.name.generation
            )
            if manifest.sets_aside(damage):
                return
            raise StoreCorrupt(f"segment {source.name}: record {ref.sequence} at {ref.offset} is damaged; repair first")
        payload, crc = found
        moved = ref._replace(segment=self._target.number, offset=self._end)
        padding = bytes(record_bytes(ref.length) - RECORD_HEADER_BYTES - ref.length)
        buffers: list[Buffer] = [encode_record_header(moved, crc, self._target.generation), payload, padding]
        self._end = write_all(self._files, self._fd, buffers, self._end)
        self._flat.extend(moved)


def _require_told(source: _Source, manifest: Manifest) -> None:
    """Raises StoreCorrupt: bytes between its records hold none and are not quarantined; a copy would lose them."""
    for damage in source.footer.gaps(source.name):
        if not manifest.sets_aside(damage):
            place = f"{damage.length} bytes at {damage.offset}"
            raise StoreCorrupt(f"segment {source.name}: {place} are damaged, no whole record; repair first")
