"""Weights on their way from the learner to the robots: fetched once, kept on disk, handed to each at its own pace.

The desk is a receiver that applies nothing, and a server that computes nothing: it knows parcels by their id, and what
they are for. Each robot asks for what it lacks when it has room for it, so a slow one holds up nobody.
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
from user_sys.gateway.audience import Audience, News
from user_sys.gateway.write_pace import WritePace
from user_sys.messages import (
    WeightsApplied,
    WeightsAsk,
    WeightsGone,
    WeightsGrains,
    WeightsOffer,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.wire import AnyMessage, Payload
from user_sys.weights.catalogue import Catalogue, cheapest, reachable, table_of, thinned
from user_sys.weights.fetch import STALL_S, Fetcher
from user_sys.weights.offers import fitting_offer
from user_sys.weights.parcel import Parcel
from user_sys.weights.records import NO_VERSION, Form, Manifest, Order, ParcelInfo, Signed, decode_record
from user_sys.weights.serve import Ahead, Aims, Begun, answers, is_rotten
from user_sys.weights.shelf import Shelf
from user_sys.weights.signing import verifier_of
from user_sys.weights.staleness import Staleness

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
TIDY_S = 0.5
LAGGARDS = 32  # versions: to receivers that are further behind no differences lead
MAX_INBOX = 4096
_NO_ORDER = Order(serial=-1, version=NO_VERSION, by="", reason="", given_unix_ns=0)

Send = Callable[[str, AnyMessage, Payload | None], bool]


@dataclass(frozen=True)
class _FromLearner:
    """An offer or grains; or None for a new connection."""

    message: WeightsOffer | WeightsGrains | WeightsGone | None
    payload: Payload | None = None


class WeightsDesk:
    """Its public methods never block, save `close`, and may be called from any thread.

    Args:
        kept: how many versions stay on disk, for a person to go back to; the newest lie close, older ones far apart.
        send: queues a message for a peer, see `TunnelServer.send`.
    """

    def __init__(self, shelf: Shelf, send: Send, kept: int = 8, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens what is on disk. Raises OSError."""
        self.failure: BaseException | None = None
        self._shelf, self._send, self._kept, self._clock = shelf, send, max(1, kept), clock
        self._catalogue = shelf.open()
        self._read = set(self._catalogue.parcels)  # from a disk, where they may rot
        self._lost = False  # one of them did, and the learner may have it still
        self._signer = shelf.signer()
        self._unreadable = ""  # what was wrong with the order, as it was told
        self._numbers = next((m.run for m, _ in self._catalogue.manifests.values()), b"")  # the run whose they are
        self._order, self._ordered = self._read_order()
        self._ignored: Order | None = None  # an order of which it was told that it cannot be obeyed
        self._target = self._due(self._catalogue.versions())
        self._announced: tuple[bytes, int, tuple[Form, ...], int] = (self._numbers, NO_VERSION, (), -1)
        self._audience = Audience(lambda name, offer: self._send(name, offer, None), self._hand_out, clock)
        self._learner = ""
        self._told: WeightsProgress | None = None  # to the learner that is connected
        self._staleness = Staleness()
        self._offered: tuple[WeightsOffer, dict[Form, tuple[Manifest, Signed]]] | None = None
        self._fetcher = Fetcher(self._ask, clock)
        self._ways: set[bytes] = set()  # parcels that lead to the version that is under way, here or not
        self._spare: set[bytes] = set()  # parcels on their way here that only latecomers need
        self._begun, self._aims = Begun(self._kept, clock), Aims(self._kept, clock)
        self._unkept = WritePace(clock)
        self._stored = set(self._catalogue.versions())  # on the disk; one that a newer one overtakes never gets there
        self._next_tidy_s = 0.0
        self._inbox: queue.Queue[_FromLearner] = queue.Queue(MAX_INBOX)
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
            return {"weights_version": float(self._target), "weights_damaged": float(self._fetcher.damaged),
                    **self._staleness.scalars()}  # fmt: skip

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Keeps the newest version and ends. Raises TunnelError when the disk takes longer than `STOP_TIMEOUT_S`."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the weights thread did not end within {STOP_TIMEOUT_S} s: the disk is stuck")

    # What the tunnel hands over

    def learner_opened(self, name: str) -> None:
        with self._lock:
            self._learner, self._told = name, None
        self._put(_FromLearner(None))
        self._send(name, WeightsAsk(), None)
        with self._lock:
            self._tell_progress()  # what was said last may have been lost with its former connection

    def robot_opened(self, name: str) -> None:
        with self._lock:
            self._audience.opened(name, self._news())

    def closed(self, name: str) -> None:
        with self._lock:
            self._audience.closed(name)
            self._staleness.left(name)
            self._learner = "" if name == self._learner else self._learner
            self._tell_progress()

    def received(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        match message:
            case WeightsOffer() | WeightsGrains() | WeightsGone():
                self._put(_FromLearner(message, payload))
            case WeightsRequest():
                with self._lock:
                    self._audience.heard(name)
                self._hand_out(name, message)
                self._tell_if_behind(name)
            case WeightsApplied():
                with self._lock:
                    self._audience.heard(name, message)
                    self._staleness.acts(name, message.version)
                    self._tell_progress()
                self._tell_if_behind(name)

    def has(self, parcel: bytes) -> bool:
        return parcel in self._catalogue.parcels

    def look_for_order(self) -> None:
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
            known = self._catalogue.parcels.get(request.parcel)
            if known is None:
                self._aims.misses(name, self._target, partial(self._tell, name))
                self._send(name, WeightsGone(parcel=request.parcel), None)
                return
            self._aims.asks(name, known.info, self._target)
            self._begun.note(name, request, known.info)
        if request.parcel in self._read and is_rotten(self._catalogue, request):
            self._lose(request.parcel)
        for found, content in answers(self._catalogue, request):
            self._send(name, found, content)

    def _lose(self, parcel: bytes) -> None:
        """Drops what has rotted on the disk."""
        with self._lock:
            if (lost := self._catalogue.parcels.pop(parcel, None)) is None:
                return
            logger.error("weights.damaged version=%d: its file has changed since it was read", lost.info.version)
            self._read.discard(parcel)
            self._shelf.doubt(parcel)
            self._announce()
            self._lost = True
            self._unkept.lost()

    def _put(self, item: _FromLearner) -> None:
        try:
            self._inbox.put_nowait(item)
        except queue.Full:  # grains are asked for again, an offer comes with the next version
            logger.warning("weights.inbox_full capacity=%d", MAX_INBOX)

    def _read_order(self) -> tuple[Signed | None, Order]:
        """An order by another key than the versions are signed with is none: robots refuse whatever comes with it."""
        try:
            signed = self._shelf.order() if self._signer else None
            return signed, _NO_ORDER if signed is None else verifier_of(self._signer).open(signed, Order)
        except (OSError, WireError) as error:
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                logger.warning("weights.order_unreadable: %s", error)
            return None, _NO_ORDER

    # Telling the robots

    def _announce(self) -> None:
        """Tells every robot what it should act with, when that has changed."""
        versions = self._catalogue.versions()
        pinned = self._pinned
        if pinned != NO_VERSION and pinned not in versions and self._ordered != self._ignored:
            self._ignored = self._ordered
            logger.warning("weights.order_ignored version=%d: it is not kept; there are %s", pinned, versions)
        self._target = self._due(versions)
        forms = tuple(self._catalogue.forms(self._target))
        state = self._numbers, self._target, forms, self._ordered.serial
        if state == self._announced:
            return
        self._announced = state
        self._staleness.offered(self._target, self._clock())
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

    def _news(self) -> News | None:
        """What robots are told to act with; None before the first version."""
        if self._target == NO_VERSION:
            return None
        forms, free = self._catalogue.forms(self._target), (NO_VERSION, self._target)
        offer = fitting_offer(
            [self._catalogue.manifests[form, self._target][1] for form in forms],
            self._catalogue.infos(),
            forms,
            self._target,
            signer=self._signer,
            order=self._order if self._ordered.run == self._numbers and self._pinned in free else None,
        )
        return News(offer, Ahead(self._catalogue, self._target))

    def _tell_if_behind(self, name: str) -> None:
        with self._lock:
            if self._audience.behind(name):
                self._tell(name)

    def _tell_overdue(self) -> None:
        with self._lock:
            if (names := self._audience.overdue()) and (news := self._news()) is not None:
                for name in names:
                    self._audience.inform(name, news)

    def _tell(self, name: str) -> tuple[ParcelInfo, ...]:
        """Has a robot hear of the newest; returns what leads there."""
        if (news := self._news()) is None:
            return ()
        self._audience.inform(name, news)
        return news.offer.parcels

    def _tell_progress(self) -> None:
        ordered = self._target if self._target == self._pinned else NO_VERSION
        progress = WeightsProgress(oldest=self._staleness.oldest, ordered=ordered)
        if self._learner and progress != self._told and self._send(self._learner, progress, None):
            self._told = progress

    # The thread: fetches from the learner and keeps

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                wait_s = self._go_on(wait_s)
            if self._unkept.waits:
                self._persist()
        except Exception as error:
            logger.exception("weights.failed")
            self.failure = error

    def _go_on(self, wait_s: float) -> float:
        """Waits for something to do, so long at most, and does it; returns how long it may wait the next time."""
        self._take_in(wait_s)
        self._collect()
        self._tell_overdue()
        if self._unkept.due_s(STALL_S) <= 0:
            self._persist()
        return max(0.0, min(self._fetcher.pump(), self._unkept.due_s(STALL_S)))

    def _take_in(self, wait_s: float) -> None:
        try:
            item = self._inbox.get(timeout=min(wait_s, 0.25))
        except queue.Empty:
            return
        match item.message:
            case None:
                self._fetcher.restart()
            case WeightsOffer() as offer:
                self._consider(offer)
            case WeightsGrains() as grains if item.payload is not None:
                self._fetcher.take(grains.parcel, grains.first, memoryview(item.payload))
                if self._fetcher.hopeless(grains.parcel):
                    logger.error("weights.given_up peer=%s: a parcel comes damaged again and again", self._learner)
                    self._give_up(grains.parcel)
            case WeightsGone(parcel=parcel):
                self._give_up(parcel)

    def _give_up(self, gone: bytes) -> None:
        """A parcel that was offered is not to be had from the learner: the version may be reached by others."""
        lost = any(info.id == gone for info in self._awaited)
        self._fetcher.gone(gone)
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
            manifests = [(decode_record(signed.body, Manifest), signed) for signed in offer.manifests]
            self._offered = offer, {manifest.form: (manifest, signed) for manifest, signed in manifests}
            with self._lock:
                self._signer = offer.signer
                self._begin_anew([manifest for manifest, _ in manifests])
                self._catalogue.manifests |= {(m.form, m.version): (m, signed) for m, signed in manifests}
                self._announce()
            self._turn()
            if not self._awaited and not self._unkept.waits:
                self._confirm(max((manifest.version for manifest, _ in manifests), default=NO_VERSION))
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", self._learner, error)
            self._offered = None

    def _begin_anew(self, offered: list[Manifest]) -> None:
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
        self._numbers, self._catalogue, self._stored = first.run, Catalogue(), set()
        self._aims = Aims(self._kept, self._clock)
        self._fetcher.want([])
        self._order, self._ordered = self._read_order()  # this run's may be there already
        if self._ordered.run != first.run:
            self._withdraw_order()

    def _withdraw_order(self) -> None:
        self._order, self._ordered = None, _NO_ORDER
        try:
            self._shelf.withdraw()
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
        ours = self._catalogue.parcels
        needed = [info for parcel, info in leading.items() if parcel not in ours]
        spare = [info for parcel, info in latecomers.items() if parcel not in ours and parcel not in leading]
        until_ours = self._left(needed) + self._fetcher.in_vain_bytes(self._awaited, needed)
        if self._awaited and not lost and self._left(self._awaited) <= until_ours:
            return
        self._ways = leading.keys() | latecomers.keys()
        if spare:
            spare = [info for info in self._fetcher.wanted if info.id in self._spare] or spare
        self._spare = {info.id for info in spare} - {info.id for info in needed}
        try:
            self._fetcher.want(
                [*needed, *(info for info in spare if info.id in self._spare)], {info.id for info in offer.parcels}
            )
        except WireError as error:
            logger.error("weights.refused peer=%s: %s", self._learner, error)
            self._offered = None

    @property
    def _awaited(self) -> list[ParcelInfo]:
        """What is under way and leads our robots to a newer version."""
        return [info for info in self._fetcher.wanted if info.id not in self._spare]

    def _left(self, infos: list[ParcelInfo]) -> int:
        return sum(map(self._fetcher.missing_bytes, infos))

    def _leading(
        self, offer: WeightsOffer, manifests: dict[Form, tuple[Manifest, Signed]]
    ) -> tuple[dict[bytes, ParcelInfo], dict[bytes, ParcelInfo]]:
        """What leads our robots to the version, and what leads latecomers there; what is here already, too."""
        ours = self._catalogue.infos()
        robots, latecomers = dict[bytes, ParcelInfo](), dict[bytes, ParcelInfo]()
        for form, (manifest, _) in manifests.items():
            if not manifest.entire and (table := table_of(offer.parcels, manifest)) is not None:
                robots[table.id] = table
            ready = reachable(ours, form)
            known = [m for (of, _), (m, _) in self._catalogue.manifests.items() if of == form]
            held = {m.version: m.digest for m in known if m.version in ready and m.life == manifest.life}
            for found, bases in ((robots, held), (latecomers, {})):
                way = cheapest([*ours, *offer.parcels], form, manifest.version, bases)
                found |= {info.id: info for info in (way.parcels if way else ())}
        return robots, latecomers

    def _collect(self) -> None:
        """Takes over what is complete; tells the robots as soon as there is a way to a newer version."""
        if self._lost:
            self._lost = False
            self._turn()
        done = [info for info in self._fetcher.wanted if not self._fetcher.missing_bytes(info)]
        if not done:
            return
        fresh = [Parcel(info, self._fetcher.payload(info).toreadonly()) for info in done]
        self._fetcher.drop(done)
        with self._lock:
            self._catalogue.parcels |= {parcel.info.id: parcel for parcel in fresh}
            self._begun.offer(done)
            self._announce()
            self._unkept.came(sum(info.size_bytes for info in done))
            if self._clock() >= self._next_tidy_s:
                self._tidy()
        if not self._awaited:
            self._turn()

    def _tidy(self) -> None:
        """Gives up what nobody will want any more."""
        self.look_for_order()  # before what it names is given up
        with self._lock:
            self._catalogue.retain(*self._needed(), self._begun.ids() | self._ways | self._aims.promised())
        self._next_tidy_s = self._clock() + TIDY_S

    def _needed(self) -> tuple[set[int], int]:
        """The versions that stay, and the oldest from which differences lead on."""
        versions = self._catalogue.versions()
        newest = max(versions, default=NO_VERSION)
        choice = [version for version in versions if version in self._stored or version == newest]
        kept = {*thinned(choice, self._kept), self._target, self._pinned, *self._aims.versions()}
        return kept, newest - LAGGARDS

    def _persist(self) -> None:
        self._tidy()
        with self._lock:
            snapshot = Catalogue(dict(self._catalogue.manifests), dict(self._catalogue.parcels))
            snapshot.retain(*self._needed(), self._begun.fetched())  # what was but offered is gone before long
            self._unkept.begun()
        newest = max(snapshot.versions(), default=NO_VERSION)
        try:
            self._shelf.keep(snapshot, self._signer)
        except OSError as error:  # robots have it all the same; a gateway that restarts now has an older one
            logger.error("weights.not_kept version=%d: %s", newest, error)
            self._unkept.failed()
            return
        self._stored = set(snapshot.versions())
        self._unkept.written()
        self._confirm(newest)

    def _confirm(self, version: int) -> None:
        """Tells the learner that a version is on disk; again when it offers that again: this may have been lost."""
        if self._learner and version in self._catalogue.versions():
            self._send(self._learner, WeightsReceived(version=version), None)
