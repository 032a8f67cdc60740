"""A robot's end: from offers to a policy with new weights, whatever the link does meanwhile.

It takes the newest version that it can complete, in the most exact form that arrives soon enough. A version under way
is given up for a newer one only where that one arrives sooner; so a link that is slower than the learner still brings
a version each time. Versions only grow, unless a person orders an older one, or another run has begun.

Nothing here knows a network: requests go out through a callable, messages come in as records.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_fields

from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import WeightsGone, WeightsGrains, WeightsOffer
from user_sys.weights.catalogue import Way, cheapest, table_of
from user_sys.weights.fetch import Ask, Fetcher
from user_sys.weights.forms import restore
from user_sys.weights.parcel import RunningDigests, assemble
from user_sys.weights.records import (
    NO_VERSION,
    TABLE,
    UNNAMED,
    Form,
    Life,
    Manifest,
    Order,
    ParcelInfo,
    Signed,
)
from user_sys.weights.signing import Trust
from user_sys.weights.state import Breathe, State, at_once, with_table

PATIENCE_S = 5.0
"""A form that takes longer than this to arrive makes room for a less exact one, where the policy allows it."""
SPEED_SMOOTHING = 0.7
FIRST_SPEED = 1e9  # bytes/s of applying, until it was measured
ANY_SLACK = 1 << 20

Load = Callable[[Manifest, Mapping[str, Array], float], None]
"""Takes arrays into the second copy of the policy, given when the version was first heard of. Raises WireError."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A version that is complete here, and the learner's signature of it."""

    manifest: Manifest
    signed: Signed
    state: State


@dataclass(frozen=True)
class _Target:
    """The version under way: its manifest, what is to be fetched, and when it was first heard of.

    The first of `way` is the table of the manifest's tensors, as long as these are not there. `digests` are of the
    first parcel, where that is a full one; they are taken while it comes.
    """

    manifest: Manifest
    signed: Signed
    way: tuple[ParcelInfo, ...]
    heard_s: float
    digests: RunningDigests | None


@dataclass(frozen=True)
class _Offered:
    manifests: Mapping[Form, tuple[Manifest, Signed]]
    parcels: tuple[ParcelInfo, ...]
    version: int
    run: bytes
    heard_s: float


