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
from user_sys.weights.catalogue import Catalogue, cheapest, table_of
from user_sys.weights.parcel import Parcel, assemble, crc_of
from user_sys.weights.records import Manifest, ParcelInfo, Signed, check_parcel, decode_record
from user_sys.weights.state import State, with_table

INDEX = "index"
ORDER = "order"
OPEN_ATTEMPTS = 5
_SUFFIX = ".parcel"
_log = logging.getLogger(__name__)


class _Index(msgspec.Struct, frozen=True):
    manifests: tuple[Signed, ...] = ()
    parcels: tuple[ParcelInfo, ...] = ()
    signer: bytes = b""


class Shelf:
    """One thread writes to the folder; any number of others may open it to read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: set[bytes] = set()  # parcels whose files were read or written here

    def open(self) -> Catalogue:
        """What is whole in the folder; an empty catalogue where there is none. Raises OSError."""
        for _ in range(OPEN_ATTEMPTS):
            index = self._index()
            catalogue, damaged = self._read(index)
            if not damaged or index == self._index():  # else its writer has gone on meanwhile
                break
        for what in damaged:
            _log.warning("weights.damaged %s", what)
        return catalogue

    def _read(self, index: _Index) -> tuple[Catalogue, list[str]]:
        """What is whole of what `index` names, and what is not, in words."""
        catalogue, damaged = Catalogue(), list[str]()
        for info in index.parcels:
            try:
                catalogue.parcels[info.id] = Parcel(info, self._map(info))
                self._whole.add(info.id)
            except (OSError, ValueError, WireError) as error:
                damaged.append(f"version={info.version}: {error}")
        for signed in index.manifests:
            try:
                manifest = decode_record(signed.body, Manifest)
            except WireError as error:
                damaged.append(f"file={self.folder / INDEX}: {error}")
                continue
            catalogue.manifests[manifest.form, manifest.version] = (manifest, signed)
        return catalogue, damaged

    def keep(self, catalogue: Catalogue, signer: bytes = b"") -> None:
        """Makes `catalogue` what the folder holds; durable on return. Raises OSError: it holds what it held before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._write(catalogue, signer)
        except OSError:
            self._tidy(self._index().parcels)  # what was written for nothing may be what fills the disk
            raise
        self._tidy(catalogue.infos())

    def _write(self, catalogue: Catalogue, signer: bytes) -> None:
        paths = {of: self._path(parcel.info) for of, parcel in catalogue.parcels.items()}
        fresh = {of: path for of, path in paths.items() if of not in self._whole or not path.exists()}
        self._whole -= fresh.keys()  # a damaged file is replaced
        replace_all_durably({path: catalogue.parcels[of].payload for of, path in fresh.items()})
        self._whole |= fresh.keys()
        index = _Index(tuple(signed for _, signed in catalogue.manifests.values()), tuple(catalogue.infos()), signer)
        replace_durably(self.folder / INDEX, msgspec.msgpack.encode(index))

    def _tidy(self, infos: Sequence[ParcelInfo]) -> None:
        """Removes what is not one of these, and what was half written by who was killed."""
        self._whole &= {info.id for info in infos}
        named = {self._path(info) for info in infos}
        for path in (*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{_SUFFIX}.*")):
            if path not in named:
                path.unlink(missing_ok=True)

    def doubt(self, parcel: bytes) -> None:
        """What was read of a parcel has turned out damaged since: the next `keep` that has it writes it anew."""
        self._whole.discard(parcel)

    def signer(self) -> bytes:
        """The public key that `keep` was given."""
        return self._index().signer

    def order(self) -> Signed | None:
        """The newest order that a person gave, where there is one. Raises OSError, WireError."""
        path = self.folder / ORDER
        return decode_record(path.read_bytes(), Signed) if path.exists() else None

    def withdraw(self) -> None:
        """Removes the order, where there is one, durably. Raises OSError."""
        if (self.folder / ORDER).exists():
            remove_durably(self.folder / ORDER)

    def give(self, order: Signed) -> None:
        """Leaves an order for the gateway, durably."""
        replace_durably(self.folder / ORDER, msgspec.msgpack.encode(order))

    def _index(self) -> _Index:
        path = self.folder / INDEX
        if not path.exists():
            return _Index()
        try:
            return decode_record(path.read_bytes(), _Index)
        except WireError as error:
            _log.warning("weights.damaged file=%s: %s", path, error)
            return _Index()

    def _path(self, info: ParcelInfo) -> Path:
        return self.folder / f"{info.version:010d}-{info.form}-{info.id.hex()[:24]}{_SUFFIX}"

    def _map(self, info: ParcelInfo) -> memoryview:
        check_parcel(info)
        path = self._path(info)
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if len(content) != info.size_bytes:
            raise WireError(f"{path} has {len(content)} bytes, not {info.size_bytes}")
        for grain in range(info.grains):
            start = grain * info.grain_bytes
            if not crc_of(content[start : start + info.grain_bytes], info, grain):
                raise WireError(f"{path} is damaged")
        return content


def newest(catalogue: Catalogue) -> tuple[Manifest, State] | None:
    """The newest version that is whole, in its most exact form; None where there is none. Damage is reported."""
    for version in sorted({version for _, version in catalogue.manifests}, reverse=True):
        for form in ("exact", "bf16", "int8"):
            if (form, version) in catalogue.manifests and form in catalogue.forms(version):
                try:
                    manifest = _entire(catalogue, catalogue.manifests[form, version][0])
                    return manifest, _state_of(catalogue, manifest)
                except WireError as error:
                    _log.warning("weights.damaged version=%d: %s", version, error)
    return None


def _entire(catalogue: Catalogue, manifest: Manifest) -> Manifest:
    """`manifest` with its tensors. Raises WireError: their table is not there, or damaged."""
    if manifest.entire:
        return manifest
    table = table_of(catalogue.infos(), manifest)
    if table is None:
        raise WireError(f"the table of version {manifest.version} ({manifest.form}) is not here")
    return with_table(manifest, catalogue.parcels[table.id].payload)


def _state_of(catalogue: Catalogue, manifest: Manifest) -> State:
    """The state that `manifest` describes, from the catalogue. Raises WireError: it is not there, or damaged."""
    way = cheapest(catalogue.infos(), manifest.form, manifest.version, {})
    if way is None:
        raise WireError(f"version {manifest.version} ({manifest.form}) is not here any more")
    return assemble(manifest, [(info, catalogue.parcels[info.id].payload) for info in way.parcels], None)
