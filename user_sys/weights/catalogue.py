"""What one end has: manifests and parcels of versions, and the cheapest way from what is held to a version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from user_sys.weights.parcel import Parcel
from user_sys.weights.records import NO_VERSION, TABLE, Form, Manifest, ParcelInfo, Signed

Cost = Callable[[ParcelInfo], float]


@dataclass(frozen=True)
class Way:
    """Parcels, one after the other, that lead to a version, and what they cost; none where it is there already."""

    parcels: tuple[ParcelInfo, ...] = ()
    cost: float = 0.0


def size_of(info: ParcelInfo) -> float:
    """The cost of a parcel where nothing is known but its size."""
    return float(info.size_bytes)


def cheapest(
    parcels: Iterable[ParcelInfo],
    form: Form,
    target: int,
    held: Mapping[int, bytes],
    cost: Cost = size_of,
) -> Way | None:
    """The cheapest way to the tensors of version `target` of `form`, or None where there is none.

    Args:
        held: digest of each version of this form, and of the target's life, that the receiver has; a difference from
            another base is of no use. Who has none takes the newest ``parts``, and no differences in their stead.
    """
    usable = _ascending(p for p in parcels if p.form == form and p.version <= target)
    short = None if held else _cheapest(_shortened(usable), target, held, cost)
    return short or _cheapest(usable, target, held, cost)


def _cheapest(usable: Iterable[ParcelInfo], target: int, held: Mapping[int, bytes], cost: Cost) -> Way | None:
    ways: dict[int, Way] = {version: Way() for version in held}
    for info in usable:
        before = _before(info, ways)
        if before is None or held.get(info.base, info.base_digest) != info.base_digest:
            continue
        total = before.cost + cost(info)
        if total < ways.get(info.version, Way(cost=math.inf)).cost:
            ways[info.version] = Way((*before.parcels, info), total)
    return ways.get(target)


def _shortened(usable: Sequence[ParcelInfo]) -> list[ParcelInfo]:
    """`usable` without the differences up to the newest ``parts`` that change a full parcel."""
    full = [info.version for info in usable if info.codec == "full"]
    anchors = (p for p in reversed(usable) if p.codec == "parts" and any(p.base <= v < p.version for v in full))
    if (anchor := next(anchors, None)) is None:
        return list(usable)
    return [p for p in usable if p.base == NO_VERSION or p.id == anchor.id or p.version > anchor.version]


def _before(info: ParcelInfo, ways: Mapping[int, Way]) -> Way | None:
    """The cheapest of `ways` that leads to what a parcel changes."""
    if info.codec == "parts":
        fitting = (way for version, way in ways.items() if info.base <= version < info.version)
        return min(fitting, key=lambda way: way.cost, default=None)
    return Way() if info.base == NO_VERSION else ways.get(info.base)


def reachable(parcels: Iterable[ParcelInfo], form: Form) -> set[int]:
    """The versions of `form` to whose tensors parcels lead from nothing."""
    found: set[int] = set()
    for info in _ascending(p for p in parcels if p.form == form):
        bases = range(info.base, info.version if info.codec == "parts" else info.base + 1)
        if info.base == NO_VERSION or any(version in bases for version in found):
            found.add(info.version)
    return found


def up_to_date(parcels: Iterable[ParcelInfo]) -> list[ParcelInfo]:
    """`parcels` but for ``parts`` that newer ones stand in for: these change all that they change, and lead further."""
    found, oldest = list[ParcelInfo](), dict[Form, int]()
    for info in sorted(parcels, key=lambda info: info.version, reverse=True):
        if info.codec == "parts":
            if info.base >= oldest.get(info.form, info.version):
                continue
            oldest[info.form] = info.base
        found.append(info)
    return found


def thinned(versions: list[int], most: int) -> list[int]:
    """At most `most` of ascending `versions`: the newest, and the older the further apart."""
    kept = list(versions)
    while len(kept) > max(1, most):
        if most < 3:
            kept.pop(0)
            continue
        spans = [(kept[i + 1] - kept[i - 1]) / (kept[-1] - kept[i] + 1) for i in range(1, len(kept) - 1)]
        kept.pop(1 + spans.index(min(spans)))
    return kept


def table_of(parcels: Iterable[ParcelInfo], manifest: Manifest) -> ParcelInfo | None:
    """The parcel with the table of the tensors of `manifest`; None where there is none."""
    return next((info for info in parcels if info.codec == TABLE and _described(info) == _described(manifest)), None)


def _described(told: ParcelInfo | Manifest) -> tuple[Form, int, int]:
    size_bytes = told.table_bytes if isinstance(told, Manifest) else told.size_bytes
    return told.form, told.version, size_bytes


def _ascending(parcels: Iterable[ParcelInfo]) -> list[ParcelInfo]:
    return sorted((info for info in parcels if info.codec != TABLE), key=lambda info: info.version)


@dataclass
class Catalogue:
    """Signed manifests by form and version, and parcels by id. One thread changes it; others may look up parcels."""

    manifests: dict[tuple[Form, int], tuple[Manifest, Signed]] = field(default_factory=dict)
    parcels: dict[bytes, Parcel] = field(default_factory=dict)

    def infos(self) -> list[ParcelInfo]:
        return [parcel.info for parcel in list(self.parcels.values())]

    def versions(self) -> list[int]:
        """Those of which everything is there, in one form at least, ascending."""
        return sorted({version for _, version in self._whole()})

    def forms(self, version: int) -> list[Form]:
        """The forms in which everything of `version` is there."""
        return [form for form, of in self._whole() if of == version]

    def retain(self, versions: Iterable[int], since: int, parcels: Iterable[bytes] = ()) -> list[Parcel]:
        """Drops what is needed neither for one of `versions` nor for a receiver that has `since` or newer.

        Of the others it keeps `parcels` (ids), and the tables of the tensors that these lead to.

        Returns the parcels that were dropped.
        """
        infos, needed = self.infos(), set(parcels)
        wanted = set(versions)
        described = wanted | {info.version for info in infos if info.id in needed}
        for form, version in list(self.manifests):
            if version in wanted and (way := cheapest(infos, form, version, {})) is not None:
                needed |= {info.id for info in way.parcels}
        needed |= {info.id for info in up_to_date(infos) if info.base >= since and info.base != NO_VERSION}
        needed |= {info.id for info in infos if info.codec == TABLE and info.version in described}
        dropped = [self.parcels.pop(info.id) for info in infos if info.id not in needed]
        for form, version in list(self.manifests):
            if version not in wanted and version < since:
                del self.manifests[form, version]
        return dropped

    def _whole(self) -> list[tuple[Form, int]]:
        """Forms of versions of which everything is there."""
        infos = self.infos()
        here = {form: reachable(infos, form) for form in {form for form, _ in self.manifests}}
        tables = {_described(info) for info in infos if info.codec == TABLE}
        return [
            (form, version)
            for (form, version), (manifest, _) in self.manifests.items()
            if version in here[form] and (manifest.entire or _described(manifest) in tables)
        ]
