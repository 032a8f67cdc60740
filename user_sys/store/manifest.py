"""The manifest lists the segments of a log, so that a missing or swapped segment is detected and named.

No record depends on it. Segments newer than its last one count too. `rebuild` recreates it from the segments,
except for quarantined ranges.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from crc32c import crc32c

from hal.decode_errors import DECODE_ERRORS
from user_sys.errors import StoreCorrupt
from user_sys.store.files import Files, pread_readable, replace_file
from user_sys.store.record_format import (
    FORMAT_VERSION,
    Damage,
    Footer,
    SegmentName,
    check_version,
    read_segment_header,
    read_sound_footer,
)

MANIFEST = "MANIFEST"
MANIFEST_MAGIC = b"USERMAN\n"
LOG_ID_BYTES = 16
MAX_MANIFEST_BYTES = 64 << 20
_HEAD = struct.Struct("<8sIII")  # magic, version, bytes of the body, zero
_CRC_BYTES = 4


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True):
    """A sealed segment's file: name, range of sequence numbers [first, next), and length."""

    number: int
    span: int
    generation: int
    first_sequence: int
    next_sequence: int
    size_bytes: int

    @property
    def name(self) -> SegmentName:
        return SegmentName(self.number, self.span, self.generation)

    @classmethod
    def of(cls, name: SegmentName, footer: Footer) -> SegmentEntry:
        return cls(*name, footer.first_sequence, footer.next_sequence, footer.size)


class QuarantinedRange(msgspec.Struct, frozen=True, array_like=True):
    """A damaged range of a segment's file that `repair` copied; it is no longer reported."""

    number: int
    generation: int
    offset: int
    length: int
    reason: str

    def covers(self, damage: Damage) -> bool:
        return (
            (self.number, self.generation) == (damage.segment, damage.generation)
            and self.offset <= damage.offset
            and damage.offset + damage.length <= self.offset + self.length
        )


class LogManifest(msgspec.Struct, frozen=True, array_like=True):
    """Contents of the log.

    Attributes:
        first_number: segments below it were lost with an earlier manifest, and are not reported as missing.
        last_number: highest segment number that is known to exist.
        segments: sealed segments, ascending; later ones are found by listing the folder.
    """

    log_id: bytes
    first_number: int = 0
    last_number: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    quarantined: tuple[QuarantinedRange, ...] = ()

    def with_entry(self, entry: SegmentEntry) -> LogManifest:
        """A copy in which `entry` replaces the entries of its segment numbers."""
        inside = range(entry.number, entry.number + entry.span)
        kept = [old for old in self.segments if old.number not in inside]
        left = [range_ for range_ in self.quarantined if range_.number not in inside or entry.generation == 0]
        segments = tuple(sorted((*kept, entry), key=lambda old: old.number))
        return msgspec.structs.replace(
            self, segments=segments, quarantined=tuple(left), last_number=max(self.last_number, inside.stop - 1)
        )

    def is_quarantined(self, damage: Damage) -> bool:
        """Whether a repair has already copied this damage."""
        return any(range_.covers(damage) for range_ in self.quarantined)


def load(files: Files, path: Path) -> LogManifest | None:
    """The manifest of the log at `path`; None if there is none.

    Raises:
        StoreCorrupt: it is damaged.
        StoreVersionMismatch: it has another format version.
        OSError: it cannot be read.
    """
    try:
        with files.opened(path / MANIFEST) as fd:
            raw = pread_readable(files, fd, min(files.size(fd), MAX_MANIFEST_BYTES), 0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    body = raw[:-_CRC_BYTES]
    if len(body) < _HEAD.size or crc32c(body) != int.from_bytes(raw[-_CRC_BYTES:], "little"):
        raise StoreCorrupt(f"{path / MANIFEST} is damaged")
    magic, version, length, _ = _HEAD.unpack_from(body)
    if magic != MANIFEST_MAGIC or length != len(body) - _HEAD.size:
        raise StoreCorrupt(f"{path / MANIFEST} is not a manifest")
    check_version(version, str(path / MANIFEST))
    try:
        return msgspec.msgpack.decode(body[_HEAD.size :], type=LogManifest)
    except DECODE_ERRORS as error:
        raise StoreCorrupt(f"{path / MANIFEST} does not decode: {error}") from None


def replace(files: Files, path: Path, manifest: LogManifest) -> None:
    """Replaces the manifest atomically. Raises OSError.

    The content is synced before the rename, so a crash leaves one whole manifest. The caller syncs the folder if it
    then deletes files that the old manifest lists.
    """
    body = msgspec.msgpack.encode(manifest)
    framed = _HEAD.pack(MANIFEST_MAGIC, FORMAT_VERSION, len(body), 0) + body
    replace_file(files, path / MANIFEST, framed + crc32c(framed).to_bytes(_CRC_BYTES, "little"))


def rebuild(files: Files, path: Path, chosen: Iterable[SegmentName]) -> LogManifest:
    """The manifest derived from the segments alone. Raises OSError and StoreVersionMismatch."""
    names = list(chosen)
    manifest = LogManifest(b"", first_number=names[0].number if names else 0)
    for name in names:
        with files.opened(path / str(name)) as fd:
            header = read_segment_header(files, fd)
            footer = read_sound_footer(files, fd, name)
        if header is not None and not manifest.log_id:
            manifest = msgspec.structs.replace(manifest, log_id=header.log_id)
        manifest = msgspec.structs.replace(manifest, last_number=name.stop - 1)
        if footer is not None:
            manifest = manifest.with_entry(SegmentEntry.of(name, footer))
    return manifest if manifest.log_id else msgspec.structs.replace(manifest, log_id=secrets.token_bytes(LOG_ID_BYTES))


class ManifestFile:
    """The writer's manifest in memory and on disk. Thread-safe.

    Attributes:
        maintenance_lock: held while segments are rewritten.
    """

    def __init__(self, files: Files, path: Path, manifest: LogManifest) -> None:
        self.maintenance_lock = threading.RLock()
        self._files, self._path, self._lock = files, path, threading.Lock()
        self.manifest = manifest
        self._stale = False

    def update(self, change: Callable[[LogManifest], LogManifest]) -> None:
        """Replaces the manifest by ``change(manifest)``. Raises OSError; the next update then writes it again."""
        with self._lock:
            self.manifest, self._stale = change(self.manifest), True
            replace(self._files, self._path, self.manifest)
            self._stale = False

    def flush(self) -> None:
        """Writes the manifest again if the last update failed. Raises OSError."""
        if self._stale:
            self.update(lambda old: old)
