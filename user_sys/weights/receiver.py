"""Receives weights on a robot: from an offer to a policy with new weights, and the last version on disk for the next
start.

`UpdatePlanner` fetches the newest version that it can complete, in the most exact precision that arrives soon enough.
It abandons an update for a newer one only if the newer one arrives sooner, so a link that is slower than the learner
still completes versions. Version numbers only grow, except after a pin or in another run. It is independent of the
transport. `WeightsReceiver` runs it in a thread and stores versions.
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
"""If a precision takes longer than this to arrive, the planner takes a less exact one that the policy accepts."""
APPLY_RATE_SMOOTHING = 0.7
INITIAL_APPLY_BYTES_PER_S = 1e9  # until measured
PATCH_SIZE_SLACK_BYTES = 1 << 20

LoadWeights = Callable[[WeightsManifest, Mapping[str, Array], float], None]
"""Loads arrays into the second copy of the policy; the time is that of the announcement. Raises WireError."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedVersion:
    """A complete version with the learner's signature."""

    manifest: WeightsManifest
    signed: SignedRecord
    state: TensorSet


@dataclass(frozen=True)
class _PendingUpdate:
    """An update in progress: its manifest, the patches to fetch, and the time of the announcement.

    `path` begins with the table of tensors until the manifest has its tensors. `digests` are those of the first patch,
    if
    it is a full one; they are computed while it arrives.
    """

    manifest: WeightsManifest
    signed: SignedRecord
    path: tuple[PatchInfo, ...]
    announced_s: float
    digests: IncrementalDigests | None


@dataclass(frozen=True)
class _CurrentOffer:
    manifests: Mapping[Precision, tuple[WeightsManifest, SignedRecord]]
    patches: tuple[PatchInfo, ...]
    version: int
    run: bytes
    announced_s: float


class _VersionSelector:
    """Decides which versions may be loaded, by run, epoch and pins.

    Attributes:
        run: the run of the newest offer; empty before the first.
        epoch: the newest epoch of an offer or of saved weights.
        incompatible: run and number of a version that the policy has refused.
    """

    def __init__(self) -> None:
        self.run = b""
        self.epoch = NO_EPOCH
        self.incompatible = b"", NO_VERSION
        self._pins: dict[bytes, PinnedVersion] = {}  # the newest of each run

    def set_pin(self, pin: PinnedVersion) -> bool:
        """Stores a pin. Returns False if it is not newer than the pin of its run."""
        previous = self._pins.get(pin.run)
        if previous is not None and pin.serial <= previous.serial:
            return False
        self._pins[pin.run] = pin
        return True

    def accept_run(self, manifest: WeightsManifest) -> bool:
        """Adopts the run of an offer. Returns False if it ended before another known run began."""
        if manifest.run != self.epoch.run and manifest.life < self.epoch.number:
            return False
        self.epoch = PublisherEpoch(manifest.run, max(manifest.life, self.epoch.number))
        self.run = manifest.run
        return True

    def is_wanted(self, manifest: WeightsManifest, loaded: WeightsManifest | None) -> bool:
        """Whether a version is the pinned one, or without a pin at least as new as the loaded one.

        A later epoch may have smaller numbers: its learner has lost the newest checkpoints.
        """
        if manifest.run != self.run:
            return False
        pin = self._pins.get(manifest.run)
        if pin is not None and pin.version != NO_VERSION:
            return manifest.version == pin.version
        if loaded is None or loaded.run != manifest.run:
            return True
        return (manifest.life, manifest.version) >= (loaded.life, loaded.version)


