"""The weights of all of a run's learners: one desk each, and each robot at the desk of its embodiment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hal.durable import replace_durably
from user_sys.gateway.weights import Send, WeightsDesk
from user_sys.learners import LEARNER, folder_of
from user_sys.messages import WeightsApplied, WeightsOffer, WeightsRequest
from user_sys.tunnel.server import Peer
from user_sys.tunnel.wire import AnyMessage, Payload
from user_sys.weights.records import NO_VERSION, Signed
from user_sys.weights.shelf import Shelf

logger = logging.getLogger(__name__)

EMBODIMENT = "embodiment"  # the file on a shelf that says whose weights lie there
MAX_DESKS = 32


class WeightsDesks:
    """A desk opens when its learner comes in, and again at the next start. Robots of an embodiment that nobody learns
    for get nothing; whoever does not say what it is, is at the first learner's desk, and a relay at each.

    Its public methods never block, save `close`, and may be called from any thread.
    """

    def __init__(self, folder: Path, send: Send, kept: int, robots: Callable[[], list[Peer]]) -> None:
        """`robots` lists the robots that are connected. Raises OSError."""
        self._folder, self._send, self._kept, self._robots = folder, send, kept, robots
        self._lock = threading.RLock()
        self._running = False
        self._desks: dict[str, WeightsDesk] = {}
        self._embodiments: dict[str, str] = {}
        self._seats: dict[str, str] = {}  # peer -> name of its desk
        self._relayed: dict[str, str] = {}  # likewise, of robots that have their weights from a relay
        self._relays: set[str] = set()
        self._open(LEARNER)
        for shelf in sorted(folder.glob(f"{LEARNER}-*/")):
            self._open(shelf.name)

    @property
    def failure(self) -> BaseException | None:
        """The first desk's that failed."""
        return next((desk.failure for desk in self._each() if desk.failure is not None), None)

    @property
    def started(self) -> bool:
        return self._running

    def start(self) -> None:
        with self._lock:
            self._running = True
            for desk in self._desks.values():
                desk.start()

    def close(self) -> None:
        """As `WeightsDesk.close`, all of them."""
        for desk in self._each():
            desk.close()

    def scalars(self) -> dict[str, float]:
        """The first learner's under their own names, the others' with its name before them."""
        with self._lock:
            desks = dict(self._desks)
        own = desks.pop(LEARNER).scalars()
        others = {f"{name}/{key}": value for name, desk in desks.items() for key, value in desk.scalars().items()}
        return own | others

    def kept(self) -> set[str]:
        """The learners of which a version is here."""
        with self._lock:
            return {name for name, desk in self._desks.items() if desk.version != NO_VERSION}

    def look_for_order(self) -> None:
        for desk in self._each():
            desk.look_for_order()

    def opened(self, peer: Peer) -> None:
        """A learner, a robot or a relay came in."""
        if peer.role == "learner":
            self.learner_opened(peer.name, "" if peer.spec is None else peer.spec.embodiment)
        elif peer.role == "relay":
            with self._lock:
                self._relays.add(peer.name)
                for desk in self._desks.values():
                    desk.robot_opened(peer.name)
        elif not peer.via:
            self._seat(peer)
        else:
            self._seat_relayed(peer)

    def closed(self, name: str) -> None:
        with self._lock:
            if name in self._relays:
                self._relays.discard(name)
                for desk in self._desks.values():
                    desk.closed(name)
            seat = self._desks.get(self._seats.pop(name, self._relayed.pop(name, "")))
        if seat is not None:
            seat.closed(name)

    def received(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        said = isinstance(message, WeightsApplied)
        with self._lock:
            desk = self._desks.get(self._seats.get(name, self._relayed.get(name, "") if said else ""))
            if name in self._relays and isinstance(message, WeightsRequest):
                desk = next((d for d in self._desks.values() if d.has(message.parcel)), self._desks[LEARNER])
        if desk is None and not said:
            logger.info("weights.nobody_learns_for peer=%s", name)
        if desk is not None:
            desk.received(name, message, payload)

    def learner_opened(self, name: str, embodiment: str) -> None:
        """A learner, or who speaks for it, came in; `embodiment` is what it learns for, where it says so."""
        with self._lock:
            if name not in self._desks and len(self._desks) >= MAX_DESKS:
                logger.error("weights.too_many_learners name=%s: there are %d", name, len(self._desks))
                return
            desk = self._desks.get(name) or self._open(name)
            self._seats[name] = name
            if embodiment:
                self._learns_for(name, embodiment)
            desk.learner_opened(name)
        for robot in self._robots():
            if robot.via:
                self._seat_relayed(robot)
            elif self._seats.get(robot.name) != self._desk_for(robot):
                self._seat(robot)

    def give(self, learner: str, order: Signed) -> None:
        """Leaves a person's order for the robots of a learner. Raises OSError."""
        Shelf(folder_of(self._folder, learner)).give(order)
        self.look_for_order()

    def _open(self, name: str) -> WeightsDesk:
        folder = folder_of(self._folder, name)
        desk = self._desks[name] = WeightsDesk(Shelf(folder), partial(self._hand, name), self._kept)
        known = folder / EMBODIMENT
        self._embodiments[name] = known.read_text() if known.exists() else ""
        if self._running:
            desk.start()
        for relay in self._relays:
            desk.robot_opened(relay)
        return desk

    def _hand(self, learner: str, peer: str, message: AnyMessage, payload: Payload | None) -> bool:
        """Sends what a learner's desk says; a relay, which hears of all learners, is told whose version it is."""
        if isinstance(message, WeightsOffer) and peer in self._relays:
            message = replace(message, learner=learner, embodiment=self._embodiments[learner])
        return self._send(peer, message, payload)

    def _learns_for(self, name: str, embodiment: str) -> None:
        if self._embodiments[name] == embodiment:
            return
        self._embodiments[name] = embodiment
        try:
            replace_durably(folder_of(self._folder, name) / EMBODIMENT, embodiment.encode())
        except OSError as error:  # the learner says it again when it connects
            logger.error("weights.embodiment_not_kept learner=%s: %s", name, error)

    def _seat(self, peer: Peer) -> None:
        with self._lock:
            name = self._desk_for(peer)
            former = self._desks.get(self._seats.pop(peer.name, ""))
            desk = None if name is None else self._desks[name]
            if name is not None:
                self._seats[peer.name] = name
        if former is not None and former is not desk:
            former.closed(peer.name)
        if desk is not None:
            desk.robot_opened(peer.name)

    def _seat_relayed(self, peer: Peer) -> None:
        """A robot has its weights from a relay; who learns for it waits for it as well."""
        with self._lock:
            former, name = self._relayed.pop(peer.name, None), self._desk_for(peer)
            if name is not None:
                self._relayed[peer.name] = name
        if former is not None and former != name:
            self._desks[former].closed(peer.name)

    def _desk_for(self, peer: Peer) -> str | None:
        if peer.spec is None:
            return LEARNER
        wanted = peer.spec.embodiment
        found = next((name for name, embodiment in self._embodiments.items() if embodiment == wanted), None)
        return LEARNER if found is None and not self._embodiments[LEARNER] else found

    def _each(self) -> Iterator[WeightsDesk]:
        with self._lock:
            desks = list(self._desks.values())
        yield from desks
