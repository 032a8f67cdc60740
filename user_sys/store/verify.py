"""Verifies a log, quarantines damage, and lists the chunks, steps and episodes that it cost.

Nothing is rewritten in place: damaged bytes are copied, and the manifest records the range, which is then no
longer reported. Neighbouring records are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from user_sys.codec import decode_packet_record, parse_packet
from user_sys.episode import ChunkHeader
from user_sys.errors import StoreCorrupt, StoreError, StoreFull, StoreRecordGone, WireError
from user_sys.store import manifest
from user_sys.store.files import CREATE, NO_SPACE_ERRNOS, OS_FILES, Files, pread_readable, write_all
from user_sys.store.index import Index
from user_sys.store.log_reader import LogReader
from user_sys.store.manifest import LogManifest, QuarantinedRange, SegmentEntry
from user_sys.store.record_format import (
    RECORD_HEADER_BYTES,
    Damage,
    SegmentName,
    SegmentScan,
    WriterLock,
    align_up,
    decode_record_header,
    list_segments,
    read_segment_header,
    read_sound_footer,
    record_bytes,
    refs_of,
    resolve_generations,
)

QUARANTINE = "quarantine"
COPY_BYTES = 4 << 20


class LostChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Steps `first_step` to ``first_step + steps - 1`` of an episode, which chunk `index` held."""

    episode: str
    index: int
    first_step: int
    steps: int

    def __str__(self) -> str:
        return f"{self.episode}, chunk {self.index}, steps {self.first_step} to {self.first_step + self.steps - 1}"


class DamageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Damage and the chunks that it destroyed, if known.

    Attributes:
        sequence: of the record; -1 if unknown.
        last_sequence: of the last record, if several are lost together; otherwise -1.
        surely: the chunks come from the index; otherwise from the damaged bytes themselves.
    """

    segment: int
    offset: int
    length: int
    sequence: int
    last_sequence: int
    reason: str
    chunks: tuple[LostChunk, ...] = ()
    surely: bool = True


class MissingChunks(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive missing chunks between stored ones; `steps` is their total."""

    episode: str
    first_index: int
    last_index: int
    first_step: int
    steps: int


def report_damage(path: Path, index: Index, damaged: Sequence[Damage]) -> list[DamageReport]:
    """The losses of each of `damaged` in the store at `path`; `index` holds all intact records."""
    files = {name.number: path / str(name) for name in resolve_generations(list_segments(path))[0]}
    reports = []
    for damage in damaged:
        chunks, surely = _indexed_chunks(damage, index), True
        if not chunks and damage.length and damage.segment in files:
            chunk, surely = _chunk_by_its_header(files[damage.segment], damage), False
            chunks = [chunk] if chunk and chunk.index not in _stored_indices(index, chunk.episode) else []
        report = DamageReport(
            segment=damage.segment,
            offset=damage.offset,
            length=damage.length,
            sequence=damage.sequence,
            last_sequence=damage.last_sequence,
            reason=damage.reason,
            chunks=tuple(chunks),
            surely=surely,
        )
        reports.append(report)
    return reports


def _indexed_chunks(damage: Damage, index: Index) -> list[LostChunk]:
    """Chunks that a footer lists and that lie in the damaged range."""
    chunks, names = index.chunks, index.episodes.ids.names
    inside = chunks.segment == damage.segment
    inside &= (chunks.offset >= damage.offset) & (chunks.offset < damage.offset + damage.length)
    return [
        LostChunk(
            episode=names[chunks.episode[row]],
            index=int(chunks.index[row]),
            first_step=int(chunks.first_step[row]),
            steps=int(chunks.steps[row]),
        )
        for row in np.flatnonzero(inside | (chunks.sequence == damage.sequence)).tolist()
    ]


def _stored_indices(index: Index, episode: str) -> set[int]:
    """Indices of the episode's chunks in the index."""
    rows = (index.chunks.episode == index.episodes.find(episode)) & ~index.chunks.gone
    return set(index.chunks.index[rows].tolist())


def _chunk_by_its_header(file: Path, damage: Damage) -> LostChunk | None:
    """The chunk that a damaged record describes in its header, if that much can be decoded."""
    with OS_FILES.opened(file) as fd:
        raw = pread_readable(OS_FILES, fd, damage.length, damage.offset)
    found = decode_record_header(raw[:RECORD_HEADER_BYTES], damage.segment, damage.generation, damage.offset)
    if found is None:
        return None
    try:
        packet = parse_packet(raw[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + found[0].length])
        header = decode_packet_record(packet, ChunkHeader)
    except WireError:
        return None
    return LostChunk(episode=header.episode, index=header.index, first_step=header.first_step, steps=header.steps)


def find_missing_chunks(index: Index) -> list[MissingChunks]:
    """Chunks missing before others of their episode; chunks of deleted episodes count as present."""
    chunks = index.chunks
    order = np.lexsort((chunks.index, chunks.episode))
    found: list[MissingChunks] = []
    episode, expected, step = -1, 0, 0
    columns = (chunks.episode, chunks.index, chunks.first_step, chunks.steps)
    for owner, number, first_step, steps in zip(*(column[order].tolist() for column in columns), strict=True):
        if owner != episode:
            episode, expected, step = owner, 0, 0
        if number > expected:
            name = index.episodes.ids.names[owner]
            missing = first_step - step
            gap = MissingChunks(
                episode=name, first_index=expected, last_index=number - 1, first_step=step, steps=missing
            )
            found.append(gap)
        expected, step = number + 1, first_step + steps
    return found


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
                next_sequences[batch.segment] = int(batch.records["sequence"].max()) + 1
            generation = names[batch.segment].generation if batch.segment in names else 0
            for ref in refs_of(batch.records):
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
    return sorted(fresh, key=lambda damage: (damage.segment, not damage.length, damage.offset))


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
        with files.opened(path / str(name)) as fd:
            footer = read_sound_footer(files, fd, name)
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
    """Copies the range, with zeros for unreadable blocks; a file that ends within it gives a shorter copy."""
    target = folder / f"{source.stem}-{damage.offset:012d}.bytes"
    with files.opened(source) as source_fd, files.opened(target, CREATE) as target_fd:
        for at in range(0, damage.length, COPY_BYTES):
            block = pread_readable(files, source_fd, min(COPY_BYTES, damage.length - at), damage.offset + at)
            write_all(files, target_fd, [block], at)
        files.fsync(target_fd)
    return target
