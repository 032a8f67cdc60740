"""A learner, a gateway, possibly a relay, and robots, over simulated links. Time is simulated, so it is fast."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from user_sys.codec import Array
from user_sys.gateway.weights import WeightsDistributor
from user_sys.messages import (
    Precision,
    WeightsApplied,
    WeightsManifest,
    WeightsMessage,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.weights.catalog import SendMessage
from user_sys.weights.governor import GovernorConfig
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import UpdatePlanner
from user_sys.weights.signing import PUBLIC_SUFFIX, TrustedLearnerKey, ensure_signer
from user_sys.weights.version_store import VersionStore

RECORD_BYTES = 200  # of a message besides its payload
WANT_BYTES = 80

Deliver = Callable[[AnyMessage, Payload | None], None]


@dataclass(frozen=True)
class Faults:
    """Probabilities for each message of a link."""

    lost: float = 0.0
    repeated: float = 0.0
    swapped: float = 0.0
    corrupted: float = 0.0


class SimulatedLink:
    """Two directions, each with half the round trip as delay, a limited bandwidth, and faults."""

    def __init__(
        self,
        clock: Callable[[], float],
        round_trip_s: float,
        bytes_per_s: float,
        faults: Faults = Faults(),
        rng: random.Random | None = None,
    ) -> None:
        self.round_trip_s, self.bytes_per_s, self.up = round_trip_s, bytes_per_s, True
        self._clock, self._faults, self._rng = clock, faults, rng or random.Random(0)
        self._free_s = {"there": 0.0, "back": 0.0}
        self._coming = {way: deque[tuple[float, Deliver, AnyMessage, Payload | None]]() for way in self._free_s}

    def send(
        self, way: Literal["there", "back"], deliver: Deliver, message: AnyMessage, payload: Payload | None
    ) -> bool:
        if not self.up:
            return False
        content = None if payload is None else bytes(payload)
        size = RECORD_BYTES + len(content or b"")
        if isinstance(message, WeightsOffer):
            size += sum(map(len, message.tables)) + sum(len(signed.body) for signed in message.manifests)
        elif isinstance(message, WeightsRequest):
            size += WANT_BYTES * len(message.wants)
        self._free_s[way] = max(self._free_s[way], self._clock()) + size / self.bytes_per_s
        draw, faults, coming = self._rng.random, self._faults, self._coming[way]
        if draw() < faults.lost:
            return True
        if content and draw() < faults.corrupted:
            at = self._rng.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        arrival = self._free_s[way] + self.round_trip_s / 2
        for _ in range(2 if draw() < faults.repeated else 1):
            coming.append((arrival, deliver, message, content))
        if len(coming) > 1 and draw() < faults.swapped:
            coming[-1], coming[-2] = coming[-2], coming[-1]
        return True

    def cut(self) -> None:
        self.up = False
        for coming in self._coming.values():
            coming.clear()
        self._free_s = dict.fromkeys(self._free_s, self._clock())

    def carry(self) -> None:
        for coming in self._coming.values():
            while coming and coming[0][0] <= self._clock():
                _, deliver, message, payload = coming.popleft()
                deliver(message, payload)

    def next_s(self) -> float:
        return min((coming[0][0] for coming in self._coming.values() if coming), default=np.inf)


class SimulatedRobot:
    """
    Attributes:
        loaded_s: the times of its new weights.
    """

    def __init__(
        self, name: str, link: SimulatedLink, precisions: tuple[Precision, ...], world: WeightsSimulation
    ) -> None:
        self.name, self.link, self.precisions, self.world = name, link, precisions, world
        self.loaded_s = list[float]()
        self.start()

    def start(self) -> None:
        world, trust = self.world, TrustedLearnerKey(self.world.folder / f"learner{PUBLIC_SUFFIX}")
        self.planner = UpdatePlanner(
            trust, self._load, self._send, precisions=self.precisions, clock=lambda: world.now_s
        )
        self.weights: Mapping[str, Array] = {}
        self._has_changed = False

    def on_message(self, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsOffer):
            self.planner.on_offer(message)
            self._has_changed |= message.greeting
        else:
            self.planner.on_reply(message, None if payload is None else memoryview(payload))  # type: ignore[arg-type]

    def step(self) -> float:
        wait_s = self.planner.step()
        if self._has_changed:
            self._has_changed = False
            self._send(WeightsApplied(robot=self.name, version=self.planner.loaded_version, seconds=0.0))
        return wait_s

    def _load(self, manifest: WeightsManifest, arrays: Mapping[str, Array], announced_s: float) -> None:
        self.loaded_s.append(self.world.now_s)
        self.weights = arrays
        self._has_changed = True

    def _send(self, message: AnyMessage) -> bool:
        return self.link.send(
            "back", lambda m, p: self.world.distributors[-1].on_message(self.name, m, p), message, None
        )


class WeightsSimulation:
    """One simulation. `links` lead from the learner to the gateway, and on to the relay if there are two."""

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, Array],
        precisions: tuple[Precision, ...],
        seed: int,
        *,
        links: int,
        make_link: Callable[[], SimulatedLink],
        robots: tuple[tuple[Precision, ...], ...],
        kept: int = 2,
    ) -> None:
        self.folder, self.rng, self.now_s = folder, random.Random(seed), 0.0
        self.signer = ensure_signer(folder, "learner")
        self.precisions, self.weights, self.kept = precisions, dict(weights), kept
        self.links = [make_link() for _ in range(links)]
        self.distributors = [self.make_distributor(n) for n in range(links)]
        self.robots = [SimulatedRobot(f"robot-{n}", make_link(), each, self) for n, each in enumerate(robots)]
        self.version = self.epoch = 0
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.start_learner()
        self.join_relay()
        for robot in self.robots:
            self.join(robot)

    # Participants

    def start_learner(self) -> None:
        """Starts the learner, or its publisher process."""
        self.epoch += 1
        config = PublishConfig(precisions=self.precisions, governor=GovernorConfig(enabled=False))
        self.publisher = Publisher(self, self.signer, config, run=b"run", epoch=self.epoch, clock=lambda: self.now_s)
        self.reconnect_learner()

    def reconnect_learner(self) -> None:
        self.links[0].up = True
        self.distributors[0].on_learner_opened("learner")

    def disconnect_learner(self) -> None:
        self.links[0].cut()
        self.distributors[0].on_peer_closed("learner")

    def join_relay(self) -> None:
        if len(self.links) > 1:
            self.links[1].up = True
            self.distributors[0].on_robot_opened("relay")

    def join(self, robot: SimulatedRobot) -> None:
        robot.link.up = True
        self.distributors[-1].on_robot_opened(robot.name)

    def leave(self, robot: SimulatedRobot) -> None:
        robot.link.cut()
        self.distributors[-1].on_peer_closed(robot.name)

    def restart_gateway(self) -> None:
        for link in self.links:
            link.cut()
        self.distributors[0] = self.make_distributor(0)
        self.reconnect_learner()
        self.join_relay()
        for robot in self.robots if len(self.distributors) == 1 else ():
            robot.link.cut()
            self.join(robot)

    def make_distributor(self, number: int) -> WeightsDistributor:
        store = VersionStore(self.folder / f"distributor-{number}")
        return WeightsDistributor(store, self._sender(number), self.kept, clock=lambda: self.now_s)

    def _sender(self, number: int) -> SendMessage:
        def send(name: str, message: AnyMessage, payload: Payload | None) -> bool:
            if name == "learner" and number == 0:
                return self.links[0].send("back", self._to_learner, message, payload)
            if name == "learner":
                if isinstance(message, WeightsOfferRequest | WeightsProgress | WeightsReceived):
                    return True  # as in `Relay`: only the gateway handles it
                return self.links[1].send(
                    "back", lambda m, p: self.distributors[0].on_message("relay", m, p), message, payload
                )
            if name == "relay":
                return self.links[1].send("there", self._to_relay, message, payload)
            robot = next(robot for robot in self.robots if robot.name == name)
            return robot.link.send("there", robot.on_message, message, payload)

        return send

    def _to_learner(self, message: AnyMessage, payload: Payload | None) -> None:
        self.publisher.on_message(Envelope(message, payload))

    def _to_relay(self, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsOffer) and (message.greeting or not self.distributors[1].learner):
            self.distributors[1].on_learner_opened("learner")
        self.distributors[1].on_message("learner", message, payload)

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        return self.links[0].send(
            "there", lambda m, p: self.distributors[0].on_message("learner", m, p), message, payload
        )

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        return None

    # Events

    def publish(self, weights: Mapping[str, Array]) -> None:
        self.version += 1
        self.weights = dict(weights)
        self.publisher.publish(dict(weights), self.version, self.version)
        assert self.publisher.encode_pending()

    def publish_again(self) -> None:
        self.publisher.publish(dict(self.weights), self.version, self.version)
        assert self.publisher.encode_pending()

    def later_in(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((self.now_s + seconds, act))

    def run(self, seconds: float, *, every_s: float = np.inf, act: Callable[[], None] = lambda: None) -> None:
        """Runs for so long, and calls `act` every `every_s`."""
        end_s, next_s = self.now_s + seconds, self.now_s
        links = [*self.links, *(robot.link for robot in self.robots)]
        while self.now_s < end_s:
            if self.now_s >= next_s and np.isfinite(every_s):
                act()
                next_s += every_s
            for due in [due for due in self.later if due[0] <= self.now_s]:
                self.later.remove(due)
                due[1]()
            for link in links:
                link.carry()
            self.publisher.step()
            waits_s = [*map(self._work, self.distributors), *(robot.step() for robot in self.robots)]
            events_s = [link.next_s() for link in links] + [at_s for at_s, _ in self.later]
            until_s = min(end_s, next_s if np.isfinite(every_s) else np.inf, self.now_s + min(waits_s), *events_s)
            self.now_s = max(self.now_s + 1e-4, until_s)

    def _work(self, distributor: WeightsDistributor) -> float:
        wait_s = distributor.step(0.0)
        while distributor.has_events:
            wait_s = distributor.step(0.0)
        return max(1e-3, wait_s)

    def sent_digest(self, precision: Precision) -> bytes:
        """The digest of the newest version at the publisher."""
        found = self.publisher.catalog.of_number(self.version)
        return next(each.manifest.digest for each in found if each.manifest.precision == precision)

    def assert_robots_have_newest(self) -> None:
        for robot in self.robots:
            loaded = robot.planner.loaded
            assert loaded is not None and loaded.manifest.version == self.version, (
                robot.name, robot.planner.loaded_version, self.version)  # fmt: skip
            assert loaded.manifest.digest == self.sent_digest(loaded.manifest.precision)
            if loaded.manifest.precision == "exact":
                for name, array in self.weights.items():
                    assert np.asarray(robot.weights[name]).tobytes() == np.asarray(array).tobytes(), name


def noise(size: int, draws: np.random.Generator) -> Array:
    """Incompressible values."""
    return draws.integers(0, 1 << 30, max(1, size), np.uint32).view(np.float32)


def with_few_changes(array: Array, number: int) -> Array:
    """A hundredth of the values changes."""
    changed = array.copy()
    changed[number % 100 :: 100] += 1
    return changed