class UpdatePlanner:
    """Plans which version to fetch, and along which patches. One thread calls it.

    Args:
        trusted_key: verifies offers.
        load: loads a complete version.
        request_blocks: requests blocks from the gateway.
        precisions: accepted by the policy, the most exact first.
        yield_cpu: called during bulk work, see `state.YieldHook`.
        limit: bytes/s that the governor allows for the link.

    Attributes:
        rejected: number of versions and offers that were forged, damaged or unfit for the policy; each is logged.
        abandoned: number of updates that were abandoned for a newer version.
        stage_seconds: duration of the stages of the newest version: ``fetch`` from its announcement on, ``decode``
            (including the remaining verification) and ``load``.
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
        self.stage_seconds: Mapping[str, float] = {}
        self._trusted_key, self._load, self._precisions, self._yield_cpu = (
            trusted_key,
            load,
            tuple(precisions),
            yield_cpu,
        )
        self._clock = clock
        self._fetcher = PatchFetcher(request_blocks, clock, limit)
        self._loaded: LoadedVersion | None = None
        self._offer: _CurrentOffer | None = None
        self._pending: _PendingUpdate | None = None
        self._selector = _VersionSelector()
        self._bad_patches: set[bytes] = set()  # offered patches that are damaged or useless
        self._missing_patches: set[bytes] = set()  # offered patches that the gateway no longer has
        self._apply_rates: dict[str, float] = {}

    @property
    def run(self) -> bytes:
        """The run whose versions the gateway offers; empty before the first offer."""
        return self._selector.run

    @property
    def loaded_version(self) -> int:
        """The newest loaded version; -1 before the first."""
        return self._loaded.manifest.version if self._loaded else NO_VERSION

    @property
    def loaded(self) -> LoadedVersion | None:
        """The version that was loaded last."""
        return self._loaded

    @property
    def is_updating(self) -> bool:
        """An update is in progress."""
        return self._pending is not None

    @property
    def prefetch_budget_bytes(self) -> int:
        """How much of the next version may arrive unrequested; 0 during an update."""
        return 0 if self.is_updating else self._fetcher.prefetch_budget_bytes

    @property
    def has_offer(self) -> bool:
        """Whether a version of `run` was offered."""
        return self._offer is not None and self._offer.run == self.run

    @property
    def newest_version(self) -> int:
        """The newest version that is known."""
        return self._offer.version if self._offer else self.loaded_version

    @property
    def damaged_blocks(self) -> int:
        """Number of blocks that arrived damaged."""
        return self._fetcher.damaged_blocks

    @property
    def link_bytes_per_s(self) -> float:
        return self._fetcher.rate.bytes_per_s

    def load_saved(self, saved: LoadedVersion) -> None:
        """Loads a stored version. Raises WireError if it is not signed or does not fit the policy."""
        self._trusted_key.verify(saved.signed, WeightsManifest)
        if saved.manifest.form not in self._precisions:
            raise WireError(
                f"the stored version is {saved.manifest.form}, but this robot takes {', '.join(self._precisions)}"
            )
        self._load(saved.manifest, dequantize(saved.state.tensors, saved.state.form), self._clock())
        self._loaded = saved
        self._selector.epoch = PublisherEpoch(saved.manifest.run, saved.manifest.life)

    def on_offer(self, offer: WeightsOffer) -> None:
        """Handles an offer of a version. One with an invalid signature is rejected and changes nothing."""
        if offer.greeting:
            self._fetcher.reset_requests()
            self._bad_patches.clear()
        try:
            self._trusted_key.trust_on_first_use(offer.signer)
            self._apply_pin(offer.order)
            manifests = [(self._trusted_key.verify(signed, WeightsManifest), signed) for signed in offer.manifests]
        except WireError as error:
            self._reject(str(error))
            return
        allowed = {pair[0].form: pair for pair in manifests if pair[0].form in self._precisions}
        versions = {(manifest.run, manifest.version) for manifest, _ in manifests}
        if len(versions) != 1 or not self._accept_run(manifests[0][0]) or not self._is_wanted(manifests[0][0]):
            return
        run, version = versions.pop()
        if not allowed:
            self._reject_precisions([manifest for manifest, _ in manifests])
            return
        announced_s = self._clock()
        if self._offer is not None and (self._offer.run, self._offer.version) == (run, version):
            announced_s = self._offer.announced_s
        patches = tuple(p for p in offer.parcels if p.form in allowed and _is_plausible_size(p, allowed[p.form][0]))
        self._bad_patches &= {info.id for info in patches}
        self._missing_patches.clear()
        self._offer = _CurrentOffer(allowed, patches, version, run, announced_s)
        self._choose_update()
        for request in offer.ahead:
            self._fetcher.expect_blocks(request.parcel, request.first, request.count)

    def _reject_precisions(self, manifests: Sequence[WeightsManifest]) -> None:
        """Rejects a version without a usable precision.

        A version of the same epoch as the loaded one is only ignored: its publisher has a usable precision too, which
        the gateway has not received yet.
        """
        first, loaded = manifests[0], None if self._loaded is None else self._loaded.manifest
        if loaded is not None and (loaded.run, loaded.life) == (first.run, first.life):
            return
        found = ", ".join(manifest.form for manifest in manifests)
        self._reject(f"version {first.version} comes as {found}, but this robot takes {', '.join(self._precisions)}")

    def on_reply(self, message: WeightsBlocks | WeightsGone, payload: memoryview | None = None) -> None:
        """Handles blocks, or the reply that a patch is gone."""
        if isinstance(message, WeightsBlocks) and payload is not None:
            self._fetcher.receive_blocks(message.parcel, message.first, payload)
            if self._fetcher.is_unrecoverable(message.parcel):
                self._reject("a patch arrives damaged again and again")
                self._fetcher.remove_patch(message.parcel)
                self._discard_patches({message.parcel})
            elif self._pending is not None:
                self._hash_received(self._pending)  # the copied bytes are still in the CPU cache
        elif isinstance(message, WeightsGone):
            self._fetcher.remove_patch(message.parcel)
            offer = () if self._offer is None else self._offer.patches
            self._missing_patches |= {info.id for info in offer if info.id == message.parcel}
            self._replan({message.parcel})

    def step(self) -> float:
        """Sends requests, or completes an update. Returns the seconds after which to call it again at the latest."""
        self._apply_tensor_table()
        if self._pending is not None and self._pending.manifest.has_tensors and self._fetcher.is_complete:
            self._complete_update(self._pending)
        return self._fetcher.send_requests()

    def _apply_tensor_table(self) -> None:
        """Applies the table of tensors once it has arrived; the other patches can then be verified."""
        pending = self._pending
        if pending is None or pending.manifest.has_tensors or self._fetcher.missing_bytes(pending.path[0]):
            return
        table, *path = pending.path
        blamed = table.id
        try:
            manifest = with_tensor_table(pending.manifest, self._fetcher.payload(table))
            self._fetcher.drop([table])
            blamed = path[0].id if path else table.id
            digests = self._start_digests(manifest, path)
        except WireError as error:
            self._reject(str(error))
            self._discard_patches({blamed})
            return
        self._pending = replace(pending, manifest=manifest, path=tuple(path), digests=digests)

    def _hash_received(self, pending: _PendingUpdate) -> None:
        if pending.digests is not None:
            pending.digests.update(self._fetcher.contiguous_bytes(pending.path[0]), self._yield_cpu)

    def _apply_pin(self, signed: SignedRecord | None) -> None:
        if signed is None or not self._selector.set_pin(self._trusted_key.verify(signed, PinnedVersion)):
            return
        if self._pending is not None and not self._is_wanted(self._pending.manifest):
            self._cancel_update()

    def _accept_run(self, manifest: WeightsManifest) -> bool:
        if self._selector.accept_run(manifest):
            return True
        self._reject(f"version {manifest.version} is of a run that is older than the run of the weights here")
        return False

    def _is_wanted(self, manifest: WeightsManifest) -> bool:
        return self._selector.is_wanted(manifest, None if self._loaded is None else self._loaded.manifest)

    def _is_loaded(self, offer: _CurrentOffer) -> bool:
        if self._loaded is None:
            return False
        loaded = self._loaded.manifest
        again, _ = offer.manifests.get(loaded.form, (loaded, None))
        return (offer.run, offer.version, again.digest) == (loaded.run, loaded.version, loaded.digest)

    def _choose_update(self) -> None:
        """Starts the update that arrives first, unless the one in progress arrives before it."""
        offer = self._offer
        if offer is None or (offer.run, offer.version) == self._selector.incompatible:
            return
        if self._pending is None and self._is_loaded(offer):
            return
        found = self._best_option(offer)
        if found is None:
            return
        manifest, path = found
        pending = self._pending
        if pending is not None and pending.manifest.digest != manifest.digest and self._is_wanted(pending.manifest):
            wasted_s = self._fetcher.wasted_bytes(pending.path, path.patches) / self._fetcher.rate.bytes_per_s
            if sum(self._cost_from_patch(pending.manifest)(info) for info in pending.path) <= wasted_s + path.cost:
                return
            self.abandoned += 1
        ids = {info.id for info in path.patches}
        try:
            self._fetcher.set_targets(path.patches, {info.id for info in offer.patches})
        except WireError as error:
            self._reject(str(error))
            self._bad_patches |= ids
            return
        self._pending = None
        try:
            digests = self._start_digests(manifest, path.patches)
        except WireError as error:
            self._reject(str(error))
            self._fetcher.drop(path.patches)
            self._discard_patches(ids)
            return
        self._pending = _PendingUpdate(
            manifest, offer.manifests[manifest.form][1], path.patches, offer.announced_s, digests
        )

    def _start_digests(self, manifest: WeightsManifest, path: Sequence[PatchInfo]) -> IncrementalDigests | None:
        """Starts the digests of a full first patch; None otherwise. Raises WireError if its size does not match the
        manifest.
        """
        first = path[0] if path else None
        return IncrementalDigests(manifest, self._fetcher.payload(first)) if first and first.codec == "full" else None

    def _best_option(self, offer: _CurrentOffer) -> tuple[WeightsManifest, UpdatePath] | None:
        """Returns the most exact precision that arrives within `MAX_EXACT_WAIT_S`, or else the one that arrives
        first.
        """
        found: list[tuple[WeightsManifest, UpdatePath]] = []
        infos = [info for info in offer.patches if info.id not in self._bad_patches | self._missing_patches]
        for form in self._precisions:
            if form in offer.manifests:
                manifest = self._with_known_tensors(offer.manifests[form][0])
                path = self._path(infos, manifest)
                if path is not None:
                    found.append((manifest, path))
        in_time = [(manifest, path) for manifest, path in found if path.cost <= MAX_EXACT_WAIT_S]
        return in_time[0] if in_time else min(found, key=lambda option: option[1].cost, default=None)

    def _with_known_tensors(self, manifest: WeightsManifest) -> WeightsManifest:
        """Returns `manifest` with its tensors, if the loaded or the pending version has the same ones."""
        for other in () if manifest.has_tensors else (self._loaded, self._pending):
            if other is not None and other.manifest.digest == manifest.digest and other.manifest.has_tensors:
                return with_fields(manifest, tensors=other.manifest.tensors)
        return manifest

    def _path(self, infos: Sequence[PatchInfo], manifest: WeightsManifest) -> UpdatePath | None:
        """Returns the cheapest path to a version, preceded by the table of tensors if the manifest lacks them."""
        cost = self._cost_from_patch(manifest)
        path = cheapest_path(infos, manifest.form, manifest.version, self._usable_bases(infos, manifest), cost)
        if path is None or manifest.has_tensors:
            return path
        table = find_table(infos, manifest)
        return None if table is None else UpdatePath((table, *path.patches), cost(table) + path.cost)

    def _usable_bases(self, infos: Sequence[PatchInfo], manifest: WeightsManifest) -> dict[int, bytes]:
        """Returns the versions that patches may change: of an earlier epoch, only the base of an offered patch."""
        if self._loaded is None:
            return {}
        loaded = self._loaded.manifest
        if (loaded.form, loaded.run) != (manifest.form, manifest.run):
            return {}
        if loaded.life != manifest.life and (loaded.version, loaded.digest) not in {
            (p.base, p.base_digest) for p in infos
        }:
            return {}
        if loaded.version == manifest.version and loaded.digest != manifest.digest:
            return {}  # two versions of one number: older checkpoints were restored
        return {loaded.version: loaded.digest}

    def _cost_from_patch(self, manifest: WeightsManifest) -> Callable[[PatchInfo], float]:
        """Returns the cost of a patch: seconds until it is fetched and applied, by the measured rates."""

        def seconds(info: PatchInfo) -> float:
            link_s = self._fetcher.missing_bytes(info) / self._fetcher.rate.bytes_per_s
            return link_s + manifest.size_bytes / self._apply_rates.get(info.codec, INITIAL_APPLY_BYTES_PER_S)

        return seconds

    def _complete_update(self, pending: _PendingUpdate) -> None:
        started_s = self._clock()
        self._hash_received(pending)
        patches = [(info, self._fetcher.payload(info)) for info in pending.path]
        self._cancel_update()
        base = None if pending.digests is not None or self._loaded is None else self._loaded.state
        known_digests = pending.digests.digests if pending.digests is not None else {}
        try:
            state = apply_patches(pending.manifest, patches, base, self._yield_cpu, known_digests)
        except WireError as error:
            self._reject(str(error))
            self._discard_patches({info.id for info in pending.path})
            return
        decoded_s = self._clock()
        try:
            self._load(pending.manifest, dequantize(state.tensors, state.form), pending.announced_s)
        except WireError as error:
            self._reject(f"version {pending.manifest.version}: {error}")
            self._selector.incompatible = pending.manifest.run, pending.manifest.version
            return
        self._loaded = LoadedVersion(pending.manifest, pending.signed, state)
        loaded_s = self._clock()
        self.stage_seconds = {
            "fetch": started_s - pending.announced_s,
            "decode": decoded_s - started_s,
            "load": loaded_s - decoded_s,
        }
        for codec in {info.codec for info in pending.path}:
            self._measure(codec, pending.manifest.size_bytes / max(1e-6, loaded_s - started_s))
        self._choose_update()

    def _measure(self, codec: str, speed: float) -> None:
        before = self._apply_rates.get(codec, speed)
        self._apply_rates[codec] = APPLY_RATE_SMOOTHING * before + (1 - APPLY_RATE_SMOOTHING) * speed

    def _discard_patches(self, patches: set[bytes]) -> None:
        """Excludes these patches from this session's paths."""
        self._bad_patches |= patches
        self._replan(patches)

    def _replan(self, patches: set[bytes]) -> None:
        """Replaces a path that uses these patches, or waits for another offer."""
        if self._pending is not None and patches & {info.id for info in self._pending.path}:
            offer = () if self._offer is None else self._offer.patches
            # Blocks of the other patches that have arrived stay: they may be useful.
            self._fetcher.set_targets((), {info.id for info in offer} - patches)
            self._pending = None
        if self._pending is None:
            self._choose_update()

    def _cancel_update(self) -> None:
        if self._pending is not None:
            self._fetcher.drop(self._pending.path)
        self._pending = None

    def _reject(self, why: str) -> None:
        self.rejected += 1
        _log.warning("weights.rejected: %s", why)


