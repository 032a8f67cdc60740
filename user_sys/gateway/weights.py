"""The weights of each learner on their way to its robots: fetched once, stored on disk, sent at each robot's own rate.

The gateway applies no weights: it is a cache of blobs with the learner's signed manifests. A thread handles all events,
because the differences that robots request take time to compute; each is computed once for all robots.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hal.durable import replace_durably
from user_sys.errors import WireError
from user_sys.messages import (
    NO_VERSION,
    PinnedVersion,
    SignedRecord,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
    decode_record,
)
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.threads import ThreadedService
from user_sys.tunnel.flow_control import CoalescingQueue
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer
from user_sys.weights.catalog import (
    BlobCache,
    BlobCacheFull,
    SendMessage,
    StoredVersion,
    WeightsServer,
    build_offer,
    thin_versions,
)
from user_sys.weights.fetcher import STALL_TIMEOUT_S, Candidate, VersionFetcher
from user_sys.weights.signing import verifier_from_public_key
from user_sys.weights.version_store import VersionStore, newest_version

logger = logging.getLogger(__name__)

FLUSH_DELAY_S = 0.5  # after the last version, and the least time between two writes
FLUSH_DEADLINE_S = 5.0  # after the first unwritten version, while new ones arrive
FLUSH_RETRY_S = 5.0  # after a failed write
WEIGHTS_STOP_TIMEOUT_S = 30.0
PRUNE_INTERVAL_S = 0.5
INBOX_POLL_S = 0.25
MAX_RECENT_VERSIONS = 32  # in memory: bases for robots that are so many versions behind
MAX_INBOX, MAX_INBOX_BYTES = 4096, 64 << 20  # messages and payloads; the fetcher requests 8 MiB at a time
_Event = tuple[Callable[[], None], int]  # of another thread, with the bytes of its payload
_NO_PIN = PinnedVersion(serial=-1, version=NO_VERSION, by="", reason="", given_unix_ns=0)

EMBODIMENT_FILE = "embodiment"  # in a learner's folder: the embodiment of its robots
MAX_LEARNERS = 32


class SavedVersions:
    """The versions on disk: which ones stay, and when the next ones are written.

    Attributes:
        is_pending: a version waits to be written.
    """

    def __init__(self, store: VersionStore, kept: int, numbers: Sequence[int], clock: Callable[[], float]) -> None:
        """`kept`: see `WeightsDistributor`; `numbers` are on disk."""
        self.is_pending = False
        self._store, self._kept, self._numbers, self._clock = store, max(1, kept), set(numbers), clock
        self._first_s = self._last_s = self._earliest_s = 0.0

    @property
    def kept_by_order(self) -> set[int]:
        """The versions that `VersionStore.keep` asks for."""
        return self._store.kept()

    def on_received(self) -> None:
        self._last_s = self._clock()
        self._first_s = self._first_s if self.is_pending else self._last_s
        self.is_pending = True

    def kept_numbers(self, numbers: Sequence[int], newest: int) -> list[int]:
        """The versions among `numbers`, ascending, that stay on disk or are written next; the greatest first."""
        stored = [number for number in numbers if number in self._numbers or number == newest]
        return thin_versions(stored, self._kept)[::-1]

    def write(self, versions: Sequence[StoredVersion], cache: BlobCache, signer: bytes) -> None:
        """Replaces the versions on disk. After an error, which is logged, `due_s` repeats it."""
        try:
            self._store.save(versions, cache, signer)
            self._numbers, self.is_pending = {version.manifest.version for version in versions}, False
        except OSError as error:
            newest = max((version.manifest.version for version in versions), default=NO_VERSION)
            logger.error("weights.write_failed version=%d: %s", newest, error)
        self._earliest_s = self._clock() + (FLUSH_RETRY_S if self.is_pending else FLUSH_DELAY_S)

    def has(self, version: int) -> bool:
        """Whether this version and all that were received are on disk."""
        return version in self._numbers and not self.is_pending

    def due_s(self) -> float:
        """Seconds until the next write."""
        if not self.is_pending:
            return STALL_TIMEOUT_S
        soon_s = min(self._last_s + FLUSH_DELAY_S, self._first_s + FLUSH_DEADLINE_S)
        return max(self._earliest_s, soon_s) - self._clock()


class RunPin:
    """The version that a person has pinned, and the learner's key that signs it."""

    def __init__(self, store: VersionStore) -> None:
        self._store = store
        self._last_error = ""
        self._reported: PinnedVersion | None = None
        self.signer = store.learner_public_key()
        self.signed, self.pinned = self._read()

    def version(self, run: bytes) -> int:
        """The pinned version of this run, or `NO_VERSION`."""
        return self.pinned.version if self.pinned.run == run else NO_VERSION

    def report_ignored(self) -> None:
        """Logs once that the pinned version is not stored."""
        if self.pinned != self._reported:
            self._reported = self.pinned
            logger.warning("weights.pin_ignored version=%d: it is not stored", self.pinned.version)

    def poll(self) -> bool:
        """Reads a newer pin from the store. Returns whether there is one."""
        signed, pinned = self._read()
        if pinned.serial <= self.pinned.serial:
            return False
        logger.warning("weights.pinned version=%d by=%r: %s", pinned.version, pinned.by, pinned.reason)
        self.signed, self.pinned = signed, pinned
        return True

    def begin_run(self, run: bytes, signer: bytes) -> None:
        """Removes the pin of another run."""
        self.signer = signer
        self.signed, self.pinned = self._read()
        if self.signed is not None and self.pinned.run != run:
            self.signed, self.pinned = None, _NO_PIN
            try:
                self._store.clear_pin()
            except OSError as error:
                logger.error("weights.pin_not_removed: %s", error)

    def _read(self) -> tuple[SignedRecord | None, PinnedVersion]:
        """Reads the pin from the store. A pin that another key has signed is ignored: robots would refuse it."""
        try:
            signed = self._store.read_pin() if self.signer else None
            if signed is None:
                return None, _NO_PIN
            return signed, verifier_from_public_key(self.signer).verify(signed, PinnedVersion)
        except (OSError, WireError) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.warning("weights.pin_unreadable: %s", error)
            return None, _NO_PIN


