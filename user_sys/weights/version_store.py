"""Versions on disk: files of blobs, and an index that is replaced atomically and lists complete files only.

After a killed process or a power cut the folder holds the versions of the index. A blob is written once for all
versions that have it. Damaged blobs are logged and skipped, with every version that needs them.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from blake3 import blake3

from hal.durable import remove_durably, replace_all_durably, replace_durably
from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import (
    BLOB_BYTES,
    NO_VERSION,
    Precision,
    SignedRecord,
    TensorEntry,
    WeightsManifest,
    decode_record,
)
from user_sys.store.files import OS_FILES, pread_readable
from user_sys.weights.catalog import BlobCache, StoredVersion, VersionCatalog, version_id
from user_sys.weights.state import decode_table, dtype_of, entry_bytes

INDEX_FILE = "index"
PIN_FILE = "pin"
KEPT_FILE = "kept"
OPEN_ATTEMPTS = 5
FILE_BYTES = 64 << 20
MIN_LIVE_FRACTION = 0.5
"""A file with a smaller fraction of needed bytes is replaced: its other blobs waste the disk."""
_SUFFIX = ".blobs"
_PRECISIONS: tuple[Precision, ...] = ("exact", "bf16")
_log = logging.getLogger(__name__)


class _BlobFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of blobs one after the other: digest and size of each."""

    name: str
    blobs: tuple[tuple[bytes, int], ...]


class _Index(msgspec.Struct, frozen=True):
    manifests: tuple[SignedRecord, ...] = ()
    files: tuple[_BlobFile, ...] = ()
    signer: bytes = b""


class VersionStore:
    """A folder of versions. One thread writes to it; any number of others may read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _BlobFile] = {}  # those whose content this object has read or written

    def load(self, cache: BlobCache | None = None) -> VersionCatalog:
        """Reads the intact versions of the folder; the catalog is empty if there are none. Raises OSError."""
        for _ in range(OPEN_ATTEMPTS):
            index = self._read_index()
            catalog, damaged = self._load(index, BlobCache() if cache is None else cache)
            if not damaged or index == self._read_index():  # otherwise the writer has replaced files meanwhile
                break
        for reason in damaged:
            _log.warning("weights.damaged %s", reason)
        return catalog

    def _load(self, index: _Index, cache: BlobCache) -> tuple[VersionCatalog, list[str]]:
        """Returns the intact versions, and a message for each damaged part."""
        catalog, damaged = VersionCatalog(cache), list[str]()
        self._files = {}
        for file in index.files:
            try:
                if self._read_file(file, cache, damaged):
                    self._files[file.name] = file
            except (OSError, ValueError) as error:
                damaged.append(f"file={self.folder / file.name}: {error}")
        for signed in index.manifests:
            try:
                manifest = decode_record(signed.body, WeightsManifest)
                if (table := cache.get(manifest.digest)) is None:
                    raise WireError(f"version {manifest.version} has no table of tensors")
                version = StoredVersion(version_id(signed), manifest, signed, decode_table(manifest, table))
                if not all(digest in cache for digest in version.digests):
                    raise WireError(f"version {manifest.version} lacks a part")
                catalog.add(version)
            except WireError as error:
                damaged.append(f"file={self.folder / INDEX_FILE}: {error}")
        return catalog, damaged

    def _read_file(self, file: _BlobFile, cache: BlobCache, damaged: list[str]) -> bool:
        """Adds the intact blobs of a file to the cache. Returns whether all are intact.

        Their digests are of what `pread` returns: to read a bad sector through the map would kill the process.
        """
        start, is_intact = 0, True
        with OS_FILES.opened(self.folder / file.name) as fd:
            content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            for digest, size in file.blobs:
                blob = content[start : start + size]
                if blake3(pread_readable(OS_FILES, fd, len(blob), start)).digest() == digest:
                    cache.put(digest, blob)
                else:
                    is_intact = False
                    damaged.append(f"file={self.folder / file.name}: a part at byte {start} has another digest")
                start += size
        return is_intact

    def save(self, versions: Iterable[StoredVersion], cache: BlobCache, learner_public_key: bytes = b"") -> None:
        """Makes `versions` the content of the folder, durably. Raises OSError; the previous content then remains."""
        self.folder.mkdir(parents=True, exist_ok=True)
        versions = list(versions)
        needed = {digest: len(cache.get(digest) or b"") for version in versions for digest in version.digests}
        files = {name: file for name, file in self._files.items() if _live_fraction(file, needed) >= MIN_LIVE_FRACTION}
        held = {digest for file in files.values() for digest, _ in file.blobs}
        missing = [(digest, size) for digest, size in needed.items() if digest not in held]
        try:
            for blobs in _grouped(missing):
                name = self._free_name()
                content = b"".join(cache.get(digest) or b"" for digest, _ in blobs)
                replace_all_durably({self.folder / name: content})
                files[name] = _BlobFile(name, tuple(blobs))
            index = _Index(tuple(version.signed for version in versions), tuple(files.values()), learner_public_key)
            replace_durably(self.folder / INDEX_FILE, msgspec.msgpack.encode(index))
        except OSError:
            self._remove_unlisted({file.name for file in self._read_index().files})  # they may be what fills the disk
            raise
        self._files = files
        self._remove_unlisted(files.keys())

    def _free_name(self) -> str:
        names: Iterator[str] = (f"{number:08d}{_SUFFIX}" for number in count(len(self._files)))
        return next(name for name in names if not (self.folder / name).exists())

    def _remove_unlisted(self, names: Iterable[str]) -> None:
        """Removes files that are not listed, and partial files of a killed writer."""
        listed = set(names)
        for path in (*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{_SUFFIX}.*")):
            if path.name not in listed:
                path.unlink(missing_ok=True)

    def learner_public_key(self) -> bytes:
        """Returns the public key that `save` stored."""
        return self._read_index().signer

    def read_pin(self) -> SignedRecord | None:
        """Returns the newest signed `PinnedVersion`, or None. Raises OSError, WireError."""
        path = self.folder / PIN_FILE
        return decode_record(path.read_bytes(), SignedRecord) if path.exists() else None

    def clear_pin(self) -> None:
        """Removes the pin durably, if there is one. Raises OSError."""
        if (self.folder / PIN_FILE).exists():
            remove_durably(self.folder / PIN_FILE)

    def set_pin(self, pin: SignedRecord) -> None:
        """Stores a pin durably: a person for the gateway, a robot for its next start. Raises OSError."""
        replace_durably(self.folder / PIN_FILE, msgspec.msgpack.encode(pin))

    def keep(self, versions: Collection[int]) -> None:
        """Asks the gateway to keep these versions, as far as it has them, instead of those before. Raises OSError."""
        replace_durably(self.folder / KEPT_FILE, " ".join(map(str, versions)).encode())

    def kept(self) -> set[int]:
        """Returns the versions to keep."""
        try:
            return set(map(int, (self.folder / KEPT_FILE).read_text().split()))
        except (OSError, ValueError):
            return set()

    def manifests(self) -> list[WeightsManifest]:
        """Returns the manifests of the folder's versions, without a check of their blobs."""
        return [decode_record(signed.body, WeightsManifest) for signed in self._read_index().manifests]

    def _read_index(self) -> _Index:
        path = self.folder / INDEX_FILE
        if not path.exists():
            return _Index()
        try:
            return decode_record(path.read_bytes(), _Index)
        except WireError as error:
            _log.warning("weights.damaged file=%s: %s", path, error)
            return _Index()


