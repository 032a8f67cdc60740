"""Finding everything in a log that is not what was written, and setting it aside.

Nothing is rewritten in place: what is damaged is copied, the manifest records the range, and from then on nobody
reports it as new. The records beside it are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from user_sys.errors import StoreCorrupt, StoreError, StoreFull, StoreRecordGone
from user_sys.store import manifest
from user_sys.store.files import NO_SPACE_ERRNOS, OS_FILES, Files, write_all
from user_sys.store.log_reader import LogReader
from user_sys.store.manifest import LogManifest, QuarantinedRange, SegmentEntry, read_footer_or_copy
from user_sys.store.record_format import (
    Damage,
    SegmentName,
    SegmentScan,
    WriterLock,
    align_up,
    list_segments,
    read_segment_header,
    record_bytes,
    resolve_generations,
)

QUARANTINE = "quarantine"
COPY_BYTES = 4 << 20


def verify_log(path: Path, *, files: Files = OS_FILES, advance: Callable[[int], object] | None = None) -> list[Damage]:
    """Reads all of the log at `path`: manifest, headers, footers, and every record with its payload.

    A writer may be at work meanwhile. What is quarantined is left out.

    Args:
        advance: told of each record how many bytes it takes in its file, once it is read.

    Raises:
        StoreError: there is no log, or it cannot be read.
        StoreVersion: another format version wrote it.
    """
    with LogReader.open(path, files=files) as reader:
        batches = reader.refresh()
        names = {name.number: name for name in resolve_generations(list_segments(path, files))[0]}
        known = _manifest(files, path)
        found = list(reader.damaged)
        next_sequences: dict[int, int] = {}
        for batch in batches:
            if len(batch.records):
                next_sequences[batch.segment] = int(batch.records.sequence.max()) + 1
            generation = names[batch.segment].generation if batch.segment in names else 0
            for ref in batch.records:
                if advance is not None:
                    advance(record_bytes(ref.length))
                try:
                    reader.read(ref)
                except StoreRecordGone:
                    continue  # by a compaction since the refresh
                except StoreCorrupt as error:
                    size = record_bytes(ref.length)
                    found.append(Damage(ref.segment, ref.offset, size, str(error), ref.sequence, generation))
    try:
        found += _around(files, path, sorted(names.values()), known, next_sequences)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    quarantined = known.quarantined if known else ()
    fresh = (damage for damage in set(found) if not any(range_.covers(damage) for range_ in quarantined))
    return _joined(sorted(fresh, key=lambda damage: (damage.segment, not damage.length, damage.offset)))


def _joined(damaged: Iterable[Damage]) -> list[Damage]:
    """Records that were lost together, as at the end of a file that is cut off, as one damage."""
    joined: list[Damage] = []
    for damage in damaged:
        last = joined[-1] if joined else damage
        place = (last.segment, last.offset + last.length, last.generation, last.reason)
        if joined and last.length and place == (damage.segment, damage.offset, damage.generation, damage.reason):
            joined[-1] = replace(last, length=last.length + damage.length, last_sequence=damage.sequence)
        else:
            joined.append(damage)
    return joined


def _manifest(files: Files, path: Path) -> LogManifest | None:
    try:
        return manifest.load(files, path)
    except StoreCorrupt:
        return None  # which the reader has reported


def _around(
    files: Files, path: Path, names: list[SegmentName], known: LogManifest | None, next_sequences: Mapping[int, int]
) -> Iterator[Damage]:
    """What a reader does not look at: whether the files are the listed ones, and what follows the last record.

    Args:
        next_sequences: by segment, the number after that of its last record that was found.
    """
    listed = {entry.name: entry for entry in known.segments} if known else {}
    sealed = False
    for name in names:
        fd = files.open(path / str(name), os.O_RDONLY)
        try:
            footer = read_footer_or_copy(files, path, fd, name)
            sealed = sealed or footer is not None
            if footer is not None and name in listed and SegmentEntry.of(name, footer) != listed[name]:
                reason = "the file is not the one that the manifest lists"
                yield Damage(name.number, 0, 0, reason, -1, name.generation)
            if footer is None and name in listed:
                first = next_sequences.get(name.number, listed[name].first_sequence)
                if (last := listed[name].next_sequence - 1) >= first:
                    reason = "the records at the segment's end are gone, and so is what said which these were"
                    yield Damage(name.number, files.size(fd), 0, reason, first, name.generation, last)
            if footer is None and name == names[-1] and name not in listed:
                yield from _after_last(files, fd, name, known)
        finally:
            files.close(fd)
    if sealed and manifest.MANIFEST not in files.listdir(path):
        yield Damage(-1, 0, 0, f"{path / manifest.MANIFEST} is missing")


def _after_last(files: Files, fd: int, name: SegmentName, known: LogManifest | None) -> Iterator[Damage]:
    header = read_segment_header(files, fd)
    if header is not None and not header.belongs_to(name, known.log_id if known else header.log_id):
        return  # which the reader has reported
    scan = SegmentScan(files, fd, name.number, name.generation, sequence=header.first_sequence if header else 0)
    for _ in scan:
        pass
    if not scan.is_unfinished():
        yield scan.damage(align_up(files.size(fd)), "no whole record: damaged, or an append that a power cut tore")


def quarantine_damage(path: Path, damaged: Iterable[Damage], *, files: Files = OS_FILES) -> list[Path]:
    """Copies damaged ranges into ``<log>/quarantine/`` and has the manifest list them; returns the copies.

    The copies are durable before the manifest lists them, and the manifest when this returns. A manifest that is
    damaged or missing is made anew from the segments.

    Raises:
        StoreLocked: a writer is at work; stop it first.
        StoreFull: no space; nothing is listed.
        StoreError: the disk failed.
    """
    try:
        lock = WriterLock(path, files)
        try:
            return _quarantine(files, path, sorted(set(damaged), key=lambda damage: (damage.segment, damage.offset)))
        finally:
            lock.release()
    except OSError as error:
        kind = StoreFull if error.errno in NO_SPACE_ERRNOS else StoreError
        raise kind(f"cannot quarantine in {path}: {error.strerror}") from error


def _quarantine(files: Files, path: Path, damaged: list[Damage]) -> list[Path]:
    names = resolve_generations(list_segments(path, files))[0]
    known = _manifest(files, path) or manifest.rebuild(files, path, names)
    by_number = {name.number: name for name in names}
    room, copies = path / QUARANTINE, []
    files.make_folder(room)
    for damage in damaged:
        name = by_number.get(damage.segment)
        if name is not None and name.generation == damage.generation and damage.length:
            copies.append(_copy(files, path / str(name), damage, room))
    if copies:
        files.sync_folder(room)
        files.sync_folder(path)  # the room itself may be new
    ranges = [
        QuarantinedRange(damage.segment, damage.generation, damage.offset, damage.length, damage.reason)
        for damage in damaged
        if damage.segment >= 0 and not any(range_.covers(damage) for range_ in known.quarantined)
    ]
    manifest.replace(files, path, msgspec.structs.replace(known, quarantined=(*known.quarantined, *ranges)))
    files.sync_folder(path)
    return copies


def _copy(files: Files, source: Path, damage: Damage, room: Path) -> Path:
    """Copies the range as far as it can be read; a file that ends before it gives what it has."""
    target = room / f"{source.stem}-{damage.offset:012d}.bytes"
    source_fd = files.open(source, os.O_RDONLY)
    try:
        target_fd = files.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            for at in range(0, damage.length, COPY_BYTES):
                block = files.pread(source_fd, min(COPY_BYTES, damage.length - at), damage.offset + at)
                write_all(files, target_fd, [block], at)
            files.fsync(target_fd)
        finally:
            files.close(target_fd)
    finally:
        files.close(source_fd)
    return target