def _is_plausible_size(info: PatchInfo, manifest: WeightsManifest) -> bool:
    """Whether the size of a patch is in proportion to its version. A false description would exhaust the memory."""
    if info.codec == TENSOR_TABLE:
        return info.size_bytes == manifest.table_bytes
    return info.size_bytes <= 2 * manifest.size_bytes + PATCH_SIZE_SLACK_BYTES


SAVE_INTERVAL_S = 10.0
MAX_SAVE_TIME_SHARE = 0.05  # maximum fraction of time for storing versions
CLOSE_TIMEOUT_S = 10.0
MAX_MESSAGES_PER_STEP = 8


@dataclass(frozen=True)
class ReceiverConfig:
    """How a robot takes new weights.

    Attributes:
        swap_at: weights are swapped between two action chunks, or between two episodes.
        max_staleness_versions: the robot holds if its weights are more versions behind than this; 0 never holds.
        exact_only: never take a rounded precision, even if the policy accepts it and the link is slow.
        governor: the budget of receiving next to the policy's inference.
    """

    swap_at: Literal["chunk", "episode"] = "chunk"
    max_staleness_versions: int = 0
    exact_only: bool = False
    governor: GovernorConfig = field(default_factory=lambda: GovernorConfig(budget=0.05, quantile=0.99))


