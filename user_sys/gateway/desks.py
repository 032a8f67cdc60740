"""The weights of all of a run's learners: one desk each, and each robot at the desk of its embodiment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hal.durable import replace_durably
from user_sys.gateway.weights import Send, WeightsDesk
from user_sys.learners import LEARNER, folder_of
from user_sys.messages import WeightsApplied
from user_sys.tunnel.server import Peer
from user_sys.tunnel.wire import AnyMessage, Payload
from user_sys.weights.shelf import Shelf

logger = logging.getLogger(__name__)

EMBODIMENT = "embodiment"  # the file on a shelf that says whose weights lie there
MAX_DESKS = 32


class WeightsDesks:
    """A desk opens when its learner comes in, and again at the next start. Robots of an embodiment that nobody learns
    for get nothing; relays, and whoever does not say what it is, are at the first learner's desk.

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

    def look_for_order(self) -> None:
        for desk in self._each():
            desk.look_for_order()

    def opened(self, peer: Peer) -> None:
        """A learner, a robot or a relay came in."""
        if peer.role == "learner":
            self._learner_opened(peer)
        elif not peer.via:
            self._seat(peer)
        elif (name := self._desk_for(peer)) is not None:  # its relay has the weights; who learns waits for it as well
            with self._lock:
                self._relayed[peer.name] = name

    def closed(self, name: str) -> None:
        with self._lock:
            desk = self._desks.get(self._seats.pop(name, self._relayed.pop(name, "")))
        if desk is not None:
            desk.closed(name)

    def received(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        said = isinstance(message, WeightsApplied)
        with self._lock:
            desk = self._desks.get(self._seats.get(name, self._relayed.get(name, "") if said else ""))
        if desk is None and not said:
            logger.info("weights.nobody_learns_for peer=%s", name)
        if desk is not None:
            desk.received(name, message, payload)

    def _learner_opened(self, peer: Peer) -> None:
        with self._lock:
            if peer.name not in self._desks and len(self._desks) >= MAX_DESKS:
                logger.error("weights.too_many_learners name=%s: there are %d", peer.name, len(self._desks))
                return
            desk = self._desks.get(peer.name) or self._open(peer.name)
            self._seats[peer.name] = peer.name
            if peer.spec is not None:
                self._learns_for(peer.name, peer.spec.embodiment)
            desk.learner_opened(peer.name)
        for robot in self._robots():
            if not robot.via and self._seats.get(robot.name) != self._desk_for(robot):
                self._seat(robot)

    def _open(self, name: str) -> WeightsDesk:
        folder = folder_of(self._folder, name)
        desk = self._desks[name] = WeightsDesk(Shelf(folder), self._send, self._kept)
        known = folder / EMBODIMENT
        self._embodiments[name] = known.read_text() if known.exists() else ""
        if self._running:
            desk.start()
        return desk

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

    def _desk_for(self, peer: Peer) -> str | None:
        if peer.spec is None or self._embodiments[LEARNER] in ("", peer.spec.embodiment):
            return LEARNER
        wanted = peer.spec.embodiment
        return next((name for name, embodiment in self._embodiments.items() if embodiment == wanted), None)

    def _each(self) -> Iterator[WeightsDesk]:
        with self._lock:
            desks = list(self._desks.values())
        yield from desks
