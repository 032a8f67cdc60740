"""When versions of weights that came are written to the disk, which takes time from whatever runs beside it.

The robots of a desk: each is told of a new version as soon as it can hear of it, and no link is filled with news.

Weights on their way from the learner to the robots: fetched once, kept on disk, handed to each at its own pace.

The desk is a receiver that applies nothing, and a server that computes nothing: it knows parcels by their id, and what
they are for. Each robot asks for what it lacks when it has room for it, so a slow one holds up nobody.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from user_sys.errors import TunnelError, WireError
from user_sys.messages import (
    NO_VERSION,
    PatchInfo,
    PinnedVersion,
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
    OfferThrottle,
    PrefetchPlanner,
    StalenessHistogram,
    build_offer,
    is_corrupt,
    read_blocks,
)
from user_sys.weights.fetcher import STALL_TIMEOUT_S, PatchFetcher
from user_sys.weights.patches import Patch, VersionIndex, cheapest_path, find_table, reachable_versions, thin_versions
from user_sys.weights.signing import verifier_from_public_key
from user_sys.weights.version_store import VersionStore

FLUSH_DELAY_S = 0.5  # after the last version, and after the last write at the earliest
FLUSH_DEADLINE_S = 5.0  # while one follows upon the other, so long after the first that is not there
FLUSH_BYTES = 8 << 20  # where so much waits, as soon as the last write allows
FLUSH_RETRY_S = 5.0  # after the disk was full


class FlushScheduler:
    """One thread calls it, but for `invalidated`.

    Attributes:
        is_pending: something is not on the disk.
        pending_bytes: so many, of what came.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_pending, self.pending_bytes = False, 0
        self._clock = clock
        self._since_s = self._last_s = self._earliest_s = 0.0

    def received(self, size_bytes: int) -> None:
        self._last_s = self._clock()
        self._since_s = self._since_s if self.is_pending else self._last_s
        self.pending_bytes += size_bytes
        self.is_pending = True

    def invalidated(self) -> None:
        """What was on the disk is there no more."""
        self.is_pending = True

    def flush_started(self) -> None:
        """What has come so far is being written."""
        self.is_pending, self.pending_bytes = False, 0

    def flush_finished(self) -> None:
        self._earliest_s = self._clock() + FLUSH_DELAY_S

    def flush_failed(self) -> None:
        self.is_pending, self._earliest_s = True, self._clock() + FLUSH_RETRY_S

    def due_s(self, idle_s: float) -> float:
        """In how many seconds it is to be written; `idle_s` where nothing waits."""
        if not self.is_pending:
            return idle_s
        soon_s = min(self._last_s + FLUSH_DELAY_S, self._since_s + FLUSH_DEADLINE_S)
        at_s = self._earliest_s if self.pending_bytes >= FLUSH_BYTES else max(self._earliest_s, soon_s)
        return at_s - self._clock()


@dataclass
class _Subscriber:
    """`last_applied` is what it said when something may be sent ahead to it, with an offer."""

    throttle: OfferThrottle = field(default_factory=OfferThrottle)
    last_applied: WeightsApplied | None = None


@dataclass(frozen=True)
class Announcement:
    """What all robots are to hear of a version, and what follows at once."""

    offer: WeightsOffer
    prefetch: PrefetchPlanner


