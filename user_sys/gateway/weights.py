"""The weights of one learner on their way to the robots: fetched once, stored on disk, sent at each robot's own rate.

The gateway computes no weights and applies none: it handles patches by their ids. Each robot requests the blocks that
it lacks, so a slow robot delays no other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from user_sys.errors import TunnelError, WireError
from user_sys.gateway.announcer import Announcer, RunPin, SendMessage
from user_sys.messages import (
    NO_VERSION,
    PatchInfo,
    Precision,
    SignedRecord,
    WeightsApplied,
    WeightsBlocks,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
    decode_record,
)
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.weights.distribution import (
    ActiveDownloads,
    DownloadTargets,
    is_corrupt,
    read_blocks,
)
from user_sys.weights.fetcher import STALL_TIMEOUT_S, PatchFetcher
from user_sys.weights.patches import Patch, VersionIndex, cheapest_path, find_table, reachable_versions, thin_versions
from user_sys.weights.version_store import VersionStore

logger = logging.getLogger(__name__)

FLUSH_DELAY_S = 0.5  # after the last version, and the least time between two writes
FLUSH_DEADLINE_S = 5.0  # after the first unwritten version, while new ones arrive
FLUSH_BYTES = 8 << 20  # this much is written as soon as the last write allows
FLUSH_RETRY_S = 5.0  # after a failed write
WEIGHTS_STOP_TIMEOUT_S = 30.0
PRUNE_INTERVAL_S = 0.5
INBOX_POLL_S = 0.25
MAX_VERSIONS_BEHIND = 32  # deltas from older versions are dropped
MAX_INBOX = 4096

Manifests = dict[Precision, tuple[WeightsManifest, SignedRecord]]


class FlushScheduler:
    """Decides when received versions are written to disk. One thread calls it, except `invalidated`.

    Attributes:
        is_pending: some data is not on disk.
        pending_bytes: received and not written.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_pending, self.pending_bytes = False, 0
        self._clock = clock
        self._first_s = self._last_s = self._earliest_s = 0.0

    def received(self, size_bytes: int) -> None:
        self._last_s = self._clock()
        self._first_s = self._first_s if self.is_pending else self._last_s
        self.pending_bytes += size_bytes
        self.is_pending = True

    def invalidated(self) -> None:
        """Data on disk is damaged and must be written again."""
        self.is_pending = True

    def flush_started(self) -> None:
        self.is_pending, self.pending_bytes = False, 0

    def flush_finished(self) -> None:
        self._earliest_s = self._clock() + FLUSH_DELAY_S

    def flush_failed(self) -> None:
        self.is_pending, self._earliest_s = True, self._clock() + FLUSH_RETRY_S

    def due_s(self, idle_s: float) -> float:
        """Seconds until the next write; `idle_s` if nothing is pending."""
        if not self.is_pending:
            return idle_s
        soon_s = min(self._last_s + FLUSH_DELAY_S, self._first_s + FLUSH_DEADLINE_S)
        at_s = self._earliest_s if self.pending_bytes >= FLUSH_BYTES else max(self._earliest_s, soon_s)
        return at_s - self._clock()


class LearnerConnection:
    """Sends messages to the learner while it is connected."""

    def __init__(self, send: SendMessage) -> None:
        self.name = ""
        self._send = send
        self._last_progress: WeightsProgress | None = None

    def on_opened(self, name: str) -> None:
        self.name, self._last_progress = name, None

    def on_closed(self, name: str) -> None:
        self.name = "" if name == self.name else self.name

    def request_offer(self) -> None:
        self._send(self.name, WeightsOfferRequest(), None)

    def request_blocks(self, patch: bytes, first: int, count: int) -> bool:
        request = WeightsRequest(parcel=patch, first=first, count=count)
        return bool(self.name) and self._send(self.name, request, None)

    def send_progress(self, progress: WeightsProgress) -> None:
        """Sends the progress of the robots if it has changed."""
        if self.name and progress != self._last_progress and self._send(self.name, progress, None):
            self._last_progress = progress

    def confirm(self, version: int) -> None:
        """Reports that `version` is on disk."""
        if self.name:
            self._send(self.name, WeightsReceived(version=version), None)


