"""Routes the weights of a run's learners to its robots, by embodiment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hal.durable import replace_durably
from user_sys.gateway.announcer import SendMessage
from user_sys.gateway.weights import WeightsDistributor
from user_sys.messages import NO_VERSION, SignedRecord, WeightsApplied, WeightsOffer, WeightsRequest
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer
from user_sys.weights.version_store import VersionStore

logger = logging.getLogger(__name__)

EMBODIMENT_FILE = "embodiment"  # in a learner's folder: the embodiment of its robots
MAX_LEARNERS = 32


class WeightsRouter:
    """One `WeightsDistributor` for each learner; it starts when the learner connects, and at later gateway starts.

    A robot without a spec gets the first learner's weights; a robot whose embodiment has no learner gets none; a relay
    gets all of them. Its public methods never block, except `close`, and any thread may call them.
    """

    def __init__(self, folder: Path, send: SendMessage, kept: int, robots: Callable[[], list[Peer]]) -> None:
        """`robots` lists the connected robots. Raises OSError."""
        self._folder, self._send, self._kept, self._robots = folder, send, kept, robots
        self._lock = threading.RLock()
        self._running = False
        self._distributors: dict[str, WeightsDistributor] = {}  # by learner
        self._embodiments: dict[str, str] = {}  # by learner
        self._learner_by_peer: dict[str, str] = {}
        self._learner_by_relayed_robot: dict[str, str] = {}  # robots that get their weights from a relay
        self._relays: set[str] = set()
        self._open(LEARNER)
        for learner_dir in sorted(folder.glob(f"{LEARNER}-*/")):
            self._open(learner_dir.name)

    @property
    def failure(self) -> BaseException | None:
        """The first failure of a distributor, or None."""
        return next((each.failure for each in self._all() if each.failure is not None), None)

    @property
    def started(self) -> bool:
        return self._running

    def start(self) -> None:
        with self._lock:
            self._running = True
            for distributor in self._distributors.values():
                distributor.start()

    def close(self) -> None:
        """See `WeightsDistributor.close`."""
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
        elif not peer.via:
            self._assign(peer)
        else:
            self._assign_relayed(peer)

    def on_peer_closed(self, name: str) -> None:
        with self._lock:
            if name in self._relays:
                self._relays.discard(name)
                for distributor in self._distributors.values():
                    distributor.on_peer_closed(name)
            learner = self._learner_by_peer.pop(name, self._learner_by_relayed_robot.pop(name, ""))
            assigned = self._distributors.get(learner)
        if assigned is not None:
            assigned.on_peer_closed(name)

    def on_message(self, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """A message of the weights channel from the peer called `name`."""
        is_report = isinstance(message, WeightsApplied)
        with self._lock:
            relayed = self._learner_by_relayed_robot.get(name, "") if is_report else ""
            distributor = self._distributors.get(self._learner_by_peer.get(name, relayed))
            if name in self._relays and isinstance(message, WeightsRequest):
                holders = (each for each in self._distributors.values() if each.has_patch(message.parcel))
                distributor = next(holders, self._distributors[LEARNER])
        if distributor is None and not is_report:
            logger.info("weights.no_learner peer=%s", name)
        if distributor is not None:
            distributor.on_message(name, message, payload)

    def on_learner_opened(self, name: str, embodiment: str) -> None:
        """A learner has connected, or a relay speaks for it. `embodiment` may be empty."""
        with self._lock:
            if name not in self._distributors and len(self._distributors) >= MAX_LEARNERS:
                logger.error("weights.too_many_learners name=%s: the limit is %d", name, MAX_LEARNERS)
                return
            distributor = self._distributors.get(name) or self._open(name)
            self._learner_by_peer[name] = name
            if embodiment:
                self._set_embodiment(name, embodiment)
            distributor.on_learner_opened(name)
        for robot in self._robots():
            if robot.via:
                self._assign_relayed(robot)
            elif self._learner_by_peer.get(robot.name) != self._learner_for(robot):
                self._assign(robot)

    def set_pin(self, learner: str, pin: SignedRecord) -> None:
        """Pins a version for the robots of a learner. Raises OSError."""
        VersionStore(learner_folder(self._folder, learner)).set_pin(pin)
        self.poll_pin()

    def _open(self, name: str) -> WeightsDistributor:
        folder = learner_folder(self._folder, name)
        store, send = VersionStore(folder), partial(self._send_for, name)
        distributor = self._distributors[name] = WeightsDistributor(store, send, self._kept)
        file = folder / EMBODIMENT_FILE
        self._embodiments[name] = file.read_text() if file.exists() else ""
        if self._running:
            distributor.start()
        for relay in self._relays:
            distributor.on_robot_opened(relay)
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
        try:
            replace_durably(learner_folder(self._folder, name) / EMBODIMENT_FILE, embodiment.encode())
        except OSError as error:  # the learner repeats it when it connects again
            logger.error("weights.embodiment_write_failed learner=%s: %s", name, error)

    def _assign(self, peer: Peer) -> None:
        with self._lock:
            name = self._learner_for(peer)
            former = self._distributors.get(self._learner_by_peer.pop(peer.name, ""))
            distributor = None if name is None else self._distributors[name]
            if name is not None:
                self._learner_by_peer[peer.name] = name
        if former is not None and former is not distributor:
            former.on_peer_closed(peer.name)
        if distributor is not None:
            distributor.on_robot_opened(peer.name)

    def _assign_relayed(self, peer: Peer) -> None:
        """Assigns a robot that gets its weights from a relay: its learner waits for it too."""
        with self._lock:
            former, name = self._learner_by_relayed_robot.pop(peer.name, None), self._learner_for(peer)
            if name is not None:
                self._learner_by_relayed_robot[peer.name] = name
        if former is not None and former != name:
            self._distributors[former].on_peer_closed(peer.name)

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