class LearnerLink:
    """Sends messages to the learner, if it is connected.

    Attributes:
        name: of the connected learner, or "".
    """

    def __init__(self, send: SendMessage) -> None:
        self.name = ""
        self._send = send
        self._last_progress: WeightsProgress | None = None
        self._unconfirmed = NO_VERSION  # the stored version that the learner does not know of yet

    def open(self, name: str) -> None:
        self.name, self._last_progress = name, None  # the last report may be lost with the earlier connection
        self._unconfirmed = NO_VERSION  # it offers its version again

    def close(self, name: str) -> None:
        self.name = "" if name == self.name else self.name

    def send(self, message: AnyMessage) -> bool:
        return bool(self.name) and self._send(self.name, message, None)

    def confirm(self, version: int) -> None:
        """Confirms that this version is stored; `send_state` tries again."""
        self._unconfirmed = version
        self._send_confirmation()

    def send_state(self, progress: WeightsProgress) -> None:
        """Sends what the learner does not know yet; the next call tries again."""
        self._send_confirmation()
        if progress != self._last_progress and self.send(progress):
            self._last_progress = progress

    def _send_confirmation(self) -> None:
        if self._unconfirmed != NO_VERSION and self.send(WeightsReceived(version=self._unconfirmed)):
            self._unconfirmed = NO_VERSION