class Subscribers:
    """One thread at a time calls it.

    Args:
        tell: sends an offer.
        hand_out: answers a request that a robot did not have to make.
    """

    def __init__(
        self,
        send_offer: Callable[[str, WeightsOffer], object],
        send_blocks: Callable[[str, WeightsRequest], object],
        clock: Callable[[], float],
    ) -> None:
        self._tell, self._hand_out, self._clock = send_offer, send_blocks, clock
        self._robots: dict[str, _Subscriber] = {}

    def add(self, name: str, news: Announcement | None) -> None:
        """A robot's session has begun."""
        self._robots[name] = robot = _Subscriber()
        if news is not None:
            robot.throttle.on_offer_sent(self._clock())
            self._tell(name, replace(news.offer, greeting=True))

    def remove(self, name: str) -> None:
        self._robots.pop(name, None)

    def announce(self, news: Announcement) -> None:
        for name, robot in self._robots.items():
            robot.throttle.is_pending = True
            if robot.throttle.is_due(self._clock()):
                self._inform(name, robot, news)

    def on_message(self, name: str, applied: WeightsApplied | None = None) -> None:
        """A robot has said something: it is to be told the news, where it is `has_pending`."""
        if (robot := self._robots.get(name)) is not None:
            robot.throttle.on_peer_message()
            robot.last_applied = applied or robot.last_applied

    def has_pending(self, name: str) -> bool:
        return name in self._robots and self._robots[name].throttle.is_pending

    def overdue_robots(self) -> list[str]:
        """The robots that are to be told the news although they say nothing."""
        return [name for name, robot in self._robots.items() if robot.throttle.is_due(self._clock())]

    def notify(self, name: str, news: Announcement) -> None:
        if (robot := self._robots.get(name)) is not None:
            self._inform(name, robot, news)

    def _inform(self, name: str, robot: _Subscriber, news: Announcement) -> None:
        requests = news.prefetch.requests(robot.last_applied) if robot.last_applied is not None else ()
        robot.last_applied = None
        robot.throttle.on_offer_sent(self._clock())
        self._tell(name, replace(news.offer, ahead=requests))
        for request in requests:
            self._hand_out(name, request)


logger = logging.getLogger(__name__)

WEIGHTS_STOP_TIMEOUT_S = 30.0
PRUNE_INTERVAL_S = 0.5
MAX_VERSIONS_BEHIND = 32  # versions: to receivers that are further behind no differences lead
MAX_INBOX = 4096
_NO_PIN = PinnedVersion(serial=-1, version=NO_VERSION, by="", reason="", given_unix_ns=0)

SendMessage = Callable[[str, AnyMessage, Payload | None], bool]


@dataclass(frozen=True)
class _LearnerMessage:
    """An offer or grains; or None for a new connection."""

    message: WeightsOffer | WeightsBlocks | WeightsGone | None
    payload: Payload | None = None


