"""Receives weights on a robot: from an offer to a policy with new weights, and the last version on disk for the next
start.

`UpdatePlanner` selects the version and the precision, and loads what `VersionFetcher` has fetched. Versions are ordered
by the epoch of their publisher and by their number; only a signed pin leads to an earlier one. It is independent of the
transport. `WeightsReceiver` runs it in a thread and stores versions. `DoubleBufferedPolicy` has two copies of a policy:
one acts while the other loads, and the control loop swaps them.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from hal.settings import Limit
from hal.spec import Array
from user_sys.errors import UserSysError, WireError
from user_sys.messages import (
    FOREIGN_RUN,
    NO_VERSION,
    PinnedVersion,
    Precision,
    SignedRecord,
    TensorEntry,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsRequest,
    decode_record,
)
from user_sys.policies.policy import Policy
from user_sys.threads import ThreadedService
from user_sys.trace import span
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.protocol import Envelope, TunnelState
from user_sys.weights.catalog import DEFAULT_CACHE_BYTES, BlobCache, BlobCacheFull, StoredVersion
from user_sys.weights.fetcher import Candidate, VersionFetcher
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.signing import PUBLIC_SUFFIX, SIGNING_KEY_NAME, TrustedLearnerKey
from user_sys.weights.state import YieldHook, dequantize, no_yield
from user_sys.weights.version_store import VersionStore, newest_version, read_tensors

LOAD_RETRY_S = 10.0  # of a version for which there was too little memory
ItemT = TypeVar("ItemT")

LoadWeights = Callable[[WeightsManifest, Mapping[str, Array], float], None]
"""Loads arrays into the second copy of the policy; the time is that of the announcement.

Raises:
    WireError: they do not fit the policy.
    WeightsNotLoaded: there is too little memory now.
"""
_log = logging.getLogger(__name__)


class WeightsNotLoaded(UserSysError):
    """Weights that fit the policy could not be loaded: retry later."""


@dataclass(frozen=True)
class _LoadedPolicy:
    policy: Policy
    version: int
    offered_s: float
    run: bytes


class DoubleBufferedPolicy:
    """A policy that loads weights in one thread while another acts.

    The control loop's thread calls `policy`, `version`, `swap_delay_s` and `swap_if_ready`; one other thread calls
    `load`.
    They share no lock. The control loop's thread neither frees nor loads a policy, so a swap costs a few assignments
    for
    any size of policy. `user_sys.weights.receiver` decides which versions follow each other.

    Attributes:
        run: the id of the current run; versions of other runs count as foreign. Any thread may set it.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        """`make` returns a policy without weights. It is called twice here, and rarely later."""
        self._make_policy = make
        self._policy = make()
        self._active_version = NO_VERSION, b""  # the version and its run
        self._swap_delay_s = 0.0
        self.run = b""
        self._loaded: deque[_LoadedPolicy] = deque(maxlen=1)
        self._idle: deque[Policy] = deque([make()], maxlen=1)

    @property
    def policy(self) -> Policy:
        """The policy to act with until the next swap."""
        return self._policy

    @property
    def version(self) -> int:
        """The version of the acting weights; -1 before the first, `FOREIGN_RUN` if they are of another run."""
        version, run = self._active_version
        return version if run == self.run or version == NO_VERSION else FOREIGN_RUN

    @property
    def swap_delay_s(self) -> float:
        """Seconds from the announcement of the acting version to its swap."""
        return self._swap_delay_s

    def load(
        self, version: int, weights: Mapping[str, Array], offered_s: float | None = None, run: bytes = b""
    ) -> None:
        """Loads `weights` into the idle copy for the next swap, and replaces a loaded version that waits for it.

        Args:
            offered_s: when this version was announced, on the monotonic clock; None for now.
            run: the run that `version` belongs to.

        Raises:
            WireError: the weights do not fit the policy; the acting and the loaded version stay.
            WeightsNotLoaded: there is too little memory for them; the acting version stays.
        """
        announced_s = time.monotonic() if offered_s is None else offered_s
        waiting = _pop(self._loaded)
        idle = waiting.policy if waiting is not None else _pop(self._idle) or self._make_policy()
        try:
            with span("load weights"):
                idle.load(weights)
        except WireError:
            if waiting is not None:
                self._loaded.append(waiting)
            else:
                self._idle.append(idle)
            raise
        except (MemoryError, RuntimeError) as error:
            self._idle.append(idle)  # it may have some of the new weights, so it must not act
            if self.version == NO_VERSION:
                raise
            raise WeightsNotLoaded(f"it cannot be loaded: {type(error).__name__}: {error}") from error
        self._loaded.append(_LoadedPolicy(idle, version, announced_s, run))

    def swap_if_ready(self) -> int | None:
        """Swaps to the loaded version, if there is one, and returns its number. Never blocks."""
        ready = _pop(self._loaded)
        if ready is None:
            return None
        self._idle.append(self._policy)
        self._policy, self._active_version = ready.policy, (ready.version, ready.run)
        self._swap_delay_s = time.monotonic() - ready.offered_s
        return ready.version


