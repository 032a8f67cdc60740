"""Versions on disk: one file a parcel, and an index that is replaced in one step and names no file that is not whole.

After a killed process or a power cut the folder holds what the index says. A damaged file is reported and passed over,
and with it what cannot be reached without it.
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
    """One thread writes to the folder; any number of others may open it to read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: set[bytes] = set()  # parcels whose files were read or written here

    def load(self) -> VersionIndex:
        """What is whole in the folder; an empty catalogue where there is none. Raises OSError."""
        for _ in range(OPEN_ATTEMPTS):
            index = self._index()
            catalogue, damaged = self._read(index)
            if not damaged or index == self._index():  # else its writer has gone on meanwhile
                break
        for what in damaged:
            _log.warning("weights.damaged %s", what)
        return catalogue

    def _read(self, index: _StoreIndex) -> tuple[VersionIndex, list[str]]:
        """What is whole of what `index` names, and what is not, in words."""
        catalogue, damaged = VersionIndex(), list[str]()
        for info in index.parcels:
            try:
                catalogue.patches[info.id] = Patch(info, self._map(info))
                self._whole.add(info.id)
            except (OSError, ValueError, WireError) as error:
                damaged.append(f"version={info.version}: {error}")
        for signed in index.manifests:
            try:
                manifest = decode_record(signed.body, WeightsManifest)
            except WireError as error:
                damaged.append(f"file={self.folder / INDEX_FILE}: {error}")
                continue
            catalogue.manifests[manifest.form, manifest.version] = (manifest, signed)
        return catalogue, damaged

    def save(self, index: VersionIndex, learner_public_key: bytes = b"") -> None:
        """Makes `catalogue` what the folder holds; durable on return. Raises OSError: it holds what it held before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._write(index, learner_public_key)
        except OSError:
            self._tidy(self._index().parcels)  # what was written for nothing may be what fills the disk
            raise
        self._tidy(index.patch_infos())

    def _write(self, catalogue: VersionIndex, signer: bytes) -> None:
        paths = {of: self._path(parcel.info) for of, parcel in catalogue.patches.items()}
        fresh = {of: path for of, path in paths.items() if of not in self._whole or not path.exists()}
        self._whole -= fresh.keys()  # a damaged file is replaced
        replace_all_durably({path: catalogue.patches[of].payload for of, path in fresh.items()})
        self._whole |= fresh.keys()
        index = _StoreIndex(
            tuple(signed for _, signed in catalogue.manifests.values()), tuple(catalogue.patch_infos()), signer
        )
        replace_durably(self.folder / INDEX_FILE, msgspec.msgpack.encode(index))

    def _tidy(self, infos: Sequence[PatchInfo]) -> None:
        """Removes what is not one of these, and what was half written by who was killed."""
        self._whole &= {info.id for info in infos}
        named = {self._path(info) for info in infos}
        for path in (*self.folder.glob(f"*{_PATCH_SUFFIX}"), *self.folder.glob(f".*{_PATCH_SUFFIX}.*")):
            if path not in named:
                path.unlink(missing_ok=True)

    def mark_corrupt(self, parcel: bytes) -> None:
        """What was read of a parcel has turned out damaged since: the next `save` that has it writes it anew."""
        self._whole.discard(parcel)

    def learner_public_key(self) -> bytes:
        """The public key that `save` was given."""
        return self._index().signer

    def read_pin(self) -> SignedRecord | None:
        """The newest order that a person gave, where there is one. Raises OSError, WireError."""
        path = self.folder / PIN_FILE
        return decode_record(path.read_bytes(), SignedRecord) if path.exists() else None

    def clear_pin(self) -> None:
        """Removes the order, where there is one, durably. Raises OSError."""
        if (self.folder / PIN_FILE).exists():
            remove_durably(self.folder / PIN_FILE)

    def set_pin(self, order: SignedRecord) -> None:
        """Leaves an order for the gateway, durably."""
        replace_durably(self.folder / PIN_FILE, msgspec.msgpack.encode(order))

    def _index(self) -> _StoreIndex:
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

    def _map(self, info: PatchInfo) -> memoryview:
        check_patch(info)
        path = self._path(info)
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if len(content) != info.size_bytes:
            raise WireError(f"{path} has {len(content)} bytes, not {info.size_bytes}")
        for grain in range(info.block_count):
            start = grain * info.block_bytes
            if not is_block_intact(content[start : start + info.block_bytes], info, grain):
                raise WireError(f"{path} is damaged")
        return content


def newest_version(catalogue: VersionIndex) -> tuple[WeightsManifest, TensorSet] | None:
    """The newest version that is whole, in its most exact form; None where there is none. Damage is reported."""
    for version in sorted({version for _, version in catalogue.manifests}, reverse=True):
        for form in ("exact", "bf16", "int8"):
            if (form, version) in catalogue.manifests and form in catalogue.complete_precisions(version):
                try:
                    manifest = _with_tensors(catalogue, catalogue.manifests[form, version][0])
                    return manifest, _read_tensor_set(catalogue, manifest)
                except WireError as error:
                    _log.warning("weights.damaged version=%d: %s", version, error)
    return None


def _with_tensors(catalogue: VersionIndex, manifest: WeightsManifest) -> WeightsManifest:
    """`manifest` with its tensors. Raises WireError: their table is not there, or damaged."""
    if manifest.has_tensors:
        return manifest
    table = find_table(catalogue.patch_infos(), manifest)
    if table is None:
        raise WireError(f"the table of version {manifest.version} ({manifest.form}) is not here")
    return with_tensor_table(manifest, catalogue.patches[table.id].payload)


def _read_tensor_set(catalogue: VersionIndex, manifest: WeightsManifest) -> TensorSet:
    """The state that `manifest` describes, from the catalogue. Raises WireError: it is not there, or damaged."""
    way = cheapest_path(catalogue.patch_infos(), manifest.form, manifest.version, {})
    if way is None:
        raise WireError(f"version {manifest.version} ({manifest.form}) is not here any more")
    return apply_patches(manifest, [(info, catalogue.patches[info.id].payload) for info in way.patches], None)