class PatchDownload:
    """Fetches the patches of the learner's newest offer.

    Patches that lead the robots from the stored versions to the new one come first. Patches that late joiners need use
    the remaining bandwidth and are fetched to their end: newer ones might never complete.

    Attributes:
        fetcher: requests the blocks.
        path_ids: the patches that lead to the fetched version, stored or not.
    """

    def __init__(self, index: VersionIndex, learner: LearnerConnection, clock: Callable[[], float]) -> None:
        self.fetcher = PatchFetcher(learner.request_blocks, clock)
        self.path_ids: set[bytes] = set()
        self._index, self._learner = index, learner
        self._offer: tuple[WeightsOffer, Manifests] | None = None
        self._late_joiner_ids: set[bytes] = set()  # of patches in transfer

    @property
    def awaited(self) -> list[PatchInfo]:
        """The patches in transfer that lead robots to a newer version."""
        return [info for info in self.fetcher.targets if info.id not in self._late_joiner_ids]

    def set_offer(self, offer: WeightsOffer, manifests: Manifests) -> None:
        self._offer = offer, manifests

    def clear_offer(self) -> None:
        self._offer = None

    def on_blocks(self, blocks: WeightsBlocks, payload: Payload) -> None:
        self.fetcher.receive_blocks(blocks.parcel, blocks.first, memoryview(payload))
        if self.fetcher.is_unrecoverable(blocks.parcel):
            logger.error("weights.patch_damaged peer=%s: every transfer of a patch is damaged", self._learner.name)
            self.on_gone(blocks.parcel)

    def on_gone(self, patch: bytes) -> None:
        """The learner does not have an offered patch. Other patches may lead to the version."""
        was_awaited = any(info.id == patch for info in self.awaited)
        self.fetcher.remove_patch(patch)
        if self._offer is not None:
            offer, manifests = self._offer
            remaining = tuple(info for info in offer.parcels if info.id != patch)
            self._offer = replace(offer, parcels=remaining), manifests
            self.select_patches(was_awaited)

    def select_patches(self, must_switch: bool = False) -> None:
        """Switches to the newest offer if its patches arrive before those in transfer.

        Args:
            must_switch: the patches in transfer no longer lead to their version.
        """
        if self._offer is None:
            return
        offer, manifests = self._offer
        for_robots, for_late_joiners = self._paths(offer, manifests)
        stored, awaited = self._index.patches, self.awaited
        needed = [info for patch, info in for_robots.items() if patch not in stored]
        extra = [info for patch, info in for_late_joiners.items() if patch not in stored and patch not in for_robots]
        bytes_after_switch = self._missing_bytes(needed) + self.fetcher.wasted_bytes(awaited, needed)
        if awaited and not must_switch and self._missing_bytes(awaited) <= bytes_after_switch:
            return
        self.path_ids = for_robots.keys() | for_late_joiners.keys()
        if extra:
            extra = [info for info in self.fetcher.targets if info.id in self._late_joiner_ids] or extra
        self._late_joiner_ids = {info.id for info in extra} - {info.id for info in needed}
        targets = [*needed, *(info for info in extra if info.id in self._late_joiner_ids)]
        try:
            self.fetcher.set_targets(targets, {info.id for info in offer.parcels})
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", self._learner.name, error)
            self._offer = None

    def _missing_bytes(self, infos: list[PatchInfo]) -> int:
        return sum(map(self.fetcher.missing_bytes, infos))

    def _paths(
        self, offer: WeightsOffer, manifests: Manifests
    ) -> tuple[dict[bytes, PatchInfo], dict[bytes, PatchInfo]]:
        """The patches that lead robots with stored versions to the offered one, and those for late joiners."""
        stored = self._index.patch_infos()
        for_robots, for_late_joiners = dict[bytes, PatchInfo](), dict[bytes, PatchInfo]()
        for precision, (manifest, _) in manifests.items():
            if not manifest.has_tensors and (table := find_table(offer.parcels, manifest)) is not None:
                for_robots[table.id] = table
            reachable = reachable_versions(stored, precision)
            known = [m for (of, _), (m, _) in self._index.manifests.items() if of == precision]
            held = {m.version: m.digest for m in known if m.version in reachable and m.life == manifest.life}
            for patches, bases in ((for_robots, held), (for_late_joiners, {})):
                path = cheapest_path([*stored, *offer.parcels], precision, manifest.version, bases)
                patches |= {info.id: info for info in (path.patches if path else ())}
        return for_robots, for_late_joiners

    def pop_completed(self) -> list[Patch]:
        """The patches that are complete; removes them from the fetcher."""
        completed = [info for info in self.fetcher.targets if not self.fetcher.missing_bytes(info)]
        if not completed:
            return []
        patches = [Patch(info, self.fetcher.payload(info).toreadonly()) for info in completed]
        self.fetcher.drop(completed)
        return patches