class Receiver:
    """One thread calls it.

    Args:
        trust: in the learner's key.
        load: takes a complete version over.
        ask: requests grains.
        forms: that the policy accepts, the most exact first.
        breathe: called during bulk work, see `state.Breathe`.
        limit: bytes/s that the governor leaves to the link.

    Attributes:
        refused: versions and offers that were forged, damaged, or not the policy's; each was logged.
        abandoned: versions under way that were given up for a newer one.
        run: whose versions the gateway offers; empty before the first offer.
        stages: seconds that the newest version took here, from the first word of it on: ``fetch``, ``decode`` (with
            what was not yet verified) and ``load``.
    """

    def __init__(
        self,
        trust: Trust,
        load: Load,
        ask: Ask,
        *,
        forms: Sequence[Form] = ("exact",),
        breathe: Breathe = at_once,
        limit: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused = self.abandoned = 0
        self.run = b""
        self.stages: Mapping[str, float] = {}
        self._trust, self._load, self._forms, self._breathe = trust, load, tuple(forms), breathe
        self._clock = clock
        self._fetcher = Fetcher(ask, clock, limit)
        self._held: Held | None = None
        self._offered: _Offered | None = None
        self._target: _Target | None = None
        self._orders: dict[bytes, Order] = {}  # the newest of each run
        self._not_ours = b"", NO_VERSION  # run and number of a version that is sound and that the policy does not take
        self._life = UNNAMED  # the latest that was heard of, or kept
        self._useless: set[bytes] = set()  # parcels of which nothing good came, among those offered
        self._gone: set[bytes] = set()  # parcels that were not there any more when they were last offered
        self._speeds: dict[str, float] = {}

    @property
    def version(self) -> int:
        """The newest that was loaded; -1 before the first."""
        return self._held.manifest.version if self._held else NO_VERSION

    @property
    def held(self) -> Held | None:
        """The version that was loaded last."""
        return self._held

    @property
    def busy(self) -> bool:
        """A version is under way."""
        return self._target is not None

    @property
    def room_bytes(self) -> int:
        """So much of the next version may come unasked: what is little for the link, and nothing before it is due."""
        return 0 if self.busy else self._fetcher.room_bytes

    @property
    def told(self) -> bool:
        """Whether a version of `run` was offered, and may be taken."""
        return self._offered is not None and self._offered.run == self.run

    @property
    def newest(self) -> int:
        """The version that is to act, as far as is known here."""
        return self._offered.version if self._offered else self.version

    @property
    def damaged(self) -> int:
        """Grains that came damaged."""
        return self._fetcher.damaged

    @property
    def link_bytes_per_s(self) -> float:
        return self._fetcher.rate.bytes_per_s

    def start_from(self, kept: Held) -> None:
        """Loads what was kept from an earlier life. Raises WireError: it is not signed, or not this policy's."""
        self._trust.open(kept.signed, Manifest)
        if kept.manifest.form not in self._forms:
            raise WireError(f"it was kept as {kept.manifest.form}, and this robot takes {', '.join(self._forms)}")
        self._load(kept.manifest, restore(kept.state.tensors, kept.state.form), self._clock())
        self._held = kept
        self._life = Life(kept.manifest.run, kept.manifest.life)

    def offered(self, offer: WeightsOffer) -> None:
        """A version is there to be fetched. One with a forged signature is refused, and nothing changes."""
        if offer.greeting:
            self._fetcher.restart()
            self._useless.clear()
        try:
            self._trust.adopt(offer.signer)
            self._obey(offer.order)
            manifests = [(self._trust.open(signed, Manifest), signed) for signed in offer.manifests]
        except WireError as error:
            self._refuse(str(error))
            return
        allowed = {pair[0].form: pair for pair in manifests if pair[0].form in self._forms}
        versions = {(manifest.run, manifest.version) for manifest, _ in manifests}
        if len(versions) != 1 or not self._is_of_this_run(manifests[0][0]) or not self._wanted(manifests[0][0]):
            return
        run, version = versions.pop()
        if not allowed:
            first, held = manifests[0][0], None if self._held is None else self._held.manifest
            if held is not None and (held.run, held.life) == (first.run, first.life):
                return  # this life's learner publishes it in our form as well: the gateway has another one first
            found = ", ".join(manifest.form for manifest, _ in manifests)
            self._refuse(f"version {version} comes as {found}, and this robot takes {', '.join(self._forms)}")
            return
        heard_s = self._clock()
        if self._offered is not None and (self._offered.run, self._offered.version) == (run, version):
            heard_s = self._offered.heard_s
        parcels = tuple(p for p in offer.parcels if p.form in allowed and _plausible(p, allowed[p.form][0]))
        self._useless &= {info.id for info in parcels}
        self._gone.clear()
        self._offered = _Offered(allowed, parcels, version, run, heard_s)
        self._choose()
        for request in offer.ahead:
            self._fetcher.expect(request.parcel, request.first, request.count)

    def arrived(self, message: WeightsGrains | WeightsGone, payload: memoryview | None = None) -> None:
        """Grains, or word that there are none."""
        if isinstance(message, WeightsGrains) and payload is not None:
            self._fetcher.take(message.parcel, message.first, payload)
            if self._fetcher.hopeless(message.parcel):
                self._refuse("a parcel comes damaged again and again")
                self._fetcher.gone(message.parcel)
                self._give_up({message.parcel})
            elif self._target is not None:
                self._verify_ahead(self._target)  # what has just been copied is still in the processor's cache
        elif isinstance(message, WeightsGone):
            self._fetcher.gone(message.parcel)
            offered = () if self._offered is None else self._offered.parcels
            self._gone |= {info.id for info in offered if info.id == message.parcel}
            self._look_elsewhere({message.parcel})

    def step(self) -> float:
        """Asks for more, or completes a version; returns after how many seconds to call again at the latest."""
        self._take_table()
        if self._target is not None and self._target.manifest.entire and self._fetcher.complete:
            self._complete(self._target)
        return self._fetcher.pump()

    def _take_table(self) -> None:
        """Once the table of its tensors has come, what follows of the version under way can be verified."""
        target = self._target
        if target is None or target.manifest.entire or self._fetcher.missing_bytes(target.way[0]):
            return
        table, *way = target.way
        blamed = table.id
        try:
            manifest = with_table(target.manifest, self._fetcher.payload(table))
            self._fetcher.drop([table])
            blamed = way[0].id if way else table.id
            digests = self._digests(manifest, way)
        except WireError as error:
            self._refuse(str(error))
            self._give_up({blamed})
            return
        self._target = replace(target, manifest=manifest, way=tuple(way), digests=digests)

    def _verify_ahead(self, target: _Target) -> None:
        if target.digests is not None:
            target.digests.advance(self._fetcher.unbroken_bytes(target.way[0]), self._breathe)

    def _obey(self, signed: Signed | None) -> None:
        if signed is None:
            return
        order = self._trust.open(signed, Order)
        former = self._orders.get(order.run)
        if former is None or order.serial > former.serial:
            self._orders[order.run] = order
            if self._target is not None and not self._wanted(self._target.manifest):
                self._drop_target()

    def _is_of_this_run(self, manifest: Manifest) -> bool:
        """Takes note of the run that is offered, unless it ended before another that was heard of began."""
        if manifest.run != self._life.run and manifest.life < self._life.number:
            self._refuse(f"version {manifest.version} is of a run that began before the one whose weights were here")
            return False
        self._life = Life(manifest.run, max(manifest.life, self._life.number))
        self.run = manifest.run
        return True

    def _wanted(self, manifest: Manifest) -> bool:
        """Whether it is what is ordered; without an order, whether it is newer than what is held, or that again.

        A later life with smaller numbers has lost its newest checkpoints: it began from an older one, or anew.
        """
        if manifest.run != self.run:
            return False
        order = self._orders.get(manifest.run)
        if order is not None and order.version != NO_VERSION:
            return manifest.version == order.version
        held = None if self._held is None else self._held.manifest
        if held is None or held.run != manifest.run:
            return True
        return (manifest.life, manifest.version) >= (held.life, held.version)

    def _holds(self, offered: _Offered) -> bool:
        if self._held is None:
            return False
        held = self._held.manifest
        again, _ = offered.manifests.get(held.form, (held, None))
        return (offered.run, offered.version, again.digest) == (held.run, held.version, held.digest)

    def _choose(self) -> None:
        """Turns to what arrives first of the offered version, unless what is under way arrives before that."""
        offered = self._offered
        if offered is None or (offered.run, offered.version) == self._not_ours:
            return
        if self._target is None and self._holds(offered):
            return
        found = self._best(offered)
        if found is None:
            return
        manifest, way = found
        target = self._target
        if target is not None and target.manifest.digest != manifest.digest and self._wanted(target.manifest):
            in_vain_s = self._fetcher.in_vain_bytes(target.way, way.parcels) / self._fetcher.rate.bytes_per_s
            if sum(self._cost(target.manifest)(info) for info in target.way) <= in_vain_s + way.cost:
                return
            self.abandoned += 1
        ids = {info.id for info in way.parcels}
        try:
            self._fetcher.want(way.parcels, {info.id for info in offered.parcels})
        except WireError as error:
            self._refuse(str(error))
            self._useless |= ids
            return
        self._target = None
        try:
            digests = self._digests(manifest, way.parcels)
        except WireError as error:
            self._refuse(str(error))
            self._fetcher.drop(way.parcels)
            self._give_up(ids)
            return
        self._target = _Target(manifest, offered.manifests[manifest.form][1], way.parcels, offered.heard_s, digests)

    def _digests(self, manifest: Manifest, way: Sequence[ParcelInfo]) -> RunningDigests | None:
        """Of the first parcel of `way`, where that is a full one. Raises WireError: it has not the manifest's size."""
        first = way[0] if way else None
        return RunningDigests(manifest, self._fetcher.payload(first)) if first and first.codec == "full" else None

    def _best(self, offered: _Offered) -> tuple[Manifest, Way] | None:
        """The most exact form that comes within `PATIENCE_S`, or else the one that comes first."""
        found: list[tuple[Manifest, Way]] = []
        infos = [info for info in offered.parcels if info.id not in self._useless | self._gone]
        for form in self._forms:
            if form in offered.manifests:
                manifest = self._known(offered.manifests[form][0])
                way = self._way(infos, manifest)
                if way is not None:
                    found.append((manifest, way))
        soon = [(manifest, way) for manifest, way in found if way.cost <= PATIENCE_S]
        return soon[0] if soon else min(found, key=lambda option: option[1].cost, default=None)

    def _known(self, manifest: Manifest) -> Manifest:
        """`manifest`, with its tensors where these are here."""
        for other in () if manifest.entire else (self._held, self._target):
            if other is not None and other.manifest.digest == manifest.digest and other.manifest.entire:
                return with_fields(manifest, tensors=other.manifest.tensors)
        return manifest

    def _way(self, infos: Sequence[ParcelInfo], manifest: Manifest) -> Way | None:
        """The cheapest to a version, with the table of its tensors first, where these are not here."""
        cost = self._cost(manifest)
        way = cheapest(infos, manifest.form, manifest.version, self._bases(infos, manifest), cost)
        if way is None or manifest.entire:
            return way
        table = table_of(infos, manifest)
        return None if table is None else Way((table, *way.parcels), cost(table) + way.cost)

    def _bases(self, infos: Sequence[ParcelInfo], manifest: Manifest) -> dict[int, bytes]:
        """What parcels may change: of an earlier life, the version with which a later one began, where that is held."""
        if self._held is None:
            return {}
        held = self._held.manifest
        if (held.form, held.run) != (manifest.form, manifest.run):
            return {}
        if held.life != manifest.life and (held.version, held.digest) not in {(p.base, p.base_digest) for p in infos}:
            return {}
        if held.version == manifest.version and held.digest != manifest.digest:
            return {}  # two versions of one number: the learner's checkpoints were put back
        return {held.version: held.digest}

    def _cost(self, manifest: Manifest) -> Callable[[ParcelInfo], float]:
        """Seconds until a parcel is here and applied, by what was measured so far."""

        def seconds(info: ParcelInfo) -> float:
            link_s = self._fetcher.missing_bytes(info) / self._fetcher.rate.bytes_per_s
            return link_s + manifest.size_bytes / self._speeds.get(info.codec, FIRST_SPEED)

        return seconds

    def _complete(self, target: _Target) -> None:
        started_s = self._clock()
        self._verify_ahead(target)
        parcels = [(info, self._fetcher.payload(info)) for info in target.way]
        self._drop_target()
        base = None if target.digests is not None or self._held is None else self._held.state
        hashed = target.digests.found if target.digests is not None else {}
        try:
            state = assemble(target.manifest, parcels, base, self._breathe, hashed)
        except WireError as error:
            self._refuse(str(error))
            self._give_up({info.id for info in target.way})
            return
        decoded_s = self._clock()
        try:
            self._load(target.manifest, restore(state.tensors, state.form), target.heard_s)
        except WireError as error:
            self._refuse(f"version {target.manifest.version}: {error}")
            self._not_ours = target.manifest.run, target.manifest.version
            return
        self._held = Held(target.manifest, target.signed, state)
        loaded_s = self._clock()
        self.stages = {
            "fetch": started_s - target.heard_s,
            "decode": decoded_s - started_s,
            "load": loaded_s - decoded_s,
        }
        for codec in {info.codec for info in target.way}:
            self._measure(codec, target.manifest.size_bytes / max(1e-6, loaded_s - started_s))
        self._choose()

    def _measure(self, codec: str, speed: float) -> None:
        before = self._speeds.get(codec, speed)
        self._speeds[codec] = SPEED_SMOOTHING * before + (1 - SPEED_SMOOTHING) * speed

    def _give_up(self, parcels: set[bytes]) -> None:
        """Nothing good comes of these, for as long as they are offered in this session."""
        self._useless |= parcels
        self._look_elsewhere(parcels)

    def _look_elsewhere(self, parcels: set[bytes]) -> None:
        """Takes another way than by these, where there is one, and otherwise waits for another offer."""
        if self._target is not None and parcels & {info.id for info in self._target.way}:
            offered = () if self._offered is None else self._offered.parcels
            self._fetcher.want((), {info.id for info in offered} - parcels)  # what came of the others may be of use
            self._target = None
        if self._target is None:
            self._choose()

    def _drop_target(self) -> None:
        if self._target is not None:
            self._fetcher.drop(self._target.way)
        self._target = None

    def _refuse(self, why: str) -> None:
        self.refused += 1
        _log.warning("weights.refused: %s", why)


def _plausible(info: ParcelInfo, manifest: Manifest) -> bool:
    """No parcel is much larger than all that it leads to: who says otherwise wants our memory."""
    if info.codec == TABLE:
        return info.size_bytes == manifest.table_bytes
    return info.size_bytes <= 2 * manifest.size_bytes + ANY_SLACK