class WeightsDistributor(ThreadedService):
    """Fetches, stores and distributes the weights of one learner, in a thread.

    Any thread may call its public methods. They do not block, except `close`; `step` is for the thread or for a
    simulation without one.

    Args:
        send: queues a message for a peer, see `TunnelServer.send`.
        kept: how many versions stay on disk, so that a person can return to one; see `thin_versions`.
        is_relay: it tells robots that there is no version only after an offer has said so.

    Attributes:
        version: the version that robots should use; -1 before the first.
        acting_versions: by robot, of those that use one.
    """

    def __init__(
        self,
        store: VersionStore,
        send: SendMessage,
        kept: int = 8,
        clock: Callable[[], float] = time.monotonic,
        cache: BlobCache | None = None,
        *,
        is_relay: bool = False,
    ) -> None:
        """Reads the versions on disk. Raises OSError."""
        super().__init__("weights", WEIGHTS_STOP_TIMEOUT_S)
        self.catalog = store.load(cache)
        self._learner, self._clock = LearnerLink(send), clock
        self._saved = SavedVersions(store, kept, self.catalog.numbers(), clock)
        newest = newest_version(self.catalog)
        self._run = b"" if newest is None else newest.manifest.run
        self._pin = RunPin(store)
        self._fetcher = VersionFetcher(self.catalog.cache, self._learner.send, clock=clock, make_room=self._prune)
        if newest is not None:
            self._fetcher.hold(newest)
        self._server = WeightsServer(self.catalog.cache, send, self._offer, clock)
        self.acting_versions: dict[str, int] = {}
        self._next_prune_s = 0.0
        self._announced: object = None
        self._is_without_version = not is_relay  # unless one is on disk
        self.version = self._select()
        self._inbox: CoalescingQueue[_Event] = CoalescingQueue(sys.maxsize, MAX_INBOX_BYTES, lambda event: event[1])

    def scalars(self) -> dict[str, float]:
        """Metrics."""
        return {"weights_version": float(self.version), "weights_damaged": float(self._fetcher.damaged)}

    @property
    def learner(self) -> str:
        """The name of the connected learner, or ""."""
        return self._learner.name

    @property
    def has_events(self) -> bool:
        """Whether events wait for `step`."""
        return len(self._inbox) > 0

    def has_version(self, id: bytes) -> bool:
        return id in self.catalog.versions

    def is_fetching(self, id: bytes) -> bool:
        return id in {candidate.id for candidate in self._fetcher.target}

    # Events of the tunnel

    def on_learner_opened(self, name: str) -> None:
        self.run(partial(self._open_learner, name))

    def on_robot_opened(self, name: str) -> None:
        self.run(partial(self._server.add_peer, name))

    def on_peer_closed(self, name: str) -> None:
        self.run(partial(self._close_peer, name))

    def on_message(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        event = partial(self._handle, name, message, payload), len(payload or b"")
        if isinstance(message, WeightsOffer | WeightsApplied):  # no peer repeats them: only a newer one replaces one
            self._inbox.put(event, (name, type(message)))
        elif len(self._inbox) >= MAX_INBOX or not self._inbox.put(event):
            # after a while without a reply, requests are repeated
            logger.warning("weights.inbox_full messages=%d bytes=%d", MAX_INBOX, MAX_INBOX_BYTES)

    def run(self, task: Callable[[], None]) -> None:
        """Runs `task` in the thread, after the earlier events."""
        self._inbox.put((task, 0))

    def poll_pin(self) -> None:
        """Applies a pin that a person has set since the last poll."""
        self.run(self._poll_pin)

    # The thread

    def _work(self) -> None:
        """Serves until `close`, and then writes the newest version."""
        wait_s = 0.0
        while not self._stopping.is_set():
            wait_s = self.step(wait_s)
        if self._saved.is_pending:
            self._save()

    def step(self, wait_s: float) -> float:
        """Handles waiting events, the first within `wait_s`. Returns how long the next step may wait."""
        if (event := self._inbox.get(min(wait_s, INBOX_POLL_S))) is not None:
            event[0]()
        while completed := self._fetcher.pop_completed():
            for version in completed:
                self.catalog.add(version)
            self._on_completed()
        self._server.step()
        if self._saved.due_s() <= 0:
            self._save()
        pinned = self.version if self.version == self._pin.version(self._run) else NO_VERSION
        oldest = min(self.acting_versions.values(), default=NO_VERSION)
        self._learner.send_state(WeightsProgress(oldest=oldest, pinned=pinned))
        request_s = self._fetcher.step()
        return 0.0 if self.has_events else max(0.0, min(request_s, self._saved.due_s()))

    def _handle(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        match message:
            case WeightsOffer() as offer:
                self._on_offer(offer)
            case WeightsBlobs() if payload is not None:
                self._fetcher.on_blobs(message, memoryview(payload))
            case WeightsGone():
                self._fetcher.on_gone(message)
            case WeightsRequest():
                self._server.on_peer_message(name)
                self._server.on_request(name, message)
            case WeightsApplied():
                self._on_applied(name, message.version)
                self._server.on_peer_message(name)

    def _open_learner(self, name: str) -> None:
        self._learner.open(name)
        self._fetcher.reset_requests()
        self._learner.send(WeightsOfferRequest())

    def _on_applied(self, robot: str, version: int) -> None:
        if version == NO_VERSION:  # as while a person drives it
            self.acting_versions.pop(robot, None)
        else:
            self.acting_versions[robot] = version

    def _close_peer(self, name: str) -> None:
        self._server.remove_peer(name)
        self.acting_versions.pop(name, None)
        self._learner.close(name)

    def _on_offer(self, offer: WeightsOffer) -> None:
        try:
            self._is_without_version = not offer.manifests
            if self._is_without_version:
                return self._server.offer_to_all()
            candidates = [Candidate.of(decode_record(each.body, WeightsManifest), each) for each in offer.manifests]
            if len({(c.manifest.run, c.manifest.version) for c in candidates}) != 1:
                raise WireError("an offer must have the manifests of one version")
            self._pin.signer = offer.signer
            if self._is_complete(candidates):
                self._confirm(candidates[0].manifest.version)
            else:
                self._fetcher.set_newest(candidates, offer.tables)
        except (WireError, BlobCacheFull) as error:
            logger.error("weights.refused peer=%s: %s", self._learner.name, error)

    def _is_complete(self, candidates: list[Candidate]) -> bool:
        return all(candidate.id in self.catalog.versions for candidate in candidates)

    def _on_completed(self) -> None:
        """Announces a complete version, and drops versions that it replaces."""
        newest = next(reversed(self.catalog.versions.values())).manifest
        if newest.run != self._run:
            self._run = newest.run
            self._pin.begin_run(newest.run, self._pin.signer)
        # A learner that has lost its newest checkpoints begins the version numbers of its run again.
        pinned = self._pin.version(self._run)
        self.catalog.versions = {
            id: version
            for id, version in self.catalog.versions.items()
            if version.manifest.run == newest.run
            and (
                version.manifest.epoch == newest.epoch
                or version.manifest.version < newest.version
                or version.manifest.version == pinned
            )
        }
        self._saved.on_received()
        self._announce()
        if self._clock() >= self._next_prune_s:
            self._prune()

    def _select(self) -> int:
        """The pinned version if it is complete, otherwise the newest."""
        pinned = self._pin.version(self._run)
        return pinned if pinned in self.catalog.numbers() else self._newest()

    def _newest(self) -> int:
        """The number of the newest version; a pinned one of an earlier epoch may have a greater number."""
        newest = newest_version(self.catalog)
        return NO_VERSION if newest is None else newest.manifest.version

    def _selected(self) -> list[StoredVersion]:
        """The version to use in its precisions. If two epochs have its number, the earlier one stayed as pinned."""
        found = self.catalog.of_number(self.version)
        choose = min if self.version == self._pin.version(self._run) else max
        epoch = choose((version.manifest.epoch for version in found), default=0)
        return [version for version in found if version.manifest.epoch == epoch]

    def _announce(self) -> None:
        """Offers the version to use to all robots if it has changed."""
        self.version = self._select()
        pinned = self._pin.version(self._run)
        if pinned not in (NO_VERSION, self.version):
            self._pin.report_ignored()
        state = [version.id for version in self._selected()], self._pin.pinned.serial
        if state == self._announced:
            return
        self._announced = state
        self._server.offer_to_all()

    def _offer(self) -> WeightsOffer | None:
        """The offer of the version to use, with a pin that names it or that allows the newest again.

        It is empty if there is no version, and None if that is not known.
        """
        if self.version == NO_VERSION:
            return WeightsOffer(manifests=(), signer=b"") if self._is_without_version else None
        pin = self._pin
        is_for_version = pin.pinned.run == self._run and pin.pinned.version in (NO_VERSION, self.version)
        return build_offer(
            self._selected(),
            self.catalog.cache,
            pin.signer,
            pin.signed if is_for_version else None,
        )

    def _ids(self, number: int) -> list[bytes]:
        return [version.id for version in self.catalog.of_number(number)]

    def _poll_pin(self) -> None:
        if self._pin.poll():
            self._announce()

    def _pinned_ids(self) -> list[bytes]:
        """The ids of the version to use, of the newest one, of the pinned one and of those to keep."""
        numbers = {self.version, self._newest(), self._pin.version(self._run), *self._saved.kept_by_order}
        return [id for number in sorted(numbers, reverse=True) for id in self._ids(number)]

    def _kept_ids(self) -> list[bytes]:
        """The ids of the versions that stay on disk, the newest first."""
        numbers = self._saved.kept_numbers(self.catalog.numbers(), self._newest())
        kept = [id for number in numbers for id in self._ids(number)]
        return list(dict.fromkeys([*self._pinned_ids(), *kept]))

    def _prune(self) -> None:
        """Drops versions that no robot needs any more."""
        self._poll_pin()  # before the pinned version is dropped
        extra = self._server.needed_digests() | self._fetcher.needed_digests()
        wanted = [*self._server.fetching(), *self._kept_ids()]
        self.catalog.retain(self._pinned_ids(), wanted, MAX_RECENT_VERSIONS, extra)
        self._next_prune_s = self._clock() + PRUNE_INTERVAL_S

    def _save(self) -> None:
        """Writes the versions to disk, and confirms the newest to the learner."""
        self._prune()
        versions = [self.catalog.versions[id] for id in self._kept_ids()]
        self._saved.write(versions, self.catalog.cache, self._pin.signer)
        self._confirm(self._newest())

    def _confirm(self, version: int) -> None:
        """Confirms a stored version to the learner, also repeatedly: an earlier confirmation may be lost."""
        if self._saved.has(version):
            self._learner.confirm(version)


class WeightsRouter:
    """One `WeightsDistributor` for each learner; it starts when the learner connects, and at later gateway starts.

    A robot without a spec gets the first learner's weights; a robot whose embodiment has no learner gets none, and an
    empty offer; a relay gets all of them. Its public methods never block, except `close`, and any thread may call them.
    """

    def __init__(
        self,
        folder: Path,
        send: SendMessage,
        kept: int,
        robots: Callable[[], list[Peer]],
        *,
        is_relay: bool = False,
    ) -> None:
        """`robots` lists the connected robots; `is_relay` as for `WeightsDistributor`. Raises OSError."""
        self._folder, self._send, self._robots = folder, send, robots
        self._make_distributor, self._is_relay = partial(WeightsDistributor, kept=kept, is_relay=is_relay), is_relay
        self._lock = threading.RLock()
        self._running = False
        self._distributors: dict[str, WeightsDistributor] = {}  # by learner
        self._embodiments: dict[str, str] = {}  # by learner
        self._learner_by_peer: dict[str, str] = {}
        self._relays: set[str] = set()
        self._open(LEARNER)
        for learner_dir in sorted(folder.glob(f"{LEARNER}-*/")):
            self._open(learner_dir.name)

    @property
    def failure(self) -> BaseException | None:
        """The first failure of a distributor, or None."""
        return next((each.failure for each in self._all() if each.failure is not None), None)

    def start(self) -> None:
        with self._lock:
            self._running = True
            for distributor in self._distributors.values():
                distributor.start()

    def close(self) -> None:
        """See `ThreadedService.close`."""
        for distributor in self._all():
            distributor.close()

    def scalars(self) -> dict[str, float]:
        """The metrics of the first learner, and those of the others under ``<learner>/``."""
        with self._lock:
            distributors = dict(self._distributors)
        first = distributors.pop(LEARNER).scalars()
        others = {
            f"{name}/{key}": value for name, each in distributors.items() for key, value in each.scalars().items()
        }
        return first | others

    def distributor(self, learner: str) -> WeightsDistributor:
        """The distributor of a learner. Raises KeyError if the learner was never connected."""
        with self._lock:
            return self._distributors[learner]

    def learners_with_weights(self) -> set[str]:
        """The learners with at least one stored version."""
        with self._lock:
            return {name for name, each in self._distributors.items() if each.version != NO_VERSION}

    def embodiment_of(self, learner: str) -> str:
        """The embodiment of a learner's robots; empty if it is not known."""
        with self._lock:
            return self._embodiments.get(learner, "")

    def learner_of(self, version: bytes) -> str:
        """The learner whose version of this id is being fetched, or ""."""
        with self._lock:
            return next((name for name, each in self._distributors.items() if each.is_fetching(version)), "")

    def poll_pin(self) -> None:
        for distributor in self._all():
            distributor.poll_pin()

    def on_peer_opened(self, peer: Peer) -> None:
        """A learner, a robot or a relay has connected."""
        if peer.role == "learner":
            self.on_learner_opened(peer.name, "" if peer.spec is None else peer.spec.embodiment)
        elif peer.role == "relay":
            with self._lock:
                self._relays.add(peer.name)
                for distributor in self._distributors.values():
                    distributor.on_robot_opened(peer.name)
        else:
            self._assign(peer)

    def on_peer_closed(self, name: str) -> None:
        with self._lock:
            if name in self._relays:
                self._relays.discard(name)
                for distributor in self._distributors.values():
                    distributor.on_peer_closed(name)
            assigned = self._distributors.get(self._learner_by_peer.pop(name, ""))
        if assigned is not None:
            assigned.on_peer_closed(name)

    def on_message(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        with self._lock:
            distributor = self._distributors.get(self._learner_by_peer.get(name, ""))
            if name in self._relays and isinstance(message, WeightsRequest):
                holders = (each for each in self._distributors.values() if each.has_version(message.version))
                distributor = next(holders, None)
        if distributor is None and name in self._relays and isinstance(message, WeightsRequest):
            self._send(name, WeightsGone(version=message.version), None)
        elif distributor is None and not isinstance(message, WeightsApplied):
            logger.info("weights.no_learner peer=%s", name)
        if distributor is not None:
            distributor.on_message(name, message, payload)

    def on_learner_opened(self, name: str, embodiment: str) -> None:
        """A learner has connected, or a relay speaks for it. `embodiment` may be empty."""
        with self._lock:
            if name not in self._distributors and len(self._distributors) >= MAX_LEARNERS:
                logger.error("weights.too_many_learners name=%s: the limit is %d", name, MAX_LEARNERS)
                return
            is_changed = name not in self._distributors or embodiment not in ("", self._embodiments[name])
            distributor = self._distributors.get(name) or self._open(name)
            self._learner_by_peer[name] = name
            if embodiment:
                self._set_embodiment(name, embodiment)
            distributor.on_learner_opened(name)
            for relay in self._relays if is_changed else ():  # now that offers name the embodiment
                distributor.on_robot_opened(relay)
        for robot in self._robots():
            if self._learner_by_peer.get(robot.name) != self._learner_for(robot):
                self._assign(robot)

    def set_pin(self, learner: str, pin: SignedRecord) -> None:
        """Pins a version for the robots of a learner. Raises OSError."""
        VersionStore(learner_folder(self._folder, learner)).set_pin(pin)
        self.poll_pin()

    def _open(self, name: str) -> WeightsDistributor:
        folder = learner_folder(self._folder, name)
        store, send = VersionStore(folder), partial(self._send_for, name)
        distributor = self._distributors[name] = self._make_distributor(store, send)
        file = folder / EMBODIMENT_FILE
        self._embodiments[name] = file.read_text() if file.exists() else ""
        if self._running:
            distributor.start()
        return distributor

    def _send_for(self, learner: str, peer: str, message: AnyMessage, payload: Payload | None) -> bool:
        """Sends a message of a learner's distributor. Offers to relays name the learner and its embodiment."""
        if isinstance(message, WeightsOffer) and peer in self._relays:
            message = replace(message, learner=learner, embodiment=self._embodiments[learner])
        return self._send(peer, message, payload)

    def _set_embodiment(self, name: str, embodiment: str) -> None:
        if self._embodiments[name] == embodiment:
            return
        self._embodiments[name] = embodiment
        self._distributors[name].run(partial(self._write_embodiment, name, embodiment))

    def _write_embodiment(self, name: str, embodiment: str) -> None:
        try:
            replace_durably(learner_folder(self._folder, name) / EMBODIMENT_FILE, embodiment.encode())
        except OSError as error:  # the learner repeats it when it connects again
            logger.error("weights.embodiment_write_failed learner=%s: %s", name, error)

    def _assign(self, peer: Peer) -> None:
        """Assigns a robot to its learner. One behind a relay gets its weights there, but its learner waits for it."""
        with self._lock:
            name, former = self._learner_for(peer), self._learner_by_peer.pop(peer.name, None)
            if name is not None:
                self._learner_by_peer[peer.name] = name
            distributors = dict(self._distributors)
        if former is not None and former != name:
            distributors[former].on_peer_closed(peer.name)
        if name is not None and not peer.via:
            distributors[name].on_robot_opened(peer.name)
        elif not peer.via and not self._is_relay:  # it may explore until its learner connects
            self._send(peer.name, WeightsOffer(manifests=(), signer=b"", greeting=True), None)

    def _learner_for(self, peer: Peer) -> str | None:
        if peer.spec is None:
            return LEARNER
        embodiment = peer.spec.embodiment
        found = next((name for name, each in self._embodiments.items() if each == embodiment), None)
        return LEARNER if found is None and not self._embodiments[LEARNER] else found

    def _all(self) -> Iterator[WeightsDistributor]:
        with self._lock:
            distributors = list(self._distributors.values())
        yield from distributors