class PatchRetention:
    """Decides which patches stay in memory and on disk, and writes them to the version store.

    Args:
        kept: how many versions stay on disk; recent ones lie close together, old ones far apart.
    """

    def __init__(self, store: VersionStore, index: VersionIndex, kept: int, clock: Callable[[], float]) -> None:
        self.downloads, self.targets = ActiveDownloads(kept, clock), DownloadTargets(kept, clock)
        self.flush = FlushScheduler(clock)
        self._store, self._index, self._kept, self._clock = store, index, kept, clock
        self._stored_versions = set(index.complete_versions())  # a version may be replaced before it is written
        self._read_ids = set(index.patches)  # patches in mapped files, which may change on disk
        self._next_prune_s = 0.0

    def begin_run(self) -> None:
        self._stored_versions = set()
        self.targets = DownloadTargets(self._kept, self._clock)

    def add(self, patches: list[Patch]) -> None:
        self._index.patches |= {patch.info.id: patch for patch in patches}
        self.downloads.add_offered([patch.info for patch in patches])
        self.flush.received(sum(patch.info.size_bytes for patch in patches))

    def is_corrupt(self, request: WeightsRequest) -> bool:
        """Whether the requested blocks have changed on disk since they were read."""
        return request.parcel in self._read_ids and is_corrupt(self._index, request)

    def drop_corrupt(self, patch: bytes) -> bool:
        """Drops a patch whose file has changed. Returns False if it was dropped before."""
        if (dropped := self._index.patches.pop(patch, None)) is None:
            return False
        logger.error("weights.damaged version=%d: its file has changed since it was read", dropped.info.version)
        self._read_ids.discard(patch)
        self._store.mark_corrupt(patch)
        self.flush.invalidated()
        return True

    @property
    def is_prune_due(self) -> bool:
        return self._clock() >= self._next_prune_s

    def prune(self, in_use: set[int], path_ids: set[bytes]) -> None:
        """Drops patches that no robot needs any more.

        Args:
            in_use: versions that stay in any case.
            path_ids: patches that stay in any case.
        """
        self._index.retain(*self._needed(in_use), self.downloads.pinned_ids() | path_ids | self.targets.pinned_ids())
        self._next_prune_s = self._clock() + PRUNE_INTERVAL_S

    def _needed(self, in_use: set[int]) -> tuple[set[int], int]:
        """The versions that stay, and the oldest version from which deltas stay."""
        versions = self._index.complete_versions()
        newest = max(versions, default=NO_VERSION)
        candidates = [version for version in versions if version in self._stored_versions or version == newest]
        kept = {*thin_versions(candidates, self._kept), *in_use, *self.targets.versions()}
        return kept, newest - MAX_VERSIONS_BEHIND

    def snapshot(self, in_use: set[int]) -> VersionIndex:
        """The versions and patches to write. Patches that no robot has requested yet are left out."""
        snapshot = VersionIndex(dict(self._index.manifests), dict(self._index.patches))
        snapshot.retain(*self._needed(in_use), self.downloads.requested_ids())
        self.flush.flush_started()
        return snapshot

    def save(self, snapshot: VersionIndex, signer: bytes) -> bool:
        """Writes a snapshot. Returns False if the disk failed: a restarted gateway then has an older version."""
        try:
            self._store.save(snapshot, signer)
        except OSError as error:
            newest = max(snapshot.complete_versions(), default=NO_VERSION)
            logger.error("weights.write_failed version=%d: %s", newest, error)
            self.flush.flush_failed()
            return False
        self._stored_versions = set(snapshot.complete_versions())
        self.flush.flush_finished()
        return True


@dataclass(frozen=True)
class _LearnerMessage:
    """A message of the learner; None for a new connection."""

    message: WeightsOffer | WeightsBlocks | WeightsGone | None
    payload: Payload | None = None


