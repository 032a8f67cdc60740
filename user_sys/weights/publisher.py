"""Publishes versions on the learner's side: hashes and signs them, and sends their blobs to the gateway on request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from hal.context import StartedAtEntry
from hal.settings import Amount, Limit
from user_sys.codec import Array
from user_sys.errors import ConfigError, RunError
from user_sys.messages import (
    MAX_VERSION_BYTES,
    NO_VERSION,
    Precision,
    SignedRecord,
    WeightsManifest,
    WeightsMessage,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.trace import span
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.protocol import Envelope
from user_sys.weights.catalog import BlobCache, VersionCatalog, WeightsServer, build_offer
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.signing import Signer
from user_sys.weights.state import TensorSet, YieldHook, build_tensor_set, quantize

KEPT_VERSIONS = 2
"""The publisher keeps so many versions besides those that the gateway fetches: the newest, and the base of the next."""
CLOSE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.5
GATEWAY = "gateway"  # the only peer
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishConfig:
    """When the learner publishes, and in which precisions. A version is published if one of the set conditions holds.

    Attributes:
        every_s: seconds since the last version; 0 disables this condition.
        every_updates: updates since the last version; 0 disables this condition.
        at_episode_ends: an episode has ended since the last version.
        after_updates: updates before the first version, such as of a supervised start.
        precisions: those that robots may choose from; ``bf16`` is for slow links.
        governor: the budget of publishing next to the training step.
        on_success_drop: what happens if the robots' success falls by 20 points from its best: a warning (``warn``), or
            robots also act with the best version until a newer one is as good (``best``).
    """

    every_s: Amount = 1.0
    every_updates: Limit = 0
    at_episode_ends: bool = False
    after_updates: Limit = 0
    precisions: tuple[Precision, ...] = ("exact",)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    on_success_drop: Literal["warn", "best"] = "warn"

    def __post_init__(self) -> None:
        if not (self.every_s or self.every_updates or self.at_episode_ends):
            raise ConfigError("learner.publish: set one of every_s, every_updates, at_episode_ends")
        if not self.precisions:
            raise ConfigError("learner.publish: list exact, bf16 or both in precisions")


@dataclass
class PublisherProgress:
    """How far versions have got.

    Attributes:
        published: number of versions that were encoded.
        ready_version: the newest that is offered.
        stored_version: the newest on the gateway's disk.
        oldest_in_use: the oldest in use by a connected robot; `NO_VERSION` if there is none.
        pinned_version: the one that an operator has pinned; `NO_VERSION` if there is none.
        next_allowed_s: when the governor allows the next version, on the monotonic clock.
    """

    published: int = 0
    ready_version: int = NO_VERSION
    stored_version: int = NO_VERSION
    oldest_in_use: int = NO_VERSION
    pinned_version: int = NO_VERSION
    next_allowed_s: float = 0.0


class VersionEncoder:
    """Makes signed manifests of snapshots. It hashes only tensors that have changed. One thread calls it."""

    def __init__(self, signer: Signer, precisions: Sequence[Precision], run: bytes, epoch: int) -> None:
        """`run` and `epoch` are signed with each version; see `user_sys.weights.signing`."""
        self.public_key = signer.public_key
        self._signer, self._precisions, self._run, self._epoch = signer, precisions, run, epoch
        self._states: dict[Precision, TensorSet] = {}
        self._rounded: dict[Precision, Mapping[str, Array]] = {}  # the newest
        self._given: Mapping[str, Array] = {}

    def encode(
        self, arrays: Mapping[str, Array], version: int, updates: int, yield_cpu: YieldHook
    ) -> list[tuple[WeightsManifest, SignedRecord, TensorSet]]:
        """The version in each precision.

        Raises:
            NotFinite: it holds NaN or infinity.
            WireError: a dtype is unsupported, or there are too many tensors.
        """
        unix_ns, made = time.time_ns(), list[tuple[WeightsManifest, SignedRecord, TensorSet]]()
        for precision in self._precisions:
            rounded = self._round(arrays, precision, yield_cpu)
            state = self._states[precision] = build_tensor_set(rounded, self._states.get(precision), yield_cpu)
            manifest = WeightsManifest(
                version=version,
                updates=updates,
                precision=precision,
                digest=state.digest,
                table_bytes=len(state.table),
                size_bytes=state.size_bytes,
                published_unix_ns=unix_ns,
                run=self._run,
                epoch=self._epoch,
            )
            made.append((manifest, self._signer.sign(manifest), state))
        self._given = arrays
        return made

    def _round(self, arrays: Mapping[str, Array], precision: Precision, yield_cpu: YieldHook) -> Mapping[str, Array]:
        """Rounds what has changed; an array that is the same object as before, and read-only, has not."""
        before, given = self._rounded.get(precision, {}), self._given
        same = {n for n, each in arrays.items() if n in before and given[n] is each and not each.flags.writeable}
        changed = quantize({name: each for name, each in arrays.items() if name not in same}, precision, yield_cpu)
        self._rounded[precision] = {name: before[name] if name in same else changed[name] for name in arrays}
        return self._rounded[precision]


class Publisher(StartedAtEntry):
    """Publishes from `start` to `close`. One thread calls `publish`; two threads of its own hash and serve.

    A newer snapshot replaces one that waits. Without its threads, `encode_pending`, `on_message` and `step` do their
    work step by step.

    Args:
        on_change: called by the publisher's threads when its progress changes or it fails.
        run, epoch: signed with each version; see `user_sys.weights.signing`.
    """

    def __init__(
        self,
        channel: TunnelClient,
        signer: Signer,
        config: PublishConfig,
        on_change: Callable[[], None] = lambda: None,
        run: bytes = b"",
        epoch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.governor = Governor(config.governor)
        self.progress = PublisherProgress()
        self.catalog = VersionCatalog(BlobCache(MAX_VERSION_BYTES))
        self._channel, self._on_change, self._clock = channel, on_change, clock
        self._encoder = VersionEncoder(signer, config.precisions, run, epoch)
        self._server = WeightsServer(
            self.catalog.cache,
            lambda name, message, payload: channel.send_weights(cast(WeightsMessage, message), payload),
            self._offer,
            clock,
            self.governor.yield_cpu,
        )
        self._server.add_peer(GATEWAY)
        self._pending: tuple[Mapping[str, Array], int, int] | None = None  # arrays, version, updates
        self._failure: Exception | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._serving = threading.RLock()  # guards the catalog and the server
        self._threads = [
            threading.Thread(target=self._run_thread, args=(loop,), name=name, daemon=True)
            for name, loop in (("weights-encode", self._encode_snapshots), ("weights-serve", self._serve))
        ]

    def start(self) -> None:
        """Begins to encode and to serve."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends after the snapshot that is being encoded. Raises RunError if that exceeds `CLOSE_TIMEOUT_S`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                raise RunError(f"the thread {thread.name} did not end within {CLOSE_TIMEOUT_S:.0f} s")

    def publish(self, arrays: Mapping[str, Array], version: int, updates: int) -> None:
        """Takes ownership of `arrays` and returns at once; the caller must not change them afterwards.

        A read-only array that is the same object as before counts as unchanged, such as frozen parts of a policy.

        Raises:
            NotFinite: an earlier snapshot held NaN or infinity; it was not published.
            WireError: an earlier snapshot cannot be encoded.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._pending = arrays, version, updates
            self._changed.notify_all()

    @property
    def failure(self) -> Exception | None:
        """The error that `publish` would raise."""
        return self._failure

    def encode_pending(self) -> bool:
        """Hashes, signs and offers the snapshot that waits. Returns False if there is none. Raises as `publish`."""
        with self._changed:
            snapshot, self._pending = self._pending, None
        if snapshot is None:
            return False
        with span("encode"), self.governor.push():
            made = self._encoder.encode(*snapshot, self.governor.yield_cpu)
            with self._serving:
                for version in made:
                    self.catalog.add_tensors(*version)
                kept = [id for number in self.catalog.numbers()[-KEPT_VERSIONS:] for id in self._ids(number)]
                self.catalog.retain(kept, self._server.fetching(), recent=0, extra=self._server.needed_digests())
                self._server.offer_to_all()
        with self._changed:
            self.progress.published += 1
            self.progress.next_allowed_s = self._clock() + self.governor.pause_after_push_s()
            self.progress.ready_version = snapshot[1]
        self._on_change()
        return True

    def step(self) -> None:
        """Sends an offer if one is pending and the gateway is responsive."""
        with self._serving:
            self._server.step()

    def on_message(self, envelope: Envelope) -> None:
        """Handles a message of the gateway."""
        with self._serving:
            self._server.on_peer_message(GATEWAY)
            match envelope.message:
                case WeightsOfferRequest():
                    self._server.add_peer(GATEWAY)
                case WeightsRequest() as request:
                    with self.governor.push():
                        self._server.on_request(GATEWAY, request)
        match envelope.message:
            case WeightsReceived(version=version):
                with self._changed:
                    self.progress.stored_version = max(self.progress.stored_version, version)
                self._on_change()
            case WeightsProgress(oldest=oldest, pinned=pinned):
                with self._changed:
                    self.progress.oldest_in_use, self.progress.pinned_version = oldest, pinned
                self._on_change()

    def _ids(self, number: int) -> list[bytes]:
        return [each.id for each in self.catalog.of_number(number)]

    def _offer(self) -> WeightsOffer | None:
        newest = max(self.catalog.numbers(), default=NO_VERSION)
        return build_offer(self.catalog.of_number(newest), self.catalog.cache, self._encoder.public_key)

    def _run_thread(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # of any type: the learner's next call raises it
            _log.error("weights.publish_failed: %s", error)
            with self._changed:
                self._failure = error
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
            self.step()
