"""Verifies a log and quarantines damage.

Nothing is rewritten in place: damaged bytes are copied, and the manifest records the range, which is then no
longer reported. Neighbouring records are not touched.
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
    """Reads the whole log at `path`: manifest, headers, footers, and every record with its payload.

    A writer may be active. Quarantined ranges are skipped.

    Args:
        advance: called with the size of each record, in bytes of its file, after it was read.

    Raises:
        StoreError: there is no log, or it cannot be read.
        StoreVersionMismatch: it has another format version.
    """
    with LogReader.open(path, files=files) as reader:
        batches = reader.refresh()
        names = {name.number: name for name in resolve_generations(list_segments(path, files))[0]}
        log_manifest = _load_manifest(files, path)
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
                    continue  # dropped by a compaction since the refresh
                except StoreCorrupt as error:
                    size = record_bytes(ref.length)
                    found.append(Damage(ref.segment, ref.offset, size, str(error), ref.sequence, generation))
    try:
        found += _unreported_damage(files, path, sorted(names.values()), log_manifest, next_sequences)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    fresh = (damage for damage in set(found) if log_manifest is None or not log_manifest.is_quarantined(damage))
    return _joined(sorted(fresh, key=lambda damage: (damage.segment, not damage.length, damage.offset)))


def _joined(damaged: Iterable[Damage]) -> list[Damage]:
    """Merges adjacent damage with the same reason, as at the end of a truncated file."""
    joined: list[Damage] = []
    for damage in damaged:
        last = joined[-1] if joined else damage
        place = (last.segment, last.offset + last.length, last.generation, last.reason)
        if joined and last.length and place == (damage.segment, damage.offset, damage.generation, damage.reason):
            joined[-1] = replace(last, length=last.length + damage.length, last_sequence=damage.sequence)
        else:
            joined.append(damage)
    return joined


def _load_manifest(files: Files, path: Path) -> LogManifest | None:
    try:
        return manifest.load(files, path)
    except StoreCorrupt:
        return None  # already reported by the reader


def _unreported_damage(
    files: Files,
    path: Path,
    names: list[SegmentName],
    log_manifest: LogManifest | None,
    next_sequences: Mapping[int, int],
) -> Iterator[Damage]:
    """Damage that a reader does not detect: files that the manifest does not list, and bytes after the last record.

    Args:
        next_sequences: by segment, the number after that of its last found record.
    """
    listed = {entry.name: entry for entry in log_manifest.segments} if log_manifest else {}
    sealed = False
    for name in names:
        fd = files.open(path / str(name), os.O_RDONLY)
        try:
            footer = read_footer_or_copy(files, path, fd, name)
            sealed = sealed or footer is not None
            if footer is not None and name in listed and SegmentEntry.of(name, footer) != listed[name]:
                reason = "the file differs from the manifest's entry"
                yield Damage(name.number, 0, 0, reason, -1, name.generation)
            if footer is None and name in listed:
                first = next_sequences.get(name.number, listed[name].first_sequence)
                if (last := listed[name].next_sequence - 1) >= first:
                    reason = "the records at the segment's end and the index of them are lost"
                    yield Damage(name.number, files.size(fd), 0, reason, first, name.generation, last)
            if footer is None and name == names[-1] and name not in listed:
                yield from _damage_after_last(files, fd, name, log_manifest)
        finally:
            files.close(fd)
    if sealed and manifest.MANIFEST not in files.listdir(path):
        yield Damage(-1, 0, 0, f"{path / manifest.MANIFEST} is missing")


def _damage_after_last(files: Files, fd: int, name: SegmentName, log_manifest: LogManifest | None) -> Iterator[Damage]:
    header = read_segment_header(files, fd)
    if header is not None and not header.belongs_to(name, log_manifest.log_id if log_manifest else header.log_id):
        return  # already reported by the reader
    scan = SegmentScan(files, fd, name.number, name.generation, sequence=header.first_sequence if header else 0)
    for _ in scan:
        pass
    if not scan.is_unfinished():
        yield scan.damage(align_up(files.size(fd)), "no whole record: damage, or an append interrupted by a power cut")


def quarantine_damage(path: Path, damaged: Iterable[Damage], *, files: Files = OS_FILES) -> list[Path]:
    """Copies damaged ranges into ``<log>/quarantine/`` and lists them in the manifest; returns the copies.

    Copies are durable before the manifest lists them; the manifest is durable on return. A damaged or missing manifest
    is rebuilt from the segments.

    Raises:
        StoreLocked: a writer is active; stop it first.
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
    log_manifest = _load_manifest(files, path) or manifest.rebuild(files, path, names)
    by_number = {name.number: name for name in names}
    folder, copies = path / QUARANTINE, []
    files.make_folder(folder)
    for damage in damaged:
        name = by_number.get(damage.segment)
        if name is not None and name.generation == damage.generation and damage.length:
            copies.append(_copy(files, path / str(name), damage, folder))
    if copies:
        files.sync_folder(folder)
        files.sync_folder(path)  # the quarantine folder may be new
    ranges = [
        QuarantinedRange(damage.segment, damage.generation, damage.offset, damage.length, damage.reason)
        for damage in damaged
        if damage.segment >= 0 and not log_manifest.is_quarantined(damage)
    ]
    manifest.replace(
        files, path, msgspec.structs.replace(log_manifest, quarantined=(*log_manifest.quarantined, *ranges))
    )
    files.sync_folder(path)
    return copies


def _copy(files: Files, source: Path, damage: Damage, folder: Path) -> Path:
    """Copies the readable part of the range; a file that ends within it gives a shorter copy."""
    target = folder / f"{source.stem}-{damage.offset:012d}.bytes"
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
