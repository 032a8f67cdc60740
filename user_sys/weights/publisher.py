"""Publishes versions on the learner's side: encodes snapshots as patches, and sends them to the gateway on request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from user_sys.codec import Array
from user_sys.errors import ConfigError, RunError
from user_sys.messages import (
    NO_EPOCH,
    NO_VERSION,
    PatchInfo,
    Precision,
    PublisherEpoch,
    SignedRecord,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.protocol import Envelope
from user_sys.weights.distribution import (
    MAX_CHAIN_BLOCKS,
    MAX_CHAIN_LENGTH,
    ActiveDownloads,
    DownloadTargets,
    OfferThrottle,
    WeightsChannel,
    build_offer,
    read_blocks,
)
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.patches import (
    Patch,
    VersionIndex,
    cheapest_path,
    delta_patch,
    full_patch,
    subset_patch,
    table_patch,
)
from user_sys.weights.precision import NO_ROUNDING, RoundingStats, quantize
from user_sys.weights.signing import Signer
from user_sys.weights.state import TensorSet, YieldHook, build_manifest, build_tensor_set

MAX_CHAIN_FRACTION = 0.5
"""The deltas after a full patch have at most this fraction of its size."""
SUBSET_SIZE_TOLERANCE = 1.25
"""A subset patch replaces a delta unless it is larger by more than this factor."""
CLOSE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishConfig:
    """When the learner publishes, and in which precisions. A version is published if one of the set conditions holds.

    Attributes:
        every_s: seconds since the last version; 0 disables this condition.
        every_updates: updates since the last version; 0 disables this condition.
        at_episode_ends: an episode has ended since the last version.
        kl: how far the policy has moved since the last version, as the mean Kullback-Leibler divergence over a batch;
            0 disables this condition.
        precisions: the ones that robots may choose from; rounded ones are for slow links.
        max_versions_ahead: the learner waits while the slowest robot is more versions behind than this; 0 never waits.
        governor: the budget of publishing next to the training step.
        green_sms: multiprocessors of a CUDA green context that rounds and copies weights of a GPU; 0 uses a stream of
            the lowest priority instead.
        collective_ctas: thread blocks of a GPU that gather weights from several processes.
    """

    every_s: float = 1.0
    every_updates: int = 0
    at_episode_ends: bool = False
    kl: float = 0.0
    precisions: tuple[Precision, ...] = ("exact",)
    max_versions_ahead: int = 0
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    green_sms: int = 0
    collective_ctas: int = 2

    def __post_init__(self) -> None:
        if min(self.every_s, self.every_updates, self.kl, self.max_versions_ahead) < 0:
            raise ConfigError("learner.publish: set every_s, every_updates, kl and max_versions_ahead to 0 or more")
        if not (self.every_s or self.every_updates or self.kl or self.at_episode_ends):
            raise ConfigError("learner.publish: set one of every_s, every_updates, at_episode_ends, kl")
        if self.collective_ctas < 1:
            raise ConfigError(f"learner.publish: set collective_ctas to 1 or more, not {self.collective_ctas}")
        if not self.precisions:
            raise ConfigError("learner.publish: list at least one of exact, bf16, int8 in precisions")
        if self.green_sms < 0:
            raise ConfigError(
                f"learner.publish: set green_sms to a number of multiprocessors, or 0, not {self.green_sms}"
            )


@dataclass(frozen=True)
class _ChangedTensors:
    """The tensors that have changed since a base version: the first one of this epoch, or of this layout."""

    version: int
    digest: bytes
    names: frozenset[str] = frozenset()

    def updated(self, previous: TensorSet, state: TensorSet) -> _ChangedTensors:
        known = {entry.name: entry.digest for entry in previous.entries}
        changed = {entry.name for entry in state.entries if entry.digest != known[entry.name]}
        return replace(self, names=self.names | changed)

    def size_bytes(self, state: TensorSet) -> int:
        return sum(state.tensors[name].nbytes for name in self.names)


@dataclass(frozen=True)
class _PendingSnapshot:
    arrays: Mapping[str, Array]
    version: int
    updates: int
    rounding: RoundingStats


@dataclass(frozen=True)
class _EncodedVersion:
    """A version in all precisions, with the patches that lead to it."""

    version: int
    manifests: Mapping[tuple[Precision, int], tuple[WeightsManifest, SignedRecord]]
    patches: tuple[Patch, ...]


class PatchEncoder:
    """Encodes snapshots as signed manifests and patches. One thread calls it."""

    def __init__(
        self, signer: Signer, precisions: tuple[Precision, ...], epoch: PublisherEpoch, yield_cpu: YieldHook
    ) -> None:
        self._signer, self._precisions, self._epoch, self._yield_cpu = signer, precisions, epoch, yield_cpu
        self._states: dict[Precision, tuple[int, TensorSet]] = {}
        self._changed: dict[Precision, _ChangedTensors] = {}

    def encode(self, snapshot: _PendingSnapshot, existing: Callable[[], list[PatchInfo]]) -> _EncodedVersion:
        """Encodes `snapshot`; `existing` returns the patches that peers can fetch.

        Raises:
            NotFinite: it holds NaN or infinity.
            WireError: a dtype is unsupported, or there are too many tensors.
        """
        version, manifests, patches = snapshot.version, {}, list[Patch]()
        unix_ns = time.time_ns()
        for precision in self._precisions:
            previous_version, previous = self._states.get(precision, (NO_VERSION, None))
            arrays, errors = quantize(snapshot.arrays, precision, self._yield_cpu, snapshot.rounding)
            state = build_tensor_set(arrays, precision, previous, self._yield_cpu)
            manifest = build_manifest(state, version, snapshot.updates, unix_ns, errors, self._epoch)
            patches += self._patches(previous_version, previous, version, state, existing)
            if not manifest.has_tensors:
                patches.append(table_patch(state, version))
            self._states[precision] = (version, state)
            manifests[precision, version] = (manifest, self._signer.sign(manifest))
        return _EncodedVersion(version, manifests, tuple(patches))

    def _patches(
        self,
        base_version: int,
        base: TensorSet | None,
        version: int,
        state: TensorSet,
        existing: Callable[[], list[PatchInfo]],
    ) -> list[Patch]:
        """Returns a small patch from the base, and a full or subset patch if the chain of deltas gets too long."""
        delta = None if base is None else delta_patch(base_version, base, version, state, self._yield_cpu)
        if delta is None or base is None:
            self._changed[state.form] = _ChangedTensors(version, state.digest)
            return [full_patch(state, version, self._yield_cpu)]
        changed = self._changed[state.form] = self._changed[state.form].updated(base, state)
        changed_bytes = changed.size_bytes(state)
        patch = delta
        if changed_bytes <= min(SUBSET_SIZE_TOLERANCE * delta.info.size_bytes, MAX_CHAIN_FRACTION * state.size_bytes):
            patch = self._subset_patch(changed, version, state) or delta
        if _is_short_chain([*existing(), patch.info], version, state):
            return [patch]
        few_changes = patch is delta and changed_bytes <= MAX_CHAIN_FRACTION / 2 * state.size_bytes
        subset = self._subset_patch(changed, version, state) if few_changes else None
        return [patch, subset or full_patch(state, version, self._yield_cpu)]

    def _subset_patch(self, changed: _ChangedTensors, version: int, state: TensorSet) -> Patch | None:
        return subset_patch(changed.version, changed.digest, version, state, changed.names, self._yield_cpu)


def _is_short_chain(infos: list[PatchInfo], version: int, state: TensorSet) -> bool:
    """Whether few and small deltas follow the full patch on the path to `version`."""
    path = cheapest_path(infos, state.form, version, {})
    chain = path.patches[1:] if path is not None else ()
    return (
        0 < len(chain) <= MAX_CHAIN_LENGTH
        and sum(info.size_bytes for info in chain) <= MAX_CHAIN_FRACTION * state.size_bytes
        and sum(info.block_count for info in chain) <= MAX_CHAIN_BLOCKS
    )


class PatchServer:
    """Offers versions to the gateway and sends the blocks that it requests. Any thread may call it.

    Attributes:
        index: the manifests and patches that can be fetched.
        newest: the newest version.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        public_key: bytes,
        precisions: tuple[Precision, ...],
        clock: Callable[[], float],
    ) -> None:
        self.index, self.newest = VersionIndex(), NO_VERSION
        self._channel, self._public_key, self._precisions, self._clock = channel, public_key, precisions, clock
        self._downloads, self._targets = ActiveDownloads(len(precisions), clock), DownloadTargets(1, clock)
        self._throttle = OfferThrottle()
        self._lock = threading.RLock()

    def patch_infos(self) -> list[PatchInfo]:
        with self._lock:
            return self.index.patch_infos()

    def add(self, encoded: _EncodedVersion, stored_version: int) -> None:
        """Adds a version and offers it. Drops the patches that the gateway needs no more, as it has `stored_version`.

        The offer goes out before a reply says that a patch is gone, so the gateway switches to the new version.
        """
        version = encoded.version
        with self._lock:
            self.index.manifests |= encoded.manifests
            self.index.patches |= {patch.info.id: patch for patch in encoded.patches}
            self._downloads.add_offered(patch.info for patch in encoded.patches)
            versions = {version, *(target for target in self._targets.versions() if target > stored_version)}
            pinned = self._downloads.pinned_ids() | self._targets.pinned_ids()
            self.index.retain(versions, max(stored_version, version - MAX_CHAIN_LENGTH), pinned)
            self.newest = version
            self._throttle.is_pending = True
            self.offer_if_due()

    def on_peer_message(self) -> None:
        """Records that the gateway is responsive."""
        with self._lock:
            self._throttle.on_peer_message()
            self.offer_if_due()

    def offer_if_due(self) -> None:
        """Sends an offer if one is pending. The lock orders offers: the gateway uses the last one."""
        with self._lock:
            if self._throttle.is_due(self._clock()):
                self.send_offer()

    def send_offer(self, greeting: bool = False) -> tuple[PatchInfo, ...]:
        """Offers the newest version, if there is one, and returns the patches that lead to it."""
        with self._lock:
            if self.newest == NO_VERSION:
                return ()
            offer = self._build_offer(greeting)
            self._channel.send_weights(offer)
            self._throttle.on_offer_sent(self._clock())
        return offer.parcels

    def send_blocks(self, request: WeightsRequest) -> None:
        """Replies to a request of the gateway."""
        with self._lock:
            patch = self.index.patches.get(request.parcel)
            if patch is None:
                self._targets.on_missing("", self.newest, self.send_offer)
                self._channel.send_weights(WeightsGone(parcel=request.parcel))
                return
            self._targets.on_request("", patch.info, self.newest)
            self._downloads.on_request("", request, patch.info)
        for message, content in read_blocks(self.index, request):
            self._channel.send_weights(message, content)

    def _build_offer(self, greeting: bool) -> WeightsOffer:
        manifests = [self.index.manifests[precision, self.newest][1] for precision in self._precisions]
        infos = self.index.patch_infos()
        return build_offer(manifests, infos, self._precisions, self.newest, signer=self._public_key, greeting=greeting)


