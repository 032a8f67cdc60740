"""The learner's end: takes snapshots of the policy, makes parcels of them, and hands out what the gateway asks for."""

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
    WeightsGone,
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
from user_sys.weights.state import TensorSet, build_manifest, build_tensor_set

MAX_CHAIN_FRACTION = 0.5
"""The differences that follow a full parcel (`offers.MAX_CHAIN` at most) are at most this share of it."""
SUBSET_SIZE_TOLERANCE = 1.25
"""All that has changed since the first version travels, where a difference would not be smaller by more than this."""
CLOSE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishConfig:
    """When the learner publishes, and in which forms.

    A version is published as soon as one of the conditions that are set holds.

    Attributes:
        every_s: seconds since the last one; 0 sets no such condition.
        every_updates: updates since the last one; likewise.
        at_episode_ends: an episode has ended since the last one.
        kl: the policy has moved by so much since the last one: mean Kullback-Leibler divergence over a batch.
        forms: what robots may choose from: exact, and roundings for links that are too slow for it.
        max_versions_ahead: the learner waits while the slowest robot is more than so many versions behind; 0 never
            waits.
        governor: what publishing may cost the training step.
        green_sms: multiprocessors of a CUDA green context in which a GPU's weights are packed and copied to the host; 0
            for none: then on a stream of the lowest priority.
        collective_ctas: thread blocks of a GPU with which weights are gathered where several processes have shares of
            them.
    """

    every_s: float = 1.0
    every_updates: int = 0
    at_episode_ends: bool = False
    kl: float = 0.0
    forms: tuple[Precision, ...] = ("exact",)
    max_versions_ahead: int = 0
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    green_sms: int = 0
    collective_ctas: int = 2

    def __post_init__(self) -> None:
        if min(self.every_s, self.every_updates, self.kl, self.max_versions_ahead) < 0:
            raise ConfigError("learner.publish: every_s, every_updates, kl and max_versions_ahead are not negative")
        if not (self.every_s or self.every_updates or self.kl or self.at_episode_ends):
            raise ConfigError("learner.publish: set one of every_s, every_updates, at_episode_ends, kl")
        if self.collective_ctas < 1:
            raise ConfigError("learner.publish: collective_ctas is at least 1")
        if not self.forms:
            raise ConfigError("learner.publish: forms names at least one of exact, bf16, int8")
        if self.green_sms < 0:
            raise ConfigError("learner.publish: green_sms is a number of multiprocessors, or 0")


@dataclass(frozen=True)
class _ChangedTensors:
    """The tensors that have changed since the first version of this life, or of this layout."""

    version: int
    digest: bytes
    names: frozenset[str] = frozenset()

    def after(self, former: TensorSet, state: TensorSet) -> _ChangedTensors:
        known = {entry.name: entry.digest for entry in former.entries}
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