def _pop(slot: deque[ItemT]) -> ItemT | None:
    """Takes the element of a slot atomically; None if the slot is empty."""
    try:
        return slot.pop()
    except IndexError:
        return None


class UpdatePlanner:
    """Selects which version to load, and loads it. One thread calls it.

    Args:
        trusted_key: verifies offers.
        load: loads a complete version.
        send: sends a request to the gateway; returns False if it cannot be sent now.
        precisions: accepted by the policy, the preferred one first.
        yield_cpu: called during bulk work, see `state.YieldHook`.
        limit: bytes/s that the governor allows for the link.

    Attributes:
        cache: the blobs of the loaded version and of the one in transfer.
        fetcher: fetches versions.
        loaded: the version that was loaded last.
        run: the run whose versions the gateway offers; empty before the first offer.
        newest_version: the newest number that is known.
        pin: the newest pin of an offer, or None.
        stage_seconds: duration of the stages of the newest version: ``fetch`` from its announcement on, ``decode`` and
            ``load``.
    """

    def __init__(
        self,
        trusted_key: TrustedLearnerKey,
        load: LoadWeights,
        send: Callable[[WeightsRequest], bool],
        *,
        precisions: Sequence[Precision] = ("exact",),
        yield_cpu: YieldHook = no_yield,
        limit: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.cache = BlobCache(cache_bytes)
        self.fetcher = VersionFetcher(
            self.cache,
            send,
            clock=clock,
            limit=limit,
            yield_cpu=yield_cpu,
            make_room=partial(UpdatePlanner._drop_unneeded, weakref.proxy(self)),  # no cycle, which would keep memory
        )
        self.loaded: StoredVersion | None = None
        self.run, self.newest_version = b"", NO_VERSION
        self.stage_seconds: Mapping[str, float] = {}
        self._trusted_key, self._load, self._precisions, self._clock = trusted_key, load, tuple(precisions), clock
        self._arrays = dict[TensorEntry, Array](), dict[str, Array]()  # of the loaded version; as the policy loads them
        self._postponed: tuple[StoredVersion, float] | None = None  # one without memory, and when to load it again
        self._epoch = b"", 0  # the run and the newest epoch of offers and of saved weights
        self.pin: PinnedVersion | None = None
        self._announced_s: dict[int, float] = {}  # by version

    @property
    def loaded_version(self) -> int:
        """The newest loaded version; -1 before the first."""
        return self.loaded.manifest.version if self.loaded else NO_VERSION

    @property
    def rejected(self) -> int:
        """Number of offers and versions that were forged, damaged or unfit for the policy; each is logged."""
        return self.fetcher.rejections.count

    @property
    def rejection(self) -> str:
        """Why the newest of them was rejected; empty if a version has loaded since."""
        return self.fetcher.rejections.newest

    def load_saved(self, saved: StoredVersion, cache: BlobCache, pin: SignedRecord | None = None) -> None:
        """Loads a stored version from `cache`.

        Args:
            pin: the last one that this robot accepted. Its signature is not verified again.

        Raises:
            WireError: it is not signed, does not fit the policy, or `pin` names another version of its run.
        """
        self._trusted_key.verify(saved.signed, WeightsManifest)
        if pin is not None:
            pinned, version = decode_record(pin.body, PinnedVersion), saved.manifest.version
            if pinned.run == saved.manifest.run and pinned.version not in (NO_VERSION, version):
                raise WireError(f"version {version} is stored, but {pinned.by} has pinned version {pinned.version}")
        if saved.manifest.precision not in self._precisions:
            raise WireError(
                f"the stored version is {saved.manifest.precision}, but this robot takes {', '.join(self._precisions)}"
            )
        for digest in saved.digests:
            self.cache.put(digest, cache.get(digest) or memoryview(b""))
        self._load_version(saved, self._clock())
        self.fetcher.hold(saved)
        self._epoch = saved.manifest.run, saved.manifest.epoch

    def on_offer(self, offer: WeightsOffer) -> None:
        """Handles an offer of a version. One with an invalid signature is rejected and changes nothing."""
        if offer.greeting:
            self.fetcher.reset_requests()
        if not offer.manifests:
            return
        try:
            self._trusted_key.trust_on_first_use(offer.signer)
            candidates = [
                Candidate.of(self._trusted_key.verify(each, WeightsManifest), each) for each in offer.manifests
            ]
            if offer.pin is not None:
                self._set_pin(self._trusted_key.verify(offer.pin, PinnedVersion))
        except WireError as error:
            self._reject(str(error))
            return
        if len({(each.manifest.run, each.manifest.version) for each in candidates}) != 1:
            return
        first = candidates[0].manifest
        if not self._is_wanted(first):
            return
        if first.run != self.run:
            self.fetcher.rejections.newest = ""  # it was of another run
        self.run, self.newest_version = first.run, first.version
        self._epoch = first.run, max(self._epoch[1], first.epoch)
        self._announced_s = {first.version: self._clock()} | self._announced_s
        chosen = [each for name in self._precisions for each in candidates if each.manifest.precision == name][:1]
        if not chosen:
            found = ", ".join(each.manifest.precision for each in candidates)
            self._reject(f"version {first.version} comes as {found}; this robot takes {', '.join(self._precisions)}")
            return
        target = self.fetcher.target
        if target and not self._is_wanted(target[0].manifest):
            self.fetcher.abandon()
        try:
            self.fetcher.set_newest(chosen, offer.tables)
        except BlobCacheFull as error:
            self._reject(str(error))

    def on_reply(self, message: WeightsBlobs | WeightsGone, payload: memoryview | None = None) -> None:
        """Handles blobs, or the reply that a version is gone."""
        if isinstance(message, WeightsGone):
            self.fetcher.on_gone(message)
        elif payload is not None:
            self.fetcher.on_blobs(message, payload)

    def step(self) -> float:
        """Sends requests, or completes an update. Returns the seconds after which to call it again at the latest."""
        for version in self.fetcher.pop_completed():
            if self._is_wanted(version.manifest):
                self._complete_update(version)
        if self._postponed is not None and self._clock() >= self._postponed[1]:
            if self._is_wanted(self._postponed[0].manifest):
                self._complete_update(self._postponed[0])
            else:
                self._postponed = None
        return self.fetcher.step()

    def _set_pin(self, pin: PinnedVersion) -> None:
        """Applies a pin that is newer than the last one."""
        if self.pin is None or pin.serial > self.pin.serial:
            self.pin = pin

    def _is_wanted(self, manifest: WeightsManifest) -> bool:
        """Whether a version is the pinned one, or without a pin at least as new as the loaded one.

        A later epoch may have smaller numbers: its learner has lost the newest checkpoints.
        """
        run, epoch = self._epoch
        if manifest.epoch < epoch and manifest.run != run:
            return False  # a run that is over
        if self.pin is not None and self.pin.run == manifest.run and self.pin.version != NO_VERSION:
            return manifest.version == self.pin.version
        loaded = self.loaded
        return loaded is None or (manifest.epoch, manifest.version) >= (loaded.manifest.epoch, loaded.manifest.version)

    def _complete_update(self, version: StoredVersion) -> None:
        announced_s, started_s = self._announced_s.get(version.manifest.version, self._clock()), self._clock()
        before, self._postponed = self._postponed, None
        try:
            decoded_s, loaded_s = self._load_version(version, announced_s)
        except WireError as error:
            self._reject(f"version {version.manifest.version}: {error}")
        except WeightsNotLoaded as error:
            if before is None or before[0] is not version:
                self._reject(f"version {version.manifest.version}: {error}; tried again every {LOAD_RETRY_S:g} s")
            self._postponed = version, self._clock() + LOAD_RETRY_S
        else:
            self._announced_s = {number: at for number, at in self._announced_s.items() if at > announced_s}
            self.stage_seconds = {
                "fetch": started_s - announced_s,
                "decode": decoded_s - started_s,
                "load": loaded_s - decoded_s,
            }
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        """Drops blobs of versions that were refused, abandoned or replaced."""
        kept = (self.loaded, None if self._postponed is None else self._postponed[0])
        digests = (version.digests for version in kept if version is not None)
        self.cache.retain(self.fetcher.needed_digests().union(*digests))

    def _load_version(self, version: StoredVersion, announced_s: float) -> tuple[float, float]:
        """Returns the times at which the arrays were there and the policy had loaded them."""
        before, loaded = self._arrays
        tensors = read_tensors(version, self.cache, before)
        same = {e.name for e, array in tensors.items() if before.get(e) is array and e.name in loaded}
        changed = {entry.name: array for entry, array in tensors.items() if entry.name not in same}
        made = dequantize(changed, version.manifest.precision)
        for array in made.values():
            array.flags.writeable = False
        arrays = {entry.name: loaded[entry.name] if entry.name in same else made[entry.name] for entry in tensors}
        decoded_s = self._clock()
        self._load(version.manifest, arrays, announced_s)
        self.loaded, self._arrays = version, (tensors, arrays)
        self.fetcher.rejections.newest = ""
        return decoded_s, self._clock()

    def _reject(self, why: str) -> None:
        self.fetcher.rejections.add(why)
        _log.warning("weights.rejected: %s", why)


SAVE_INTERVAL_S = 10.0
MAX_SAVE_TIME_SHARE = 0.05  # maximum fraction of time for storing versions
CLOSE_TIMEOUT_S = 10.0
MAX_MESSAGES_PER_STEP = 8


@dataclass(frozen=True)
class ReceiverConfig:
    """How a robot takes new weights.

    Attributes:
        swap_at: chunk or episode; the point at which the policy is swapped.
        max_staleness_versions: hold if further behind; 0 never holds.
        precisions: those that the robot takes if its policy accepts them too, the preferred one first.
        governor: the budget of receiving next to the policy's inference.
    """

    swap_at: Literal["chunk", "episode"] = "chunk"
    max_staleness_versions: Limit = 0
    precisions: tuple[Precision, ...] = ("exact", "bf16")
    governor: GovernorConfig = field(default_factory=lambda: GovernorConfig(budget=0.05, quantile=0.99))


class WeightsReceiver(ThreadedService):
    """Receives versions from `start` to `close`, and loads them into `policy`.

    Args:
        keys: folder with the learner's public key, ``learner.verify``. If it is missing, the first key that the gateway
            names is trusted and stored there.
        folder: stores a version every `SAVE_INTERVAL_S`, and pins at once, for a start without a link; None stores
            nothing.
        on_session_start: called by the receiving thread after a new session or a change of the run, because the gateway
            does not have the acting version yet.

    Attributes:
        planner: any thread may read its figures.
    """

    def __init__(
        self,
        channel: TunnelClient,
        policy: DoubleBufferedPolicy,
        config: ReceiverConfig,
        keys: Path,
        folder: Path | None,
        governor: Governor,
        on_session_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises RunError if the learner's key is damaged, or is unknown and could not be stored."""
        super().__init__("weights", CLOSE_TIMEOUT_S)
        self._channel, self._policy, self._config = channel, policy, config
        self._governor, self._on_session_start = governor, on_session_start
        self._store = None if folder is None else VersionStore(folder)
        self._next_save_s = time.monotonic() + SAVE_INTERVAL_S
        self._saved: StoredVersion | None = None
        self._empty_session = -1  # in which the gateway has said that it has no version: after so many losses
        trust = TrustedLearnerKey(keys / f"{SIGNING_KEY_NAME}{PUBLIC_SUFFIX}")
        trust.require_persistent()
        self.planner = UpdatePlanner(
            trust,
            lambda manifest, arrays, announced_s: policy.load(manifest.version, arrays, announced_s, manifest.run),
            channel.send_weights,
            precisions=[name for name in config.precisions if name in policy.policy.precisions],
            yield_cpu=governor.yield_cpu,
            limit=governor.link_limit_bytes_per_s,
        )

    def start(self) -> None:
        """Loads the stored version, if there is one, and begins to receive."""
        self._load_saved()
        super().start()

    def is_without_version(self) -> bool:
        """Whether the gateway is there and has said in this session that it has no version, and never offered one."""
        channel = self._channel
        is_current = channel.state is TunnelState.OPEN and self._empty_session == channel.counters["lost"]
        return is_current and self.was_without_version()

    def was_without_version(self) -> bool:
        """Whether the gateway has said that it has no version, and never offered one; it may be away now."""
        return self._empty_session >= 0 and self.planner.newest_version == NO_VERSION

    def is_too_stale(self) -> bool:
        """Whether the acting policy is too many versions behind; never before the first version.

        Weights of another run are too stale once this run has a version.
        """
        acting = self._policy.version
        if self._config.max_staleness_versions == 0 or acting == NO_VERSION:
            return False
        if acting == FOREIGN_RUN:
            return bool(self.planner.run)
        return self._config.max_staleness_versions < self.planner.newest_version - acting

    def applied_report(self, robot: str) -> WeightsApplied:
        """Returns the report of the version that `robot` uses."""
        return WeightsApplied(robot=robot, version=self._policy.version, seconds=self._policy.swap_delay_s)

    def scalars(self) -> dict[str, float]:
        """Returns the metrics of the link, of rejected versions, of the newest version's stages, and of the
        governor.
        """
        planner = self.planner
        return {
            "weights/version": float(planner.loaded_version),
            "weights/link_mb_per_s": planner.fetcher.link.bytes_per_s / 1e6,
            "weights/damaged": float(planner.fetcher.damaged),
            "weights/refused": float(planner.rejected),
            "weights/abandoned": float(planner.fetcher.abandoned),
            **{f"weights/{stage}_ms": 1e3 * seconds for stage, seconds in planner.stage_seconds.items()},
            **self._governor.scalars(),
        }

    def _work(self) -> None:
        """Receives until `close`, and then stores the newest version."""
        wait_s = 0.0
        while not self._stopping.is_set():
            envelope = self._channel.receive_weights(min(wait_s, 0.5))
            with self._governor.push() if self.planner.fetcher.is_fetching else nullcontext():
                self._receive_burst(envelope)
                before = self.planner.loaded_version
                wait_s = self.planner.step()
            if self.planner.loaded_version < before or time.monotonic() >= self._next_save_s:  # a pin leads back
                self._save_if_changed()
        self._save_if_changed()

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
                before = self.planner.pin
                self._empty_session = -1 if offer.manifests else self._channel.counters["lost"]
                self.planner.on_offer(offer)
                if offer.pin is not None and self.planner.pin is not before:
                    self._save_pin(offer.pin)
                if self._update_run() or offer.greeting:
                    self._on_session_start()
            case WeightsBlobs() | WeightsGone() as message:
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
            catalog = self._store.load()
            if (saved := newest_version(catalog)) is not None:
                self.planner.load_saved(saved, catalog.cache, self._store.read_pin())
                self._saved = saved
        except (OSError, WireError, BlobCacheFull) as error:  # the gateway has newer versions, which replace these
            _log.warning("weights.stored_version_unusable folder=%s: %s", self._store.folder, error)

    def _save_pin(self, pin: SignedRecord) -> None:
        """Stores a pin before its version is here: after a crash no other version acts."""
        try:
            if self._store is not None:
                self._store.set_pin(pin)
        except OSError as error:
            _log.error("weights.pin_store_failed: %s", error)

    def _save_if_changed(self) -> None:
        loaded, started_s = self.planner.loaded, time.monotonic()
        if self._store is None or loaded is None or loaded is self._saved:
            return
        try:
            with self._governor.push():  # writing takes time from inference too
                self._store.save([loaded], self.planner.cache)
            self._saved = loaded
        except OSError as error:
            _log.error("weights.store_failed version=%d: %s", loaded.manifest.version, error)
        duration_s = time.monotonic() - started_s
        self._next_save_s = time.monotonic() + max(SAVE_INTERVAL_S, duration_s / MAX_SAVE_TIME_SHARE)