class WeightsDistributor:
    """Its public methods never block, save `close`, and may be called from any thread.

    Args:
        kept: how many versions stay on disk, for a person to go back to; the newest lie close, older ones far apart.
        send: queues a message for a peer, see `TunnelServer.send`.
    """

    def __init__(
        self, shelf: VersionStore, send: SendMessage, kept: int = 8, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Opens what is on disk. Raises OSError."""
        self.failure: BaseException | None = None
        self._shelf, self._send, self._kept, self._clock = shelf, send, max(1, kept), clock
        self._catalogue = shelf.load()
        self._read = set(self._catalogue.patches)  # from a disk, where they may rot
        self._lost = False  # one of them did, and the learner may have it still
        self._signer = shelf.learner_public_key()
        self._unreadable = ""  # what was wrong with the order, as it was told
        self._numbers = next((m.run for m, _ in self._catalogue.manifests.values()), b"")  # the run whose they are
        self._order, self._ordered = self._read_order()
        self._ignored: PinnedVersion | None = None  # an order of which it was told that it cannot be obeyed
        self._target = self._due(self._catalogue.complete_versions())
        self._announced: tuple[bytes, int, tuple[Precision, ...], int] = (self._numbers, NO_VERSION, (), -1)
        self._audience = Subscribers(lambda name, offer: self._send(name, offer, None), self._hand_out, clock)
        self._learner = ""
        self._told: WeightsProgress | None = None  # to the learner that is connected
        self._staleness = StalenessHistogram()
        self._offered: tuple[WeightsOffer, dict[Precision, tuple[WeightsManifest, SignedRecord]]] | None = None
        self._fetcher = PatchFetcher(self._ask, clock)
        self._ways: set[bytes] = set()  # parcels that lead to the version that is under way, here or not
        self._spare: set[bytes] = set()  # parcels on their way here that only latecomers need
        self._begun, self._aims = ActiveDownloads(self._kept, clock), DownloadTargets(self._kept, clock)
        self._unkept = FlushScheduler(clock)
        self._stored = set(
            self._catalogue.complete_versions()
        )  # on the disk; one that a newer one overtakes never gets there
        self._next_tidy_s = 0.0
        self._inbox: queue.Queue[_LearnerMessage] = queue.Queue(MAX_INBOX)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    @property
    def version(self) -> int:
        """The version that robots should act with; -1 before the first."""
        return self._target

    def scalars(self) -> dict[str, float]:
        """For the metrics; takes a sample of every robot's staleness."""
        with self._lock:
            self._staleness.sample(self._clock())
            return {"weights_version": float(self._target), "weights_damaged": float(self._fetcher.damaged_blocks),
                    **self._staleness.scalars()}  # fmt: skip

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Keeps the newest version and ends. Raises TunnelError when the disk takes longer than
        `WEIGHTS_STOP_TIMEOUT_S`.
        """
        self._stopping.set()
        self._thread.join(WEIGHTS_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the weights thread did not end within {WEIGHTS_STOP_TIMEOUT_S} s: the disk is stuck")

    # What the tunnel hands over

    def on_learner_opened(self, name: str) -> None:
        with self._lock:
            self._learner, self._told = name, None
        self._put(_LearnerMessage(None))
        self._send(name, WeightsOfferRequest(), None)
        with self._lock:
            self._tell_progress()  # what was said last may have been lost with its former connection

    def on_robot_opened(self, name: str) -> None:
        with self._lock:
            self._audience.add(name, self._news())

    def on_peer_closed(self, name: str) -> None:
        with self._lock:
            self._audience.remove(name)
            self._staleness.remove(name)
            self._learner = "" if name == self._learner else self._learner
            self._tell_progress()

    def on_message(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        match message:
            case WeightsOffer() | WeightsBlocks() | WeightsGone():
                self._put(_LearnerMessage(message, payload))
            case WeightsRequest():
                with self._lock:
                    self._audience.on_message(name)
                self._hand_out(name, message)
                self._tell_if_behind(name)
            case WeightsApplied():
                with self._lock:
                    self._audience.on_message(name, message)
                    self._staleness.set_version(name, message.version)
                    self._tell_progress()
                self._tell_if_behind(name)

    def has_patch(self, parcel: bytes) -> bool:
        return parcel in self._catalogue.patches

    def poll_pin(self) -> None:
        """Obeys an order that a person left on the shelf since the last look."""
        order, ordered = self._read_order()
        if ordered.serial < 0 or (ordered.run == self._ordered.run and ordered.serial <= self._ordered.serial):
            return
        logger.warning("weights.ordered version=%d by=%r: %s", ordered.version, ordered.by, ordered.reason)
        with self._lock:
            self._order, self._ordered = order, ordered
            self._announce()

    def _hand_out(self, name: str, request: WeightsRequest) -> None:
        with self._lock:
            known = self._catalogue.patches.get(request.parcel)
            if known is None:
                self._aims.on_missing(name, self._target, partial(self._tell, name))
                self._send(name, WeightsGone(parcel=request.parcel), None)
                return
            self._aims.on_request(name, known.info, self._target)
            self._begun.on_request(name, request, known.info)
        if request.parcel in self._read and is_corrupt(self._catalogue, request):
            self._lose(request.parcel)
        for found, content in read_blocks(self._catalogue, request):
            self._send(name, found, content)

    def _lose(self, parcel: bytes) -> None:
        """Drops what has rotted on the disk."""
        with self._lock:
            if (lost := self._catalogue.patches.pop(parcel, None)) is None:
                return
            logger.error("weights.damaged version=%d: its file has changed since it was read", lost.info.version)
            self._read.discard(parcel)
            self._shelf.mark_corrupt(parcel)
            self._announce()
            self._lost = True
            self._unkept.invalidated()

    def _put(self, item: _LearnerMessage) -> None:
        try:
            self._inbox.put_nowait(item)
        except queue.Full:  # grains are asked for again, an offer comes with the next version
            logger.warning("weights.inbox_full capacity=%d", MAX_INBOX)

    def _read_order(self) -> tuple[SignedRecord | None, PinnedVersion]:
        """An order by another key than the versions are signed with is none: robots refuse whatever comes with it."""
        try:
            signed = self._shelf.read_pin() if self._signer else None
            return signed, _NO_PIN if signed is None else verifier_from_public_key(self._signer).verify(
                signed, PinnedVersion
            )
        except (OSError, WireError) as error:
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                logger.warning("weights.order_unreadable: %s", error)
            return None, _NO_PIN

    # Telling the robots

    def _announce(self) -> None:
        """Tells every robot what it should act with, when that has changed."""
        versions = self._catalogue.complete_versions()
        pinned = self._pinned
        if pinned != NO_VERSION and pinned not in versions and self._ordered != self._ignored:
            self._ignored = self._ordered
            logger.warning("weights.order_ignored version=%d: it is not kept; there are %s", pinned, versions)
        self._target = self._due(versions)
        forms = tuple(self._catalogue.complete_precisions(self._target))
        state = self._numbers, self._target, forms, self._ordered.serial
        if state == self._announced:
            return
        self._announced = state
        self._staleness.set_newest(self._target, self._clock())
        if (news := self._news()) is not None:
            self._audience.announce(news)
        self._tell_progress()

    @property
    def _pinned(self) -> int:
        """The version of this run that is ordered; `NO_VERSION` where none is."""
        return self._ordered.version if self._ordered.run == self._numbers else NO_VERSION

    def _due(self, versions: list[int]) -> int:
        """The one of `versions` with which robots are to act."""
        pinned = self._pinned
        return pinned if pinned in versions else max(versions, default=NO_VERSION)

    def _news(self) -> Announcement | None:
        """What robots are told to act with; None before the first version."""
        if self._target == NO_VERSION:
            return None
        forms, free = self._catalogue.complete_precisions(self._target), (NO_VERSION, self._target)
        offer = build_offer(
            [self._catalogue.manifests[form, self._target][1] for form in forms],
            self._catalogue.patch_infos(),
            forms,
            self._target,
            signer=self._signer,
            pin=self._order if self._ordered.run == self._numbers and self._pinned in free else None,
        )
        return Announcement(offer, PrefetchPlanner(self._catalogue, self._target))

    def _tell_if_behind(self, name: str) -> None:
        with self._lock:
            if self._audience.has_pending(name):
                self._tell(name)

    def _tell_overdue(self) -> None:
        with self._lock:
            if (names := self._audience.overdue_robots()) and (news := self._news()) is not None:
                for name in names:
                    self._audience.notify(name, news)

    def _tell(self, name: str) -> tuple[PatchInfo, ...]:
        """Has a robot hear of the newest; returns what leads there."""
        if (news := self._news()) is None:
            return ()
        self._audience.notify(name, news)
        return news.offer.parcels

    def _tell_progress(self) -> None:
        ordered = self._target if self._target == self._pinned else NO_VERSION
        progress = WeightsProgress(oldest=self._staleness.oldest_in_use, ordered=ordered)
        if self._learner and progress != self._told and self._send(self._learner, progress, None):
            self._told = progress

    # The thread: fetches from the learner and keeps

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                wait_s = self._go_on(wait_s)
            if self._unkept.is_pending:
                self._persist()
        except Exception as error:
            logger.exception("weights.failed")
            self.failure = error

    def _go_on(self, wait_s: float) -> float:
        """Waits for something to do, so long at most, and does it; returns how long it may wait the next time."""
        self._take_in(wait_s)
        self._collect()
        self._tell_overdue()
        if self._unkept.due_s(STALL_TIMEOUT_S) <= 0:
            self._persist()
        return max(0.0, min(self._fetcher.send_requests(), self._unkept.due_s(STALL_TIMEOUT_S)))

    def _take_in(self, wait_s: float) -> None:
        try:
            item = self._inbox.get(timeout=min(wait_s, 0.25))
        except queue.Empty:
            return
        match item.message:
            case None:
                self._fetcher.reset_requests()
            case WeightsOffer() as offer:
                self._consider(offer)
            case WeightsBlocks() as grains if item.payload is not None:
                self._fetcher.receive_blocks(grains.parcel, grains.first, memoryview(item.payload))
                if self._fetcher.is_unrecoverable(grains.parcel):
                    logger.error("weights.given_up peer=%s: a parcel comes damaged again and again", self._learner)
                    self._give_up(grains.parcel)
            case WeightsGone(parcel=parcel):
                self._give_up(parcel)

    def _give_up(self, gone: bytes) -> None:
        """A parcel that was offered is not to be had from the learner: the version may be reached by others."""
        lost = any(info.id == gone for info in self._awaited)
        self._fetcher.remove_patch(gone)
        if self._offered is not None:
            offer, manifests = self._offered
            left = tuple(info for info in offer.parcels if info.id != gone)
            self._offered = replace(offer, parcels=left), manifests
            self._turn(lost)

    def _ask(self, parcel: bytes, first: int, count: int) -> bool:
        request = WeightsRequest(parcel=parcel, first=first, count=count)
        return bool(self._learner) and self._send(self._learner, request, None)

    def _consider(self, offer: WeightsOffer) -> None:
        try:
            manifests = [(decode_record(signed.body, WeightsManifest), signed) for signed in offer.manifests]
            self._offered = offer, {manifest.form: (manifest, signed) for manifest, signed in manifests}
            with self._lock:
                self._signer = offer.signer
                self._begin_anew([manifest for manifest, _ in manifests])
                self._catalogue.manifests |= {(m.form, m.version): (m, signed) for m, signed in manifests}
                self._announce()
            self._turn()
            if not self._awaited and not self._unkept.is_pending:
                self._confirm(max((manifest.version for manifest, _ in manifests), default=NO_VERSION))
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", self._learner, error)
            self._offered = None

    def _begin_anew(self, offered: list[WeightsManifest]) -> None:
        """Forgets what is of other numbers than these: a relay may live through many runs.

        The same run's numbers begin anew where a learner has lost its checkpoints, or the newest of them.
        """
        if not offered:
            return
        first = offered[0]
        here = [m for (form, _), (m, _) in self._catalogue.manifests.items() if form == first.form]
        lost = any(m.life < first.life and m.version >= first.version and m.digest != first.digest for m in here)
        if first.run == self._numbers and not lost:
            return
        if self._catalogue.manifests:
            logger.warning("weights.another_run version=%d: what is kept of another one goes", first.version)
        self._numbers, self._catalogue, self._stored = first.run, VersionIndex(), set()
        self._aims = DownloadTargets(self._kept, self._clock)
        self._fetcher.set_targets([])
        self._order, self._ordered = self._read_order()  # this run's may be there already
        if self._ordered.run != first.run:
            self._withdraw_order()

    def _withdraw_order(self) -> None:
        self._order, self._ordered = None, _NO_PIN
        try:
            self._shelf.clear_pin()
        except OSError as error:
            logger.error("weights.order_not_withdrawn: %s", error)

    def _turn(self, lost: bool = False) -> None:
        """Turns to the newest offer, where that is here before what is under way to our robots.

        What latecomers need comes in what time that leaves, and to its end: a newer one might never get there.

        Args:
            lost: what is under way does not lead to its version any more.
        """
        if self._offered is None:
            return
        offer, manifests = self._offered
        leading, latecomers = self._leading(offer, manifests)
        ours = self._catalogue.patches
        needed = [info for parcel, info in leading.items() if parcel not in ours]
        spare = [info for parcel, info in latecomers.items() if parcel not in ours and parcel not in leading]
        until_ours = self._left(needed) + self._fetcher.wasted_bytes(self._awaited, needed)
        if self._awaited and not lost and self._left(self._awaited) <= until_ours:
            return
        self._ways = leading.keys() | latecomers.keys()
        if spare:
            spare = [info for info in self._fetcher.targets if info.id in self._spare] or spare
        self._spare = {info.id for info in spare} - {info.id for info in needed}
        try:
            self._fetcher.set_targets(
                [*needed, *(info for info in spare if info.id in self._spare)], {info.id for info in offer.parcels}
            )
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", self._learner, error)
            self._offered = None

    @property
    def _awaited(self) -> list[PatchInfo]:
        """What is under way and leads our robots to a newer version."""
        return [info for info in self._fetcher.targets if info.id not in self._spare]

    def _left(self, infos: list[PatchInfo]) -> int:
        return sum(map(self._fetcher.missing_bytes, infos))

    def _leading(
        self, offer: WeightsOffer, manifests: dict[Precision, tuple[WeightsManifest, SignedRecord]]
    ) -> tuple[dict[bytes, PatchInfo], dict[bytes, PatchInfo]]:
        """What leads our robots to the version, and what leads latecomers there; what is here already, too."""
        ours = self._catalogue.patch_infos()
        robots, latecomers = dict[bytes, PatchInfo](), dict[bytes, PatchInfo]()
        for form, (manifest, _) in manifests.items():
            if not manifest.has_tensors and (table := find_table(offer.parcels, manifest)) is not None:
                robots[table.id] = table
            ready = reachable_versions(ours, form)
            known = [m for (of, _), (m, _) in self._catalogue.manifests.items() if of == form]
            held = {m.version: m.digest for m in known if m.version in ready and m.life == manifest.life}
            for found, bases in ((robots, held), (latecomers, {})):
                way = cheapest_path([*ours, *offer.parcels], form, manifest.version, bases)
                found |= {info.id: info for info in (way.patches if way else ())}
        return robots, latecomers

    def _collect(self) -> None:
        """Takes over what is complete; tells the robots as soon as there is a way to a newer version."""
        if self._lost:
            self._lost = False
            self._turn()
        done = [info for info in self._fetcher.targets if not self._fetcher.missing_bytes(info)]
        if not done:
            return
        fresh = [Patch(info, self._fetcher.payload(info).toreadonly()) for info in done]
        self._fetcher.drop(done)
        with self._lock:
            self._catalogue.patches |= {parcel.info.id: parcel for parcel in fresh}
            self._begun.add_offered(done)
            self._announce()
            self._unkept.received(sum(info.size_bytes for info in done))
            if self._clock() >= self._next_tidy_s:
                self._tidy()
        if not self._awaited:
            self._turn()

    def _tidy(self) -> None:
        """Gives up what nobody will want any more."""
        self.poll_pin()  # before what it names is given up
        with self._lock:
            self._catalogue.retain(*self._needed(), self._begun.pinned_ids() | self._ways | self._aims.pinned_ids())
        self._next_tidy_s = self._clock() + PRUNE_INTERVAL_S

    def _needed(self) -> tuple[set[int], int]:
        """The versions that stay, and the oldest from which differences lead on."""
        versions = self._catalogue.complete_versions()
        newest = max(versions, default=NO_VERSION)
        choice = [version for version in versions if version in self._stored or version == newest]
        kept = {*thin_versions(choice, self._kept), self._target, self._pinned, *self._aims.versions()}
        return kept, newest - MAX_VERSIONS_BEHIND

    def _persist(self) -> None:
        self._tidy()
        with self._lock:
            snapshot = VersionIndex(dict(self._catalogue.manifests), dict(self._catalogue.patches))
            snapshot.retain(*self._needed(), self._begun.requested_ids())  # what was but offered is gone before long
            self._unkept.flush_started()
        newest = max(snapshot.complete_versions(), default=NO_VERSION)
        try:
            self._shelf.save(snapshot, self._signer)
        except OSError as error:  # robots have it all the same; a gateway that restarts now has an older one
            logger.error("weights.not_kept version=%d: %s", newest, error)
            self._unkept.flush_failed()
            return
        self._stored = set(snapshot.complete_versions())
        self._unkept.flush_finished()
        self._confirm(newest)

    def _confirm(self, version: int) -> None:
        """Tells the learner that a version is on disk; again when it offers that again: this may have been lost."""
        if self._learner and version in self._catalogue.complete_versions():
            self._send(self._learner, WeightsReceived(version=version), None)
