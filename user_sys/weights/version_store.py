"""Versions on disk: one file per patch, and an index that is replaced atomically and lists complete files only.

After a killed process or a power cut the folder holds the versions of the index. Damaged files are logged and skipped,
with every version that needs them.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hal.durable import remove_durably, replace_all_durably, replace_durably
from user_sys.errors import WireError
from user_sys.messages import PatchInfo, SignedRecord, WeightsManifest, check_patch, decode_record
from user_sys.weights.patches import Patch, VersionIndex, apply_patches, cheapest_path, find_table, is_block_intact
from user_sys.weights.state import TensorSet, with_tensor_table

INDEX_FILE = "index"
PIN_FILE = "order"
OPEN_ATTEMPTS = 5
_PATCH_SUFFIX = ".parcel"
_log = logging.getLogger(__name__)


class _StoreIndex(msgspec.Struct, frozen=True):
    manifests: tuple[SignedRecord, ...] = ()
    parcels: tuple[PatchInfo, ...] = ()
    signer: bytes = b""


class VersionStore:
    """A folder of versions. One thread writes to it; any number of others may read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._intact: set[bytes] = set()  # patches whose files this object has read or written

    def load(self) -> VersionIndex:
        """Reads the intact versions of the folder; the index is empty if there are none. Raises OSError."""
        for _ in range(OPEN_ATTEMPTS):
            stored = self._read_index()
            index, damaged = self._load_patches(stored)
            if not damaged or stored == self._read_index():  # otherwise the writer has replaced files meanwhile
                break
        for reason in damaged:
            _log.warning("weights.damaged %s", reason)
        return index

    def _load_patches(self, stored: _StoreIndex) -> tuple[VersionIndex, list[str]]:
        """Returns the intact part of `stored`, and a message for each damaged part."""
        index, damaged = VersionIndex(), list[str]()
        for info in stored.parcels:
            try:
                index.patches[info.id] = Patch(info, self._map_patch(info))
                self._intact.add(info.id)
            except (OSError, ValueError, WireError) as error:
                damaged.append(f"version={info.version}: {error}")
        for signed in stored.manifests:
            try:
                manifest = decode_record(signed.body, WeightsManifest)
            except WireError as error:
                damaged.append(f"file={self.folder / INDEX_FILE}: {error}")
                continue
            index.manifests[manifest.form, manifest.version] = (manifest, signed)
        return index, damaged

    def save(self, index: VersionIndex, learner_public_key: bytes = b"") -> None:
        """Makes `index` the content of the folder, durably. Raises OSError; the previous content then remains."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._write(index, learner_public_key)
        except OSError:
            self._remove_unlisted(self._read_index().parcels)  # the partial files may be what fills the disk
            raise
        self._remove_unlisted(index.patch_infos())

    def _write(self, index: VersionIndex, signer: bytes) -> None:
        paths = {patch_id: self._path(patch.info) for patch_id, patch in index.patches.items()}
        new = {i: path for i, path in paths.items() if i not in self._intact or not path.exists()}
        self._intact -= new.keys()  # a damaged file is written again
        replace_all_durably({path: index.patches[patch_id].payload for patch_id, path in new.items()})
        self._intact |= new.keys()
        manifests = tuple(signed for _, signed in index.manifests.values())
        stored = _StoreIndex(manifests, tuple(index.patch_infos()), signer)
        replace_durably(self.folder / INDEX_FILE, msgspec.msgpack.encode(stored))

    def _remove_unlisted(self, infos: Sequence[PatchInfo]) -> None:
        """Removes files that are not listed, and partial files of a killed writer."""
        self._intact &= {info.id for info in infos}
        listed = {self._path(info) for info in infos}
        for path in (*self.folder.glob(f"*{_PATCH_SUFFIX}"), *self.folder.glob(f".*{_PATCH_SUFFIX}.*")):
            if path not in listed:
                path.unlink(missing_ok=True)

    def mark_corrupt(self, patch: bytes) -> None:
        """Marks a patch as damaged; the next `save` writes it again."""
        self._intact.discard(patch)

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
        """Stores a pin durably for the gateway."""
        replace_durably(self.folder / PIN_FILE, msgspec.msgpack.encode(pin))

    def _read_index(self) -> _StoreIndex:
        path = self.folder / INDEX_FILE
        if not path.exists():
            return _StoreIndex()
        try:
            return decode_record(path.read_bytes(), _StoreIndex)
        except WireError as error:
            _log.warning("weights.damaged file=%s: %s", path, error)
            return _StoreIndex()

    def _path(self, info: PatchInfo) -> Path:
        return self.folder / f"{info.version:010d}-{info.form}-{info.id.hex()[:24]}{_PATCH_SUFFIX}"

    def _map_patch(self, info: PatchInfo) -> memoryview:
        check_patch(info)
        path = self._path(info)
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if len(content) != info.size_bytes:
            raise WireError(f"{path} has {len(content)} bytes, expected {info.size_bytes}")
        for block in range(info.block_count):
            start = block * info.block_bytes
            if not is_block_intact(content[start : start + info.block_bytes], info, block):
                raise WireError(f"{path} is damaged: block {block} fails its checksum")
        return content


def newest_version(index: VersionIndex) -> tuple[WeightsManifest, TensorSet] | None:
    """Returns the newest complete version in its most exact precision, or None. Logs damage."""
    for version in sorted({version for _, version in index.manifests}, reverse=True):
        for form in ("exact", "bf16", "int8"):
            if (form, version) in index.manifests and form in index.complete_precisions(version):
                try:
                    manifest = _with_tensors(index, index.manifests[form, version][0])
                    return manifest, _read_tensor_set(index, manifest)
                except WireError as error:
                    _log.warning("weights.damaged version=%d: %s", version, error)
    return None


def _with_tensors(index: VersionIndex, manifest: WeightsManifest) -> WeightsManifest:
    """Returns `manifest` with its tensors. Raises WireError if their table is missing or damaged."""
    if manifest.has_tensors:
        return manifest
    table = find_table(index.patch_infos(), manifest)
    if table is None:
        raise WireError(f"the table of tensors of version {manifest.version} ({manifest.form}) is missing")
    return with_tensor_table(manifest, index.patches[table.id].payload)


def _read_tensor_set(index: VersionIndex, manifest: WeightsManifest) -> TensorSet:
    """Returns the tensors that `manifest` describes. Raises WireError if they are missing or damaged."""
    path = cheapest_path(index.patch_infos(), manifest.form, manifest.version, {})
    if path is None:
        raise WireError(f"no patches lead to version {manifest.version} ({manifest.form})")
    return apply_patches(manifest, [(info, index.patches[info.id].payload) for info in path.patches], None)
