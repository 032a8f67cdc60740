"""A robot's end: from offers to a policy with new weights, whatever the link does meanwhile.

It takes the newest version that it can complete, in the most exact form that arrives soon enough. A version under way
is given up for a newer one only where that one arrives sooner; so a link that is slower than the learner still brings
a version each time. Versions only grow, unless a person orders an older one, or another run has begun.

Nothing here knows a network: requests go out through a callable, messages come in as records.

Weights on a robot's computer: a thread that receives them, and the last ones on disk for the next start.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from msgspec.structs import replace as with_fields

from user_sys.codec import Array
from user_sys.errors import TunnelError, WireError
from user_sys.messages import (
    FOREIGN_RUN,
    NO_EPOCH,
    NO_VERSION,
    TENSOR_TABLE,
    PatchInfo,
    PinnedVersion,
    Precision,
    PublisherEpoch,
    SignedRecord,
    WeightsApplied,
    WeightsBlocks,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.tunnel.protocol import Envelope
from user_sys.weights.distribution import WeightsChannel
from user_sys.weights.double_buffer import DoubleBufferedPolicy
from user_sys.weights.fetcher import PatchFetcher, RequestBlocks
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.patches import (
    IncrementalDigests,
    UpdatePath,
    VersionIndex,
    apply_patches,
    cheapest_path,
    find_table,
    full_patch,
    table_patch,
)
from user_sys.weights.precision import dequantize
from user_sys.weights.signing import PUBLIC_SUFFIX, SIGNING_KEY_NAME, TrustedLearnerKey
from user_sys.weights.state import TensorSet, YieldHook, no_yield, with_tensor_table
from user_sys.weights.version_store import VersionStore, newest_version

MAX_EXACT_WAIT_S = 5.0
"""A form that takes longer than this to arrive makes room for a less exact one, where the policy allows it."""
APPLY_RATE_SMOOTHING = 0.7
INITIAL_APPLY_BYTES_PER_S = 1e9  # bytes/s of applying, until it was measured
PATCH_SIZE_SLACK_BYTES = 1 << 20

LoadWeights = Callable[[WeightsManifest, Mapping[str, Array], float], None]
"""Takes arrays into the second copy of the policy, given when the version was first heard of. Raises WireError."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedVersion:
    """A version that is complete here, and the learner's signature of it."""

    manifest: WeightsManifest
    signed: SignedRecord
    state: TensorSet


@dataclass(frozen=True)
class _PendingUpdate:
    """The version under way: its manifest, what is to be fetched, and when it was first heard of.

    The first of `way` is the table of the manifest's tensors, as long as these are not there. `digests` are of the
    first parcel, where that is a full one; they are taken while it comes.
    """

    manifest: WeightsManifest
    signed: SignedRecord
    way: tuple[PatchInfo, ...]
    heard_s: float
    digests: IncrementalDigests | None


@dataclass(frozen=True)
class _CurrentOffer:
    manifests: Mapping[Precision, tuple[WeightsManifest, SignedRecord]]
    parcels: tuple[PatchInfo, ...]
    version: int
    run: bytes
    heard_s: float


