"""What one end has: manifests and parcels of versions, and the cheapest way from what is held to a version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from user_sys.weights.parcel import Parcel
from user_sys.weights.records import NO_VERSION, Form, Manifest, ParcelInfo, Signed

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
    """The cheapest way to version `target` of `form`, or None where there is none.

    Args:
        held: digest of each version of this form that the receiver has; a difference from another base is of no use.
    """
    ways: dict[int, Way] = {version: Way() for version in held}
    for info in sorted((p for p in parcels if p.form == form and p.version <= target), key=lambda p: p.version):
        before = Way() if info.base == NO_VERSION else ways.get(info.base)
        if before is None or held.get(info.base, info.base_digest) != info.base_digest:
            continue
        total = before.cost + cost(info)
        if total < ways.get(info.version, Way(cost=math.inf)).cost:
            ways[info.version] = Way((*before.parcels, info), total)
    return ways.get(target)


def reachable(parcels: Iterable[ParcelInfo], form: Form) -> set[int]:
    """The versions of `form` to which parcels lead from nothing."""
    found: set[int] = set()
    for info in sorted((p for p in parcels if p.form == form), key=lambda p: p.version):
        if info.base == NO_VERSION or info.base in found:
            found.add(info.version)
    return found


@dataclass
class Catalogue:
    """Signed manifests by form and version, and parcels by id. One thread changes it; others may look up parcels."""

    manifests: dict[tuple[Form, int], tuple[Manifest, Signed]] = field(default_factory=dict)
    parcels: dict[bytes, Parcel] = field(default_factory=dict)

    def infos(self) -> list[ParcelInfo]:
        return [parcel.info for parcel in list(self.parcels.values())]

    def versions(self) -> list[int]:
        """Those of which everything is there, in one form at least, ascending."""
        here = {form: reachable(self.infos(), form) for form in {form for form, _ in self.manifests}}
        return sorted({version for form, version in self.manifests if version in here[form]})

    def forms(self, version: int) -> list[Form]:
        """The forms in which everything of `version` is there."""
        infos = self.infos()
        return [of for of, v in self.manifests if v == version and version in reachable(infos, of)]

    def retain(self, versions: Iterable[int], since: int) -> list[Parcel]:
        """Drops what is needed neither for one of `versions` nor for a receiver that has `since` or newer.

        Returns the parcels that were dropped.
        """
        infos, needed = self.infos(), set()
        wanted = set(versions)
        for form, version in list(self.manifests):
            if version in wanted and (way := cheapest(infos, form, version, {})) is not None:
                needed |= {info.id for info in way.parcels}
        needed |= {info.id for info in infos if info.base >= since and info.base != NO_VERSION}
        dropped = [self.parcels.pop(info.id) for info in infos if info.id not in needed]
        for form, version in list(self.manifests):
            if version not in wanted and version < since:
                del self.manifests[form, version]
        return dropped