class Publisher:
    """Publishes from `start` to `close`. One thread calls `publish`; two threads of its own do the work.

    A snapshot that waits is replaced by a newer one. What was published is handed out until the gateway has it.

    Args:
        changed: called by the publisher's threads when a version is ready, was confirmed or could not be published, and
            when another one is the robots' oldest, or is ordered.
        life: what is signed with each version, of which run it is.
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
        self.published = 0
        self._link, self._signer, self._config, self._tell, self._life = channel, signer, config, on_change, epoch
        self._clock = clock
        self.governor = Governor(config.governor)
        self._catalogue = VersionIndex()
        self._states: dict[Precision, tuple[int, TensorSet]] = {}
        self._trained: dict[Precision, _ChangedTensors] = {}
        self._snapshot: _PendingSnapshot | None = None
        self._encoding = False
        self._asked = self._newest = self._ready = self._confirmed = self._oldest = self._ordered = NO_VERSION
        self._begun, self._aims = ActiveDownloads(len(config.forms), clock), DownloadTargets(1, clock)
        self._pace = OfferThrottle()
        self._open_s = 0.0
        self._failure: Exception | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._attempt, args=(work,), name=name, daemon=True)
            for name, work in (("weights-encode", self._encode_snapshots), ("weights-serve", self._serve))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends after the snapshot in hand. Raises RunError when that takes longer than `CLOSE_TIMEOUT_S`."""
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
        """Takes `arrays` over and returns at once; nobody changes them any more.

        An array that is read-only and the same object each time is known to be unchanged (frozen parts of a policy).

        Args:
            rounding: what was done to arrays that come rounded already.

        Raises:
            NotFinite: an earlier snapshot held NaN or infinity; it was not published.
            WireError: an earlier snapshot cannot travel.
        """
        with self._changed:
            self._raise_failure()
            self._snapshot, self._asked = _PendingSnapshot(arrays, version, updates, rounding), version
            self._changed.notify_all()

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Waits until the gateway has the last version on disk; False after `timeout_s`. Raises as `publish` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._confirmed >= self._asked or self._failure is not None, timeout_s)
            self._raise_failure()
            return self._confirmed >= self._asked

    def scalars(self) -> dict[str, float]:
        """For the metrics."""
        return {"versions_published": float(self.published), **self.governor.scalars()}

    @property
    def version(self) -> int:
        """The newest that was given to `publish`."""
        return self._asked

    @property
    def ready_version(self) -> int:
        """The newest that robots may be offered."""
        return self._ready

    @property
    def stored_version(self) -> int:
        """The newest that the gateway has on its disk."""
        return self._confirmed

    @property
    def oldest_in_use(self) -> int:
        """The oldest with which a connected robot acts; `NO_VERSION` where none acts with any."""
        return self._oldest

    @property
    def pinned_version(self) -> int:
        """The version that a person ordered; `NO_VERSION` where none is."""
        return self._ordered

    @property
    def failure(self) -> Exception | None:
        """What `publish` would raise."""
        return self._failure

    @property
    def next_allowed_s(self) -> float:
        """When the governor lets the next version follow that which is ready; seconds of the monotonic clock."""
        return self._open_s

    @property
    def is_busy(self) -> bool:
        """An earlier snapshot waits, or is worked on, or the governor has pushes pause."""
        waits = self._snapshot is not None or self._encoding or self._clock() < self._open_s
        return self._failure is None and waits

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind; 0 while none acts with any."""
        with self._changed:
            return 0 if self._oldest == NO_VERSION else max(0, self._asked - self._oldest)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _attempt(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except Exception as error:  # of any kind: the learner must hear of it, and does at its next call
            _log.error("weights.not_published: %s", error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._tell()

    # Making parcels

    def _encode_snapshots(self) -> None:
        while (snapshot := self._next()) is not None:
            with self.governor.push():
                self._bring_out(snapshot)
            with self._changed:
                self._open_s = self._clock() + self.governor.pause_after_push_s()
                self._ready, self._encoding = snapshot.version, False
            self._tell()

    def _next(self) -> _PendingSnapshot | None:
        with self._changed:
            while self._snapshot is None and not self._stopping:
                self._changed.wait(POLL_INTERVAL_S)
            snapshot, self._snapshot = self._snapshot, None
            self._encoding = snapshot is not None
            return snapshot

    def _bring_out(self, snapshot: _PendingSnapshot) -> None:
        """Makes parcels of it, and offers them: whoever is told that one is gone has heard of the newest."""
        breathe, version = self.governor.yield_cpu, snapshot.version
        fresh: list[Patch] = []
        unix_ns = time.time_ns()
        for form in self._config.forms:
            former_version, former = self._states.get(form, (NO_VERSION, None))
            arrays, errors = quantize(snapshot.arrays, form, breathe, snapshot.rounding)
            state = build_tensor_set(arrays, form, former, breathe)
            manifest = build_manifest(state, version, snapshot.updates, unix_ns, errors, self._life)
            fresh += self._parcels(former_version, former, version, state)
            if not manifest.has_tensors:
                fresh.append(table_patch(state, version))
            self._states[form] = (version, state)
            with self._changed:
                self._catalogue.manifests[form, version] = (manifest, self._signer.sign(manifest))
        with self._changed:
            self._catalogue.patches |= {parcel.info.id: parcel for parcel in fresh}
            self._begun.add_offered(parcel.info for parcel in fresh)
            kept = {version, *(aim for aim in self._aims.versions() if aim > self._confirmed)}
            asked = self._begun.pinned_ids() | self._aims.pinned_ids()
            self._catalogue.retain(kept, max(self._confirmed, version - MAX_CHAIN_LENGTH), asked)
            self._newest = version
            self.published += 1
            self._pace.is_pending = True
            self._offer_if_due()

    def _parcels(self, base_version: int, base: TensorSet | None, version: int, state: TensorSet) -> list[Patch]:
        breathe = self.governor.yield_cpu
        delta = None if base is None else delta_patch(base_version, base, version, state, breathe)
        if delta is None or base is None:
            self._trained[state.form] = _ChangedTensors(version, state.digest)
            return [full_patch(state, version, breathe)]
        trained = self._trained[state.form] = self._trained[state.form].after(base, state)
        trained_bytes = trained.size_bytes(state)
        news = delta
        if trained_bytes <= min(SUBSET_SIZE_TOLERANCE * delta.info.size_bytes, MAX_CHAIN_FRACTION * state.size_bytes):
            news = self._parts(trained, version, state) or delta
        with self._changed:
            way = cheapest_path([*self._catalogue.patch_infos(), news.info], state.form, version, {})
        chain = way.patches[1:] if way is not None else ()
        short = (
            0 < len(chain) <= MAX_CHAIN_LENGTH
            and sum(info.size_bytes for info in chain) <= MAX_CHAIN_FRACTION * state.size_bytes
            and sum(info.block_count for info in chain) <= MAX_CHAIN_BLOCKS
        )
        if short:
            return [news]
        few = news is delta and trained_bytes <= MAX_CHAIN_FRACTION / 2 * state.size_bytes
        parts = self._parts(trained, version, state) if few else None
        return [news, parts or full_patch(state, version, breathe)]

    def _parts(self, trained: _ChangedTensors, version: int, state: TensorSet) -> Patch | None:
        breathe = self.governor.yield_cpu
        return subset_patch(trained.version, trained.digest, version, state, trained.names, breathe)

    def _offer_if_due(self) -> None:
        """Two threads offer, one after the other: the gateway turns to the offer that comes last."""
        with self._changed:
            if self._pace.is_due(self._clock()):
                self._send_offer()

    def _send_offer(self, greeting: bool = False) -> tuple[PatchInfo, ...]:
        """Returns what leads to the newest version; nothing is said before the first."""
        with self._changed:
            if self._newest == NO_VERSION:
                return ()
            offer = self._offer(greeting)
            self._link.send_weights(offer)
            self._pace.on_offer_sent(self._clock())
        return offer.parcels

    def _offer(self, greeting: bool) -> WeightsOffer:
        with self._changed:
            infos, forms = self._catalogue.patch_infos(), self._config.forms
            manifests = [self._catalogue.manifests[form, self._newest][1] for form in forms]
        return build_offer(manifests, infos, forms, self._newest, signer=self._signer.public_key, greeting=greeting)

    # Handing them out

    def _hand_out(self, request: WeightsRequest) -> None:
        with self._changed:
            known = self._catalogue.patches.get(request.parcel)
            if known is None:
                self._aims.on_missing("", self._newest, self._send_offer)
                self._link.send_weights(WeightsGone(parcel=request.parcel))
                return
            self._aims.on_request("", known.info, self._newest)
            self._begun.on_request("", request, known.info)
        for message, content in read_blocks(self._catalogue, request):
            self._link.send_weights(message, content)

    def _serve(self) -> None:
        while not self._stopping:
            envelope = self._link.receive_weights(POLL_INTERVAL_S)
            if envelope is not None:
                self._take(envelope)
            self._offer_if_due()

    def _take(self, envelope: Envelope) -> None:
        with self._changed:
            self._pace.on_peer_message()
            self._offer_if_due()
        match envelope.message:
            case WeightsOfferRequest():
                self._send_offer(greeting=True)
            case WeightsRequest() as request:
                with self.governor.push():
                    self._hand_out(request)
            case WeightsReceived(version=version):
                with self._changed:
                    self._confirmed = max(self._confirmed, version)
                    self._changed.notify_all()
                self._tell()
            case WeightsProgress(oldest=oldest, ordered=ordered):
                with self._changed:
                    self._oldest, self._ordered = oldest, ordered
                self._tell()