@dataclass
class PublisherProgress:
    """How far versions have got.

    Attributes:
        published: number of versions that were encoded.
        submitted_version: the newest that was given to `Publisher.publish`.
        ready_version: the newest that is offered.
        stored_version: the newest on the gateway's disk.
        oldest_in_use: the oldest in use by a connected robot; `NO_VERSION` if there is none.
        pinned_version: the one that an operator has pinned; `NO_VERSION` if there is none.
        next_allowed_s: when the governor allows the next version, on the monotonic clock.
    """

    published: int = 0
    submitted_version: int = NO_VERSION
    ready_version: int = NO_VERSION
    stored_version: int = NO_VERSION
    oldest_in_use: int = NO_VERSION
    pinned_version: int = NO_VERSION
    next_allowed_s: float = 0.0


class Publisher:
    """Publishes from `__enter__` to `close`. One thread calls `publish`; two threads of its own encode and serve.

    A newer snapshot replaces one that waits. A version can be fetched until the gateway has stored it. Without its
    threads, `encode_pending`, `on_message` and `offer_if_due` do their work step by step.

    Args:
        on_change: called by the publisher's threads when its progress changes or it fails.
        epoch: signed with each version.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        signer: Signer,
        config: PublishConfig,
        on_change: Callable[[], None] = lambda: None,
        epoch: PublisherEpoch = NO_EPOCH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.governor = Governor(config.governor)
        self.progress = PublisherProgress()
        self.server = PatchServer(channel, signer.public_key, config.precisions, clock)
        self._encoder = PatchEncoder(signer, config.precisions, epoch, self.governor.yield_cpu)
        self._channel, self._on_change, self._clock = channel, on_change, clock
        self._pending: _PendingSnapshot | None = None
        self._is_encoding = False
        self._failure: Exception | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run_thread, args=(loop,), name=name, daemon=True)
            for name, loop in (("weights-encode", self._encode_snapshots), ("weights-serve", self._serve))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends after the snapshot that is being encoded. Raises RunError if that exceeds `CLOSE_TIMEOUT_S`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                raise RunError(f"the thread {thread.name} did not end within {CLOSE_TIMEOUT_S:.0f} s")

    def publish(
        self, arrays: Mapping[str, Array], version: int, updates: int, rounding: RoundingStats = NO_ROUNDING
    ) -> None:
        """Takes ownership of `arrays` and returns at once; the caller must not change them afterwards.

        A read-only array that is the same object as before counts as unchanged, such as frozen parts of a policy.

        Args:
            rounding: the error of arrays that are rounded already.

        Raises:
            NotFinite: an earlier snapshot held NaN or infinity; it was not published.
            WireError: an earlier snapshot cannot be encoded.
        """
        with self._changed:
            self._raise_failure()
            self._pending = _PendingSnapshot(arrays, version, updates, rounding)
            self.progress.submitted_version = version
            self._changed.notify_all()

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Waits until the gateway has stored the last version; False after `timeout_s`. Raises as `publish` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stored() or self._failure is not None, timeout_s)
            self._raise_failure()
            return self._is_stored()

    def scalars(self) -> dict[str, float]:
        """Returns the metrics."""
        return {"versions_published": float(self.progress.published), **self.governor.scalars()}

    @property
    def failure(self) -> Exception | None:
        """The error that `publish` would raise."""
        return self._failure

    @property
    def is_busy(self) -> bool:
        """A snapshot waits or is being encoded, or the governor has pushes pause."""
        is_waiting = self._clock() < self.progress.next_allowed_s
        return self._failure is None and (self._pending is not None or self._is_encoding or is_waiting)

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind; 0 if no robot uses a version."""
        with self._changed:
            progress = self.progress
            if progress.oldest_in_use == NO_VERSION:
                return 0
            return max(0, progress.submitted_version - progress.oldest_in_use)

    def encode_pending(self) -> bool:
        """Encodes and offers the snapshot that waits. Returns False if there is none."""
        with self._changed:
            snapshot, self._pending = self._pending, None
            self._is_encoding = snapshot is not None
        if snapshot is None:
            return False
        with self.governor.push():
            encoded = self._encoder.encode(snapshot, self.server.patch_infos)
            self.server.add(encoded, self.progress.stored_version)
        with self._changed:
            self.progress.published += 1
            self.progress.next_allowed_s = self._clock() + self.governor.pause_after_push_s()
            self.progress.ready_version, self._is_encoding = snapshot.version, False
        self._on_change()
        return True

    def offer_if_due(self) -> None:
        """Sends an offer if one is pending and the gateway is responsive."""
        self.server.offer_if_due()

    def on_message(self, envelope: Envelope) -> None:
        """Handles a message of the gateway."""
        self.server.on_peer_message()
        match envelope.message:
            case WeightsOfferRequest():
                self.server.send_offer(greeting=True)
            case WeightsRequest() as request:
                with self.governor.push():
                    self.server.send_blocks(request)
            case WeightsReceived(version=version):
                with self._changed:
                    self.progress.stored_version = max(self.progress.stored_version, version)
                    self._changed.notify_all()
                self._on_change()
            case WeightsProgress(oldest=oldest, ordered=pinned):
                with self._changed:
                    self.progress.oldest_in_use, self.progress.pinned_version = oldest, pinned
                self._on_change()

    def _is_stored(self) -> bool:
        return self.progress.stored_version >= self.progress.submitted_version

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run_thread(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # of any type: the learner's next call raises it
            _log.error("weights.publish_failed: %s", error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._on_change()

    def _encode_snapshots(self) -> None:
        while True:
            with self._changed:
                while self._pending is None and not self._stopping:
                    self._changed.wait(POLL_INTERVAL_S)
            if not self.encode_pending():
                return

    def _serve(self) -> None:
        while not self._stopping:
            envelope = self._channel.receive_weights(POLL_INTERVAL_S)
            if envelope is not None:
                self.on_message(envelope)
            self.offer_if_due()