class WeightsDistributor:
    """Fetches, stores and distributes the weights of one learner, in a thread.

    Any thread may call its public methods. They do not block, except `close`; `step` and its parts are for the thread
    or for a simulation without one.

    Args:
        send: queues a message for a peer, see `TunnelServer.send`.
        kept: how many versions stay on disk, so that a person can return to one; see `PatchRetention`.
    """

    def __init__(
        self, store: VersionStore, send: SendMessage, kept: int = 8, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Reads the versions on disk. Raises OSError."""
        self.failure: BaseException | None = None
        self.index = store.load()
        self._pin = RunPin(store, next((m.run for m, _ in self.index.manifests.values()), b""))
        self._learner = LearnerConnection(send)
        self.download = PatchDownload(self.index, self._learner, clock)
        self.retention = PatchRetention(store, self.index, max(1, kept), clock)
        self.announcer = Announcer(self.index, self._pin, send, self._send_blocks, clock)
        self._send = send
        self._corrupt_dropped = False
        self._inbox: queue.Queue[_LearnerMessage] = queue.Queue(MAX_INBOX)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    @property
    def version(self) -> int:
        """The version that robots should use; -1 before the first."""
        return self.announcer.target

    @property
    def has_learner(self) -> bool:
        """Whether the learner is connected."""
        return bool(self._learner.name)

    def scalars(self) -> dict[str, float]:
        """Metrics; takes a sample of every robot's staleness."""
        with self._lock:
            return {
                "weights_version": float(self.version),
                "weights_damaged": float(self.download.fetcher.damaged_blocks),
                **self.announcer.sampled_scalars(),
            }

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Writes the newest version and ends. Raises TunnelError if the disk takes over `WEIGHTS_STOP_TIMEOUT_S`."""
        self._stopping.set()
        self._thread.join(WEIGHTS_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the weights thread did not end within {WEIGHTS_STOP_TIMEOUT_S} s: the disk is stuck")

    # Events of the tunnel

    def on_learner_opened(self, name: str) -> None:
        with self._lock:
            self._learner.on_opened(name)
        self._put(_LearnerMessage(None))
        self._learner.request_offer()
        with self._lock:
            self._send_progress()  # the last report may be lost with the earlier connection

    def on_robot_opened(self, name: str) -> None:
        with self._lock:
            self.announcer.subscribers.add(name, self.announcer.announcement())

    def on_peer_closed(self, name: str) -> None:
        with self._lock:
            self.announcer.subscribers.remove(name)
            self.announcer.staleness.remove(name)
            self._learner.on_closed(name)
            self._send_progress()

    def on_message(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        match message:
            case WeightsOffer() | WeightsBlocks() | WeightsGone():
                self._put(_LearnerMessage(message, payload))
            case WeightsRequest():
                with self._lock:
                    self.announcer.subscribers.on_message(name)
                self._send_blocks(name, message)
                with self._lock:
                    self.announcer.notify_if_pending(name)
            case WeightsApplied():
                with self._lock:
                    self.announcer.subscribers.on_message(name, message)
                    self.announcer.staleness.set_version(name, message.version)
                    self._send_progress()
                with self._lock:
                    self.announcer.notify_if_pending(name)

    def has_patch(self, patch: bytes) -> bool:
        return patch in self.index.patches

    def poll_pin(self) -> None:
        """Applies a pin that a person has set since the last poll."""
        newer = self._pin.read_newer()
        if newer is None:
            return
        with self._lock:
            self._pin.signed, self._pin.pinned = newer
            self._announce()

    def _announce(self) -> None:
        if self.announcer.announce():
            self._send_progress()

    def _send_progress(self) -> None:
        self._learner.send_progress(self.announcer.progress())

    def _send_blocks(self, name: str, request: WeightsRequest) -> None:
        with self._lock:
            patch, retention = self.index.patches.get(request.parcel), self.retention
            if patch is None:
                retention.targets.on_missing(name, self.version, partial(self.announcer.notify, name))
                self._send(name, WeightsGone(parcel=request.parcel), None)
                return
            retention.targets.on_request(name, patch.info, self.version)
            retention.downloads.on_request(name, request, patch.info)
        if self.retention.is_corrupt(request):
            with self._lock:
                if self.retention.drop_corrupt(request.parcel):
                    self._announce()
                    self._corrupt_dropped = True
        for reply, content in read_blocks(self.index, request):
            self._send(name, reply, content)

    def _put(self, item: _LearnerMessage) -> None:
        try:
            self._inbox.put_nowait(item)
        except queue.Full:  # blocks are requested again, and an offer comes with the next version
            logger.warning("weights.inbox_full capacity=%d", MAX_INBOX)

    # The thread

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                wait_s = self.step(wait_s)
            if self.retention.flush.is_pending:
                self.save()
        except Exception as error:
            logger.exception("weights.failed")
            self.failure = error

    def step(self, wait_s: float) -> float:
        """Processes the next message, for which it waits at most `wait_s`. Returns how long the next step may wait."""
        self.process_message(wait_s)
        self.collect_patches()
        with self._lock:
            self.announcer.notify_overdue()
        flush = self.retention.flush
        if flush.due_s(STALL_TIMEOUT_S) <= 0:
            self.save()
        return max(0.0, min(self.download.fetcher.send_requests(), flush.due_s(STALL_TIMEOUT_S)))

    @property
    def has_messages(self) -> bool:
        """Whether messages of the learner wait for `process_message`."""
        return not self._inbox.empty()

    def process_message(self, wait_s: float) -> None:
        """Processes the next message of the learner, if one arrives within `wait_s`."""
        try:
            item = self._inbox.get(timeout=min(wait_s, INBOX_POLL_S))
        except queue.Empty:
            return
        match item.message:
            case None:
                self.download.fetcher.reset_requests()
            case WeightsOffer() as offer:
                self._on_offer(offer)
            case WeightsBlocks() as blocks if item.payload is not None:
                self.download.on_blocks(blocks, item.payload)
            case WeightsGone(parcel=patch):
                self.download.on_gone(patch)

    def _on_offer(self, offer: WeightsOffer) -> None:
        try:
            manifests = [(decode_record(signed.body, WeightsManifest), signed) for signed in offer.manifests]
            self.download.set_offer(offer, {manifest.form: (manifest, signed) for manifest, signed in manifests})
            with self._lock:
                self._pin.signer = offer.signer
                self._check_run([manifest for manifest, _ in manifests])
                self.index.manifests |= {(m.form, m.version): (m, signed) for m, signed in manifests}
                self._announce()
            self.download.select_patches()
            if not self.download.awaited and not self.retention.flush.is_pending:
                self._confirm(max((manifest.version for manifest, _ in manifests), default=NO_VERSION))
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", self._learner.name, error)
            self.download.clear_offer()

    def _check_run(self, offered: list[WeightsManifest]) -> None:
        """Drops the versions of an earlier run: a relay may outlive many runs.

        A learner that has lost its newest checkpoints begins the version numbers of its run again.
        """
        if not offered:
            return
        first = offered[0]
        stored = [m for (precision, _), (m, _) in self.index.manifests.items() if precision == first.form]
        restarted = any(m.life < first.life and m.version >= first.version and m.digest != first.digest for m in stored)
        if first.run == self._pin.run and not restarted:
            return
        if self.index.manifests:
            logger.warning("weights.another_run version=%d: the stored versions are dropped", first.version)
        self.index.manifests.clear()
        self.index.patches.clear()
        self.retention.begin_run()
        self.download.fetcher.set_targets([])
        self._pin.begin_run(first.run)

    def collect_patches(self) -> None:
        """Takes over complete patches, and announces a version as soon as its patches are complete."""
        if self._corrupt_dropped:
            self._corrupt_dropped = False
            self.download.select_patches()  # the learner may still have the dropped patch
        patches = self.download.pop_completed()
        if not patches:
            return
        with self._lock:
            self.retention.add(patches)
            self._announce()
            if self.retention.is_prune_due:
                self._prune()
        if not self.download.awaited:
            self.download.select_patches()

    def _in_use(self) -> set[int]:
        return {self.version, self._pin.version}

    def _prune(self) -> None:
        self.poll_pin()  # before the pinned version is dropped
        with self._lock:
            self.retention.prune(self._in_use(), self.download.path_ids)

    def save(self) -> None:
        """Writes the versions to disk, and confirms the newest to the learner."""
        self._prune()
        with self._lock:
            snapshot = self.retention.snapshot(self._in_use())
        if self.retention.save(snapshot, self._pin.signer):
            self._confirm(max(snapshot.complete_versions(), default=NO_VERSION))

    def _confirm(self, version: int) -> None:
        """Confirms a stored version to the learner, also repeatedly: an earlier confirmation may be lost."""
        if version in self.index.complete_versions():
            self._learner.confirm(version)