def _live_fraction(file: _BlobFile, needed: dict[bytes, int]) -> float:
    total = sum(size for _, size in file.blobs)
    return sum(size for digest, size in file.blobs if digest in needed) / max(1, total)


def _grouped(blobs: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    """Yields the blobs of each file."""
    group, total = list[tuple[bytes, int]](), 0
    for blob in blobs:
        if group and total + blob[1] > FILE_BYTES:
            yield group
            group, total = [], 0
        group.append(blob)
        total += blob[1]
    if group:
        yield group


def newest_version(catalog: VersionCatalog, number: int = NO_VERSION) -> StoredVersion | None:
    """Returns the newest version, or that of this number, in its most exact precision; None if it is not there."""
    versions = [each for each in catalog.versions.values() if number in (NO_VERSION, each.manifest.version)]
    order = {precision: -rank for rank, precision in enumerate(_PRECISIONS)}
    return max(
        versions,
        key=lambda v: (v.manifest.epoch, v.manifest.version, order[v.manifest.precision]),
        default=None,
    )


def read_tensors(
    version: StoredVersion, cache: BlobCache, known: Mapping[TensorEntry, Array] = MappingProxyType({})
) -> dict[TensorEntry, Array]:
    """Returns the read-only tensors of a complete version; the cache then holds views of them.

    Args:
        known: tensors that are taken over if they are equal.
    """
    tensors = dict[TensorEntry, Array]()
    for entry in version.entries:
        if (equal := known.get(entry)) is not None:
            tensors[entry] = equal
            continue
        size = entry_bytes(entry)
        blobs = [cache.get(digest) for digest in entry.blobs]
        if len(blobs) == 1 and blobs[0] is not None:
            content = np.frombuffer(blobs[0], np.uint8)
        else:
            content = np.empty(size, np.uint8)
            for index, (digest, blob) in enumerate(zip(entry.blobs, blobs, strict=True)):
                part = content[index * BLOB_BYTES : (index + 1) * BLOB_BYTES]
                part[:] = np.frombuffer(blob or b"", np.uint8)
                cache.put(digest, part.data)
        content.flags.writeable = False
        tensors[entry] = content.view(dtype_of(entry.dtype)).reshape(entry.shape)
    return tensors