class UpdatePlanner:
    """One thread calls it.

    Args:
        trust: in the learner's key.
        load: takes a complete version over.
        ask: requests grains.
        forms: that the policy accepts, the most exact first.
        breathe: called during bulk work, see `state.Breathe`.
        limit: bytes/s that the governor leaves to the link.

    Attributes:
        rejected: versions and offers that were forged, damaged, or not the policy's; each was logged.
        abandoned: versions under way that were given up for a newer one.
        run: whose versions the gateway offers; empty before the first offer.
        stage_seconds: seconds that the newest version took here, from the first word of it on: ``fetch``, ``decode``
            (with what was not yet verified) and ``load``.
    """

    def __init__(
        self,
        trusted_key: TrustedLearnerKey,
        load: LoadWeights,
        request_blocks: RequestBlocks,
        *,
        precisions: Sequence[Precision] = ("exact",),
        yield_cpu: YieldHook = no_yield,
        limit: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rejected = self.abandoned = 0
        self.run = b""
        self.stage_seconds: Mapping[str, float] = {}
        self._trust, self._load, self._forms, self._breathe = trusted_key, load, tuple(precisions), yield_cpu
        self._clock = clock
        self._fetcher = PatchFetcher(request_blocks, clock, limit)
        self._held: LoadedVersion | None = None
        self._offered: _CurrentOffer | None = None
        self._target: _PendingUpdate | None = None
        self._orders: dict[bytes, PinnedVersion] = {}  # the newest of each run
        self._not_ours = b"", NO_VERSION  # run and number of a version that is sound and that the policy does not take
        self._life = NO_EPOCH  # the latest that was heard of, or kept
        self._useless: set[bytes] = set()  # parcels of which nothing good came, among those offered
        self._gone: set[bytes] = set()  # parcels that were not there any more when they were last offered
        self._speeds: dict[str, float] = {}

    @property
    def loaded_version(self) -> int:
        """The newest that was loaded; -1 before the first."""
        return self._held.manifest.version if self._held else NO_VERSION

    @property
    def loaded(self) -> LoadedVersion | None:
        """The version that was loaded last."""
        return self._held

    @property
    def is_updating(self) -> bool:
        """A version is under way."""
        return self._target is not None

    @property
    def prefetch_budget_bytes(self) -> int:
        """So much of the next version may come unasked: what is little for the link, and nothing before it is due."""
        return 0 if self.is_updating else self._fetcher.prefetch_budget_bytes

    @property
    def has_offer(self) -> bool:
        """Whether a version of `run` was offered, and may be taken."""
        return self._offered is not None and self._offered.run == self.run

    @property
    def newest_version(self) -> int:
        """The version that is to act, as far as is known here."""
        return self._offered.version if self._offered else self.loaded_version

    @property
    def damaged_blocks(self) -> int:
        """Grains that came damaged."""
        return self._fetcher.damaged_blocks

    @property
    def link_bytes_per_s(self) -> float:
        return self._fetcher.rate.bytes_per_s

    def load_saved(self, kept: LoadedVersion) -> None:
        """Loads what was kept from an earlier life. Raises WireError: it is not signed, or not this policy's."""
        self._trust.verify(kept.signed, WeightsManifest)
        if kept.manifest.form not in self._forms:
            raise WireError(f"it was kept as {kept.manifest.form}, and this robot takes {', '.join(self._forms)}")
        self._load(kept.manifest, dequantize(kept.state.tensors, kept.state.form), self._clock())
        self._held = kept
        self._life = PublisherEpoch(kept.manifest.run, kept.manifest.life)

    def on_offer(self, offer: WeightsOffer) -> None:
        """A version is there to be fetched. One with a forged signature is refused, and nothing changes."""
        if offer.greeting:
            self._fetcher.reset_requests()
            self._useless.clear()
        try:
            self._trust.trust_on_first_use(offer.signer)
            self._obey(offer.order)
            manifests = [(self._trust.verify(signed, WeightsManifest), signed) for signed in offer.manifests]
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
        parcels = tuple(p for p in offer.parcels if p.form in allowed and _is_plausible_size(p, allowed[p.form][0]))
        self._useless &= {info.id for info in parcels}
        self._gone.clear()
        self._offered = _CurrentOffer(allowed, parcels, version, run, heard_s)
        self._choose()
        for request in offer.ahead:
            self._fetcher.expect_blocks(request.parcel, request.first, request.count)

    def on_reply(self, message: WeightsBlocks | WeightsGone, payload: memoryview | None = None) -> None:
        """Grains, or word that there are none."""
        if isinstance(message, WeightsBlocks) and payload is not None:
            self._fetcher.receive_blocks(message.parcel, message.first, payload)
            if self._fetcher.is_unrecoverable(message.parcel):
                self._refuse("a parcel comes damaged again and again")
                self._fetcher.remove_patch(message.parcel)
                self._give_up({message.parcel})
            elif self._target is not None:
                self._verify_ahead(self._target)  # what has just been copied is still in the processor's cache
        elif isinstance(message, WeightsGone):
            self._fetcher.remove_patch(message.parcel)
            offered = () if self._offered is None else self._offered.parcels
            self._gone |= {info.id for info in offered if info.id == message.parcel}
            self._look_elsewhere({message.parcel})

    def step(self) -> float:
        """Asks for more, or completes a version; returns after how many seconds to call again at the latest."""
        self._take_table()
        if self._target is not None and self._target.manifest.has_tensors and self._fetcher.is_complete:
            self._complete(self._target)
        return self._fetcher.send_requests()

    def _take_table(self) -> None:
        """Once the table of its tensors has come, what follows of the version under way can be verified."""
        target = self._target
        if target is None or target.manifest.has_tensors or self._fetcher.missing_bytes(target.way[0]):
            return
        table, *way = target.way
        blamed = table.id
        try:
            manifest = with_tensor_table(target.manifest, self._fetcher.payload(table))
            self._fetcher.drop([table])
            blamed = way[0].id if way else table.id
            digests = self._digests(manifest, way)
        except WireError as error:
            self._refuse(str(error))
            self._give_up({blamed})
            return
        self._target = replace(target, manifest=manifest, way=tuple(way), digests=digests)

    def _verify_ahead(self, target: _PendingUpdate) -> None:
        if target.digests is not None:
            target.digests.update(self._fetcher.contiguous_bytes(target.way[0]), self._breathe)

    def _obey(self, signed: SignedRecord | None) -> None:
        if signed is None:
            return
        order = self._trust.verify(signed, PinnedVersion)
        former = self._orders.get(order.run)
        if former is None or order.serial > former.serial:
            self._orders[order.run] = order
            if self._target is not None and not self._wanted(self._target.manifest):
                self._drop_target()

    def _is_of_this_run(self, manifest: WeightsManifest) -> bool:
        """Takes note of the run that is offered, unless it ended before another that was heard of began."""
        if manifest.run != self._life.run and manifest.life < self._life.number:
            self._refuse(f"version {manifest.version} is of a run that began before the one whose weights were here")
            return False
        self._life = PublisherEpoch(manifest.run, max(manifest.life, self._life.number))
        self.run = manifest.run
        return True

    def _wanted(self, manifest: WeightsManifest) -> bool:
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

    def _holds(self, offered: _CurrentOffer) -> bool:
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
            in_vain_s = self._fetcher.wasted_bytes(target.way, way.patches) / self._fetcher.rate.bytes_per_s
            if sum(self._cost(target.manifest)(info) for info in target.way) <= in_vain_s + way.cost:
                return
            self.abandoned += 1
        ids = {info.id for info in way.patches}
        try:
            self._fetcher.set_targets(way.patches, {info.id for info in offered.parcels})
        except WireError as error:
            self._refuse(str(error))
            self._useless |= ids
            return
        self._target = None
        try:
            digests = self._digests(manifest, way.patches)
        except WireError as error:
            self._refuse(str(error))
            self._fetcher.drop(way.patches)
            self._give_up(ids)
            return
        self._target = _PendingUpdate(
            manifest, offered.manifests[manifest.form][1], way.patches, offered.heard_s, digests
        )

    def _digests(self, manifest: WeightsManifest, way: Sequence[PatchInfo]) -> IncrementalDigests | None:
        """Of the first parcel of `way`, where that is a full one. Raises WireError: it has not the manifest's size."""
        first = way[0] if way else None
        return IncrementalDigests(manifest, self._fetcher.payload(first)) if first and first.codec == "full" else None

    def _best(self, offered: _CurrentOffer) -> tuple[WeightsManifest, UpdatePath] | None:
        """The most exact form that comes within `MAX_EXACT_WAIT_S`, or else the one that comes first."""
        found: list[tuple[WeightsManifest, UpdatePath]] = []
        infos = [info for info in offered.parcels if info.id not in self._useless | self._gone]
        for form in self._forms:
            if form in offered.manifests:
                manifest = self._known(offered.manifests[form][0])
                way = self._way(infos, manifest)
                if way is not None:
                    found.append((manifest, way))
        soon = [(manifest, way) for manifest, way in found if way.cost <= MAX_EXACT_WAIT_S]
        return soon[0] if soon else min(found, key=lambda option: option[1].cost, default=None)

    def _known(self, manifest: WeightsManifest) -> WeightsManifest:
        """`manifest`, with its tensors where these are here."""
        for other in () if manifest.has_tensors else (self._held, self._target):
            if other is not None and other.manifest.digest == manifest.digest and other.manifest.has_tensors:
                return with_fields(manifest, tensors=other.manifest.tensors)
        return manifest

    def _way(self, infos: Sequence[PatchInfo], manifest: WeightsManifest) -> UpdatePath | None:
        """The cheapest to a version, with the table of its tensors first, where these are not here."""
        cost = self._cost(manifest)
        way = cheapest_path(infos, manifest.form, manifest.version, self._bases(infos, manifest), cost)
        if way is None or manifest.has_tensors:
            return way
        table = find_table(infos, manifest)
        return None if table is None else UpdatePath((table, *way.patches), cost(table) + way.cost)

    def _bases(self, infos: Sequence[PatchInfo], manifest: WeightsManifest) -> dict[int, bytes]:
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

    def _cost(self, manifest: WeightsManifest) -> Callable[[PatchInfo], float]:
        """Seconds until a parcel is here and applied, by what was measured so far."""

        def seconds(info: PatchInfo) -> float:
            link_s = self._fetcher.missing_bytes(info) / self._fetcher.rate.bytes_per_s
            return link_s + manifest.size_bytes / self._speeds.get(info.codec, INITIAL_APPLY_BYTES_PER_S)

        return seconds

    def _complete(self, target: _PendingUpdate) -> None:
        started_s = self._clock()
        self._verify_ahead(target)
        parcels = [(info, self._fetcher.payload(info)) for info in target.way]
        self._drop_target()
        base = None if target.digests is not None or self._held is None else self._held.state
        hashed = target.digests.digests if target.digests is not None else {}
        try:
            state = apply_patches(target.manifest, parcels, base, self._breathe, hashed)
        except WireError as error:
            self._refuse(str(error))
            self._give_up({info.id for info in target.way})
            return
        decoded_s = self._clock()
        try:
            self._load(target.manifest, dequantize(state.tensors, state.form), target.heard_s)
        except WireError as error:
            self._refuse(f"version {target.manifest.version}: {error}")
            self._not_ours = target.manifest.run, target.manifest.version
            return
        self._held = LoadedVersion(target.manifest, target.signed, state)
        loaded_s = self._clock()
        self.stage_seconds = {
            "fetch": started_s - target.heard_s,
            "decode": decoded_s - started_s,
            "load": loaded_s - decoded_s,
        }
        for codec in {info.codec for info in target.way}:
            self._measure(codec, target.manifest.size_bytes / max(1e-6, loaded_s - started_s))
        self._choose()

    def _measure(self, codec: str, speed: float) -> None:
        before = self._speeds.get(codec, speed)
        self._speeds[codec] = APPLY_RATE_SMOOTHING * before + (1 - APPLY_RATE_SMOOTHING) * speed

    def _give_up(self, parcels: set[bytes]) -> None:
        """Nothing good comes of these, for as long as they are offered in this session."""
        self._useless |= parcels
        self._look_elsewhere(parcels)

    def _look_elsewhere(self, parcels: set[bytes]) -> None:
        """Takes another way than by these, where there is one, and otherwise waits for another offer."""
        if self._target is not None and parcels & {info.id for info in self._target.way}:
            offered = () if self._offered is None else self._offered.parcels
            self._fetcher.set_targets(
                (), {info.id for info in offered} - parcels
            )  # what came of the others may be of use
            self._target = None
        if self._target is None:
            self._choose()

    def _drop_target(self) -> None:
        if self._target is not None:
            self._fetcher.drop(self._target.way)
        self._target = None

    def _refuse(self, why: str) -> None:
        self.rejected += 1
        _log.warning("weights.refused: %s", why)


def _is_plausible_size(info: PatchInfo, manifest: WeightsManifest) -> bool:
    """No parcel is much larger than all that it leads to: who says otherwise wants our memory."""
    if info.codec == TENSOR_TABLE:
        return info.size_bytes == manifest.table_bytes
    return info.size_bytes <= 2 * manifest.size_bytes + PATCH_SIZE_SLACK_BYTES


SAVE_INTERVAL_S = 10.0
MAX_SAVE_TIME_SHARE = 0.05  # of the time, at most, goes into keeping versions
CLOSE_TIMEOUT_S = 10.0
MAX_MESSAGES_PER_STEP = 8


@dataclass(frozen=True)
class ReceiverConfig:
    """How a robot takes new weights.

    Attributes:
        swap_at: they take over between two action chunks, or between two episodes.
        max_staleness_versions: the robot holds while its weights are more than so many versions behind; 0 never holds.
        exact_only: takes no rounded form, even where the policy would act with one and the link is slow.
        governor: what receiving may cost the policy's inference.
    """

    swap_at: Literal["chunk", "episode"] = "chunk"
    max_staleness_versions: int = 0
    exact_only: bool = False
    governor: GovernorConfig = field(default_factory=lambda: GovernorConfig(budget=0.05, quantile=0.99))


class WeightsReceiver:
    """Receives from `start` to `close`, and loads into `swapper`.

    Args:
        keys: folder with the learner's public signing key, ``learner.verify``. Where it is missing, the key that the
            gateway names first is trusted, and kept there.
        folder: keeps a version every `SAVE_INTERVAL_S` or so, from which the next life starts while the link is down;
            None keeps nothing.
        greeted: called, by the thread that receives, when a session has begun, or it is known anew which run this is:
            its gateway does not know yet with which version the robot acts.

    Attributes:
        planner: whose figures any thread may read.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        swapper: DoubleBufferedPolicy,
        config: ReceiverConfig,
        keys: Path,
        folder: Path | None,
        governor: Governor,
        on_session_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises RunError: the learner's key is damaged, or not known and could not be kept."""
        self._link, self._swapper, self._governor, self._greeted = channel, swapper, governor, on_session_start
        self._config = config
        self._shelf = None if folder is None else VersionStore(folder)
        self._next_keep_s = time.monotonic() + SAVE_INTERVAL_S
        self._kept: WeightsManifest | None = None
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        trust = TrustedLearnerKey(keys / f"{SIGNING_KEY_NAME}{PUBLIC_SUFFIX}")
        trust.require_persistent()
        self.planner = UpdatePlanner(
            trust,
            lambda manifest, arrays, heard_s: swapper.load(manifest.version, arrays, heard_s, manifest.run),
            lambda parcel, first, count: channel.send_weights(WeightsRequest(parcel=parcel, first=first, count=count)),
            precisions=("exact",) if config.exact_only else swapper.policy.precisions,
            yield_cpu=governor.yield_cpu,
            limit=governor.link_limit_bytes_per_s,
        )

    def start(self) -> None:
        """Loads the version that an earlier life kept, where there is one, and begins to receive."""
        self._take_up()
        self._thread.start()

    def close(self) -> None:
        """Keeps the newest version and ends. Raises TunnelError when that takes longer than `CLOSE_TIMEOUT_S`."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the weights thread did not end within {CLOSE_TIMEOUT_S:.0f} s")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def raise_failure(self) -> None:
        """Raises what ended the thread before its time, if anything did."""
        if self._failure is not None:
            raise self._failure

    def is_too_stale(self) -> bool:
        """Whether the acting policy is too far behind the newest that is known of; never before the first.

        Another run's weights are behind as soon as it is known that this run has any.
        """
        acting = self._swapper.version
        if self._config.max_staleness_versions == 0 or acting == NO_VERSION:
            return False
        if acting == FOREIGN_RUN:
            return self.planner.has_offer
        return self._config.max_staleness_versions < self.planner.newest_version - acting

    def applied_report(self, robot: str) -> WeightsApplied:
        """What tells the gateway with which version `robot` acts, and how much of the next may come unasked."""
        told = WeightsApplied(robot=robot, version=self._swapper.version, seconds=self._swapper.swap_delay_s)
        held = self.planner.loaded
        if held is None or held.manifest.version != told.version:
            return told
        manifest = held.manifest
        return with_fields(
            told, form=manifest.form, digest=manifest.digest, ahead_bytes=self.planner.prefetch_budget_bytes
        )

    def scalars(self) -> dict[str, float]:
        """For the metrics: the link, what was refused, the stages of the newest version, the governor's decisions."""
        receiver = self.planner
        return {
            "weights/version": float(receiver.loaded_version),
            "weights/link_mb_per_s": receiver.link_bytes_per_s / 1e6,
            "weights/damaged": float(receiver.damaged_blocks),
            "weights/refused": float(receiver.rejected),
            "weights/abandoned": float(receiver.abandoned),
            **{f"weights/{stage}_ms": 1e3 * seconds for stage, seconds in receiver.stage_seconds.items()},
            **self._governor.scalars(),
        }

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                envelope = self._link.receive_weights(min(wait_s, 0.5))
                with self._governor.push() if self.planner.is_updating else nullcontext():
                    self._take_all(envelope)
                    wait_s = self.planner.step()
                if time.monotonic() >= self._next_keep_s:
                    self._keep()
            self._keep()
        except Exception as error:  # of any kind: whoever runs the session must hear of it, and asks
            _log.exception("weights.failed")
            self._failure = error

    def _take_all(self, envelope: Envelope | None) -> None:
        """Takes in what waits, and no more than `MAX_MESSAGES_PER_STEP` messages, before the next requests are made."""
        for _ in range(MAX_MESSAGES_PER_STEP):
            if envelope is None:
                return
            self._take(envelope)
            envelope = self._link.receive_weights(0.0)
        if envelope is not None:
            self._take(envelope)

    def _take(self, envelope: Envelope) -> None:
        match envelope.message:
            case WeightsOffer() as offer:
                self.planner.on_offer(offer)
                if self._learn_of_run() or offer.greeting:
                    self._greeted()
            case WeightsBlocks() | WeightsGone() as message:
                payload = None if envelope.payload is None else memoryview(envelope.payload)
                self.planner.on_reply(message, payload)

    def _learn_of_run(self) -> bool:
        """Has the swapper count what is of the run that was heard of; True where that is another one than before."""
        before, self._swapper.run = self._swapper.run, self.planner.run
        return before != self.planner.run

    def _take_up(self) -> None:
        if self._shelf is None:
            return
        try:
            catalogue = self._shelf.load()
            if (kept := newest_version(catalogue)) is None:
                return
            manifest, state = kept
            self.planner.load_saved(
                LoadedVersion(manifest, catalogue.manifests[manifest.form, manifest.version][1], state)
            )
            self._kept = manifest
        except (OSError, WireError) as error:  # the gateway has newer ones, and these are replaced
            _log.warning("weights.not_taken_up folder=%s: %s", self._shelf.folder, error)

    def _keep(self) -> None:
        held, started_s = self.planner.loaded, time.monotonic()
        if self._shelf is None or held is None or held.manifest == self._kept:
            return
        with self._governor.push():  # to write it costs the policy's inference time as well
            self._write(self._shelf, held)
        taken_s = time.monotonic() - started_s
        self._next_keep_s = time.monotonic() + max(SAVE_INTERVAL_S, taken_s / MAX_SAVE_TIME_SHARE)

    def _write(self, shelf: VersionStore, held: LoadedVersion) -> None:
        version = held.manifest.version
        parcels = [full_patch(held.state, version, self._governor.yield_cpu)]
        if held.manifest.table_bytes:
            parcels.append(table_patch(held.state, version))
        key = held.manifest.form, version
        try:
            kept = {parcel.info.id: parcel for parcel in parcels}
            shelf.save(VersionIndex({key: (held.manifest, held.signed)}, kept))
            self._kept = held.manifest
        except OSError as error:
            _log.warning("weights.not_kept version=%d: %s", version, error)