class WeightsReceiver:
    """Receives versions from `start` to `close`, and loads them into `policy`.

    Args:
        keys: folder with the learner's public key, ``learner.verify``. If it is missing, the first key that the gateway
            names is trusted and stored there.
        folder: stores a version every `SAVE_INTERVAL_S`, for a start without a link; None stores nothing.
        on_session_start: called by the receiving thread after a new session or a change of the run, because the gateway
            does not have the acting version yet.

    Attributes:
        planner: any thread may read its figures.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        policy: DoubleBufferedPolicy,
        config: ReceiverConfig,
        keys: Path,
        folder: Path | None,
        governor: Governor,
        on_session_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises RunError if the learner's key is damaged, or is unknown and could not be stored."""
        self._channel, self._policy, self._governor, self._on_session_start = (
            channel,
            policy,
            governor,
            on_session_start,
        )
        self._config = config
        self._store = None if folder is None else VersionStore(folder)
        self._next_save_s = time.monotonic() + SAVE_INTERVAL_S
        self._saved: WeightsManifest | None = None
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        trust = TrustedLearnerKey(keys / f"{SIGNING_KEY_NAME}{PUBLIC_SUFFIX}")
        trust.require_persistent()
        self.planner = UpdatePlanner(
            trust,
            lambda manifest, arrays, announced_s: policy.load(manifest.version, arrays, announced_s, manifest.run),
            lambda patch, first, count: channel.send_weights(WeightsRequest(parcel=patch, first=first, count=count)),
            precisions=("exact",) if config.exact_only else policy.policy.precisions,
            yield_cpu=governor.yield_cpu,
            limit=governor.link_limit_bytes_per_s,
        )

    def start(self) -> None:
        """Loads the stored version, if there is one, and begins to receive."""
        self._load_saved()
        self._thread.start()

    def close(self) -> None:
        """Stores the newest version and ends. Raises TunnelError if that takes longer than `CLOSE_TIMEOUT_S`."""
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
        """Raises the error that ended the thread, if there is one."""
        if self._failure is not None:
            raise self._failure

    def is_too_stale(self) -> bool:
        """Whether the acting policy is too many versions behind; never before the first version.

        Weights of another run are too stale once this run has a version.
        """
        acting = self._policy.version
        if self._config.max_staleness_versions == 0 or acting == NO_VERSION:
            return False
        if acting == FOREIGN_RUN:
            return self.planner.has_offer
        return self._config.max_staleness_versions < self.planner.newest_version - acting

    def applied_report(self, robot: str) -> WeightsApplied:
        """Returns the report of the version that `robot` uses, and how much of the next may arrive unrequested."""
        report = WeightsApplied(robot=robot, version=self._policy.version, seconds=self._policy.swap_delay_s)
        loaded = self.planner.loaded
        if loaded is None or loaded.manifest.version != report.version:
            return report
        manifest = loaded.manifest
        return with_fields(
            report, form=manifest.form, digest=manifest.digest, ahead_bytes=self.planner.prefetch_budget_bytes
        )

    def scalars(self) -> dict[str, float]:
        """Returns the metrics of the link, of rejected versions, of the newest version's stages, and of the
        governor.
        """
        planner = self.planner
        return {
            "weights/version": float(planner.loaded_version),
            "weights/link_mb_per_s": planner.link_bytes_per_s / 1e6,
            "weights/damaged": float(planner.damaged_blocks),
            "weights/refused": float(planner.rejected),
            "weights/abandoned": float(planner.abandoned),
            **{f"weights/{stage}_ms": 1e3 * seconds for stage, seconds in planner.stage_seconds.items()},
            **self._governor.scalars(),
        }

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                envelope = self._channel.receive_weights(min(wait_s, 0.5))
                with self._governor.push() if self.planner.is_updating else nullcontext():
                    self._receive_burst(envelope)
                    wait_s = self.planner.step()
                if time.monotonic() >= self._next_save_s:
                    self._save_if_changed()
            self._save_if_changed()
        except Exception as error:  # of any type: the session raises it
            _log.exception("weights.failed")
            self._failure = error

    def _receive_burst(self, envelope: Envelope | None) -> None:
        """Handles up to `MAX_MESSAGES_PER_STEP` waiting messages before the next requests."""
        for _ in range(MAX_MESSAGES_PER_STEP):
            if envelope is None:
                return
            self._on_message(envelope)
            envelope = self._channel.receive_weights(0.0)
        if envelope is not None:
            self._on_message(envelope)

    def _on_message(self, envelope: Envelope) -> None:
        match envelope.message:
            case WeightsOffer() as offer:
                self.planner.on_offer(offer)
                if self._update_run() or offer.greeting:
                    self._on_session_start()
            case WeightsBlocks() | WeightsGone() as message:
                payload = None if envelope.payload is None else memoryview(envelope.payload)
                self.planner.on_reply(message, payload)

    def _update_run(self) -> bool:
        """Passes the run of the offers to the policy. Returns True if it has changed."""
        before, self._policy.run = self._policy.run, self.planner.run
        return before != self.planner.run

    def _load_saved(self) -> None:
        if self._store is None:
            return
        try:
            index = self._store.load()
            if (saved := newest_version(index)) is None:
                return
            manifest, state = saved
            self.planner.load_saved(LoadedVersion(manifest, index.manifests[manifest.form, manifest.version][1], state))
            self._saved = manifest
        except (OSError, WireError) as error:  # the gateway has newer versions, which replace these
            _log.warning("weights.stored_version_unusable folder=%s: %s", self._store.folder, error)

    def _save_if_changed(self) -> None:
        loaded, started_s = self.planner.loaded, time.monotonic()
        if self._store is None or loaded is None or loaded.manifest == self._saved:
            return
        with self._governor.push():  # writing takes time from inference too
            self._save(self._store, loaded)
        duration_s = time.monotonic() - started_s
        self._next_save_s = time.monotonic() + max(SAVE_INTERVAL_S, duration_s / MAX_SAVE_TIME_SHARE)

    def _save(self, store: VersionStore, loaded: LoadedVersion) -> None:
        version = loaded.manifest.version
        patches = [full_patch(loaded.state, version, self._governor.yield_cpu)]
        if loaded.manifest.table_bytes:
            patches.append(table_patch(loaded.state, version))
        key = loaded.manifest.form, version
        try:
            saved = {patch.info.id: patch for patch in patches}
            store.save(VersionIndex({key: (loaded.manifest, loaded.signed)}, saved))
            self._saved = loaded.manifest
        except OSError as error:
            _log.warning("weights.store_failed version=%d: %s", version, error)
