"""The weights of all of a run's learners: one desk each, and each robot at the desk of its embodiment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hal.durable import replace_durably
from user_sys.gateway.weights import SendMessage, WeightsDistributor
from user_sys.messages import NO_VERSION, SignedRecord, WeightsApplied, WeightsOffer, WeightsRequest
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer
from user_sys.weights.version_store import VersionStore

logger = logging.getLogger(__name__)

EMBODIMENT_FILE = "embodiment"  # the file on a shelf that says whose weights lie there
MAX_LEARNERS = 32


class WeightsRouter:
    """A desk opens when its learner comes in, and again at the next start. Robots of an embodiment that nobody learns
    for get nothing; whoever does not say what it is, is at the first learner's desk, and a relay at each.

    Its public methods never block, save `close`, and may be called from any thread.
    """

    def __init__(self, folder: Path, send: SendMessage, kept: int, robots: Callable[[], list[Peer]]) -> None:
        """`robots` lists the robots that are connected. Raises OSError."""
        self._folder, self._send, self._kept, self._robots = folder, send, kept, robots
        self._lock = threading.RLock()
        self._running = False
        self._desks: dict[str, WeightsDistributor] = {}
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
        """As `WeightsDistributor.close`, all of them."""
        for desk in self._each():
            desk.close()

    def scalars(self) -> dict[str, float]:
        """The first learner's under their own names, the others' with its name before them."""
        with self._lock:
            desks = dict(self._desks)
        own = desks.pop(LEARNER).scalars()
        others = {f"{name}/{key}": value for name, desk in desks.items() for key, value in desk.scalars().items()}
        return own | others

    def learners_with_weights(self) -> set[str]:
        """The learners of which a version is here."""
        with self._lock:
            return {name for name, desk in self._desks.items() if desk.version != NO_VERSION}

    def poll_pin(self) -> None:
        for desk in self._each():
            desk.poll_pin()

    def on_peer_opened(self, peer: Peer) -> None:
        """A learner, a robot or a relay came in."""
        if peer.role == "learner":
            self.on_learner_opened(peer.name, "" if peer.spec is None else peer.spec.embodiment)
        elif peer.role == "relay":
            with self._lock:
                self._relays.add(peer.name)
                for desk in self._desks.values():
                    desk.on_robot_opened(peer.name)
        elif not peer.via:
            self._seat(peer)
        else:
            self._seat_relayed(peer)

    def on_peer_closed(self, name: str) -> None:
        with self._lock:
            if name in self._relays:
                self._relays.discard(name)
                for desk in self._desks.values():
                    desk.on_peer_closed(name)
            seat = self._desks.get(self._seats.pop(name, self._relayed.pop(name, "")))
        if seat is not None:
            seat.on_peer_closed(name)

    def on_message(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        said = isinstance(message, WeightsApplied)
        with self._lock:
            desk = self._desks.get(self._seats.get(name, self._relayed.get(name, "") if said else ""))
            if name in self._relays and isinstance(message, WeightsRequest):
                desk = next((d for d in self._desks.values() if d.has_patch(message.parcel)), self._desks[LEARNER])
        if desk is None and not said:
            logger.info("weights.nobody_learns_for peer=%s", name)
        if desk is not None:
            desk.on_message(name, message, payload)

    def on_learner_opened(self, name: str, embodiment: str) -> None:
        """A learner, or who speaks for it, came in; `embodiment` is what it learns for, where it says so."""
        with self._lock:
            if name not in self._desks and len(self._desks) >= MAX_LEARNERS:
                logger.error("weights.too_many_learners name=%s: there are %d", name, len(self._desks))
                return
            desk = self._desks.get(name) or self._open(name)
            self._seats[name] = name
            if embodiment:
                self._learns_for(name, embodiment)
            desk.on_learner_opened(name)
        for robot in self._robots():
            if robot.via:
                self._seat_relayed(robot)
            elif self._seats.get(robot.name) != self._desk_for(robot):
                self._seat(robot)

    def set_pin(self, learner: str, order: SignedRecord) -> None:
        """Leaves a person's order for the robots of a learner. Raises OSError."""
        VersionStore(learner_folder(self._folder, learner)).set_pin(order)
        self.poll_pin()

    def _open(self, name: str) -> WeightsDistributor:
        folder = learner_folder(self._folder, name)
        desk = self._desks[name] = WeightsDistributor(VersionStore(folder), partial(self._hand, name), self._kept)
        known = folder / EMBODIMENT_FILE
        self._embodiments[name] = known.read_text() if known.exists() else ""
        if self._running:
            desk.start()
        for relay in self._relays:
            desk.on_robot_opened(relay)
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
            replace_durably(learner_folder(self._folder, name) / EMBODIMENT_FILE, embodiment.encode())
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
            former.on_peer_closed(peer.name)
        if desk is not None:
            desk.on_robot_opened(peer.name)

    def _seat_relayed(self, peer: Peer) -> None:
        """A robot has its weights from a relay; who learns for it waits for it as well."""
        with self._lock:
            former, name = self._relayed.pop(peer.name, None), self._desk_for(peer)
            if name is not None:
                self._relayed[peer.name] = name
        if former is not None and former != name:
            self._desks[former].on_peer_closed(peer.name)

    def _desk_for(self, peer: Peer) -> str | None:
        if peer.spec is None:
            return LEARNER
        wanted = peer.spec.embodiment
        found = next((name for name, embodiment in self._embodiments.items() if embodiment == wanted), None)
        return LEARNER if found is None and not self._embodiments[LEARNER] else found

    def _each(self) -> Iterator[WeightsDistributor]:
        with self._lock:
            desks = list(self._desks.values())
        yield from desks
