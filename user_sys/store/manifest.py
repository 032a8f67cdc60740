"""The manifest: which segments make up the log, so that a missing or a swapped one is noticed and named.

No record depends on it. A segment that is newer than the manifest's last counts all the same, and `rebuild` makes the
same manifest from the segments alone, but for what was quarantined and which segments were dropped.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from crc32c import crc32c

from hal.undecodable import UNDECODABLE
from user_sys.errors import StoreCorrupt
from user_sys.store.files import Files, replace_file
from user_sys.store.footer import Footer, read_footer, read_footer_copy
from user_sys.store.frame import FORMAT_VERSION, Damage, check_version
from user_sys.store.segments import SegmentName, read_header

MANIFEST = "MANIFEST"
MANIFEST_MAGIC = b"USERMAN\n"
LOG_ID_BYTES = 16
MAX_MANIFEST_BYTES = 64 << 20
_HEAD = struct.Struct("<8sIII")  # magic, version, bytes of the body, zero
_CRC_BYTES = 4
_logger = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A sealed segment's file: its name, the sequence numbers [first, next) that it stands for, its length."""

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
    def of(cls, name: SegmentName, footer: Footer) -> Entry:
        return cls(*name, footer.first_sequence, footer.next_sequence, footer.size)


class Quarantined(msgspec.Struct, frozen=True, array_like=True):
    """A damaged range of a segment's file that was copied aside; it is no longer reported."""

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


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What the log is made of.

    Attributes:
        first: the lowest segment number that was not dropped.
        tail: the highest segment number that is known to exist.
        segments: the sealed ones, ascending; what follows them is found by listing the folder.
    """

    log_id: bytes
    first: int = 0
    tail: int = 0
    segments: tuple[Entry, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()

    def with_entry(self, entry: Entry) -> Manifest:
        """With `entry` in place of those whose numbers it stands for."""
        inside = range(entry.number, entry.number + entry.span)
        kept = [old for old in self.segments if old.number not in inside]
        left = [range_ for range_ in self.quarantined if range_.number not in inside or entry.generation == 0]
        segments = tuple(sorted((*kept, entry), key=lambda old: old.number))
        return msgspec.structs.replace(
            self, segments=segments, quarantined=tuple(left), tail=max(self.tail, inside.stop - 1)
        )

    def sets_aside(self, damage: Damage) -> bool:
        """Whether a repair has copied it aside."""
        return any(range_.covers(damage) for range_ in self.quarantined)

    def from_number(self, first: int) -> Manifest:
        """Without the segments numbered below `first`."""
        return msgspec.structs.replace(
            self,
            first=max(self.first, first),
            tail=max(self.tail, first),
            segments=tuple(entry for entry in self.segments if entry.number >= first),
            quarantined=tuple(range_ for range_ in self.quarantined if range_.number >= first),
        )


def load(files: Files, path: Path) -> Manifest | None:
    """The manifest of the log at `path`; None where there is none.

    Raises:
        StoreCorrupt: it is damaged.
        StoreVersion: another format version wrote it.
        OSError: it cannot be read.
    """
    try:
        fd = files.open(path / MANIFEST, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        raw = files.pread(fd, min(files.size(fd), MAX_MANIFEST_BYTES), 0)
    finally:
        files.close(fd)
    body = raw[:-_CRC_BYTES]
    if len(body) < _HEAD.size or crc32c(body) != int.from_bytes(raw[-_CRC_BYTES:], "little"):
        raise StoreCorrupt(f"{path / MANIFEST} is damaged")
    magic, version, length, _ = _HEAD.unpack_from(body)
    if magic != MANIFEST_MAGIC or length != len(body) - _HEAD.size:
        raise StoreCorrupt(f"{path / MANIFEST} is no manifest")
    check_version(version, str(path / MANIFEST))
    try:
        return msgspec.msgpack.decode(body[_HEAD.size :], type=Manifest)
    except UNDECODABLE as error:
        raise StoreCorrupt(f"{path / MANIFEST} does not decode: {error}") from None


def replace(files: Files, path: Path, manifest: Manifest) -> None:
    """Puts `manifest` in the place of the old one, which is there until it is not.

    The new one's bytes are synced before it gets the name: whatever a crash leaves under the name is whole. Which of
    the two that is after a power cut is known only once the folder is synced, which is left to the caller: it matters
    to one who goes on to delete what the old manifest names, and to nobody else.
    """
    body = msgspec.msgpack.encode(manifest)
    framed = _HEAD.pack(MANIFEST_MAGIC, FORMAT_VERSION, len(body), 0) + body
    replace_file(files, path / MANIFEST, framed + crc32c(framed).to_bytes(_CRC_BYTES, "little"))


def rebuild(files: Files, path: Path, chosen: Iterable[SegmentName]) -> Manifest:
    """The manifest that the segments alone tell of. Raises OSError and StoreVersion."""
    names = list(chosen)
    manifest = Manifest(b"", first=names[0].number if names else 0)
    for name in names:
        fd = files.open(path / str(name), os.O_RDONLY)
        try:
            header = read_header(files, fd)
            footer = footer_or_none(files, path, fd, name)
        finally:
            files.close(fd)
        if header is not None and not manifest.log_id:
            manifest = msgspec.structs.replace(manifest, log_id=header.log_id)
        manifest = msgspec.structs.replace(manifest, tail=name.stop - 1)
        if footer is not None:
            manifest = manifest.with_entry(Entry.of(name, footer))
    return manifest if manifest.log_id else msgspec.structs.replace(manifest, log_id=secrets.token_bytes(LOG_ID_BYTES))


def footer_or_none(files: Files, path: Path, fd: int, name: SegmentName) -> Footer | None:
    """The segment's footer, or its copy if that is lost, which `verify` and readers report; None without either."""
    try:
        footer = read_footer(files, fd, name)
    except StoreCorrupt as error:
        _logger.warning("store.footer-damaged segment=%s: %s", name, error)
        footer = None
    return footer or read_footer_copy(files, path, name)


class Catalog:
    """The writer's manifest, in memory and on disk. Any thread may call it.

    Attributes:
        maintenance: held by whoever deletes segments, for as long as it reads what it will delete.
    """

    def __init__(self, files: Files, path: Path, manifest: Manifest) -> None:
        self.maintenance = threading.RLock()
        self._files, self._path, self._lock = files, path, threading.Lock()
        self.manifest = manifest
        self._stale = False

    def switch(self, change: Callable[[Manifest], Manifest]) -> None:
        """Replaces the manifest by what `change` makes of it. Raises OSError; the next switch then makes up for it."""
        with self._lock:
            self.manifest, self._stale = change(self.manifest), True
            replace(self._files, self._path, self.manifest)
            self._stale = False

    def settle(self) -> None:
        """Makes up for a switch that failed. Raises OSError."""
        if self._stale:
            self.switch(lambda old: old)
