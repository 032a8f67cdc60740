"""A learner, a gateway, possibly a relay, and two robots, over simulated links of any delay and bandwidth.

Each robot gets versions in order, and the last one, also if links are cut and processes restart. Time is simulated. A
cut link loses the messages in flight.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from user_sys.codec import Array
from user_sys.gateway.announcer import SendMessage
from user_sys.gateway.weights import WeightsDistributor
from user_sys.messages import (
    NO_VERSION,
    Precision,
    PublisherEpoch,
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
from user_sys.weights.distribution import OFFER_PIN_S
from user_sys.weights.governor import GovernorConfig
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import UpdatePlanner
from user_sys.weights.signing import PUBLIC_SUFFIX, TrustedLearnerKey, ensure_signer
from user_sys.weights.version_store import VersionStore

LINKS = ((0.001, 5e7), (0.05, 1.25e7), (0.3, 2e6), (0.6, 2.5e6), (0.04, 125e3), (0.2, 5e5), (1.0, 1e6))
"""Seconds of a round trip, and bytes/s."""
SIZES = ((1, 4 << 10), (16, 4 << 10), (512, 4 << 10), (1, 200 << 10), (16, 200 << 10), (512, 200 << 10))
"""Number of tensors and their total bytes; 512 tensors have a separate table."""
TRAINED = ("all", "few values", "adapter", "half", "now this, now that")
TROUBLE = ("link of a robot", "robot", "link of the learner", "gateway", "learner", "envoy", "link of the relay")
AWAY_S = 2.0

Deliver = Callable[[AnyMessage, Payload | None], None]


class SimulatedLink:
    """Two directions, each with half the round trip as delay and a limited bandwidth."""

    def __init__(self, clock: Callable[[], float], round_trip_s: float, bytes_per_s: float) -> None:
        self.round_trip_s, self.bytes_per_s, self.up = round_trip_s, bytes_per_s, True
        self._clock = clock
        self._free_s = {"there": 0.0, "back": 0.0}
        self._coming = {way: deque[tuple[float, Deliver, AnyMessage, Payload | None]]() for way in self._free_s}

    def send(
        self, way: Literal["there", "back"], deliver: Deliver, message: AnyMessage, payload: Payload | None
    ) -> bool:
        if not self.up:
            return False
        content = None if payload is None else bytes(payload)
        size = 200 + len(content or b"")
        if isinstance(message, WeightsOffer):
            size += 150 * len(message.parcels) + sum(len(signed.body) for signed in message.manifests)
        self._free_s[way] = max(self._free_s[way], self._clock()) + size / self.bytes_per_s
        self._coming[way].append((self._free_s[way] + self.round_trip_s / 2, deliver, message, content))
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

    def __init__(self, name: str, link: SimulatedLink, forms: tuple[Precision, ...], world: WeightsSimulation) -> None:
        self.name, self.link, self.forms, self.world = name, link, forms, world
        self.loaded_s = list[float]()
        self.start()

    def start(self) -> None:
        world, trust = self.world, TrustedLearnerKey(self.world.folder / f"learner{PUBLIC_SUFFIX}")
        self.receiver = UpdatePlanner(trust, self._load, self._ask, precisions=self.forms, clock=lambda: world.now_s)
        self._fresh = False

    def hears(self, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsOffer):
            self.receiver.on_offer(message)
            self._fresh |= message.greeting
        else:
            self.receiver.on_reply(message, None if payload is None else memoryview(payload))  # type: ignore[arg-type]

    def step(self) -> float:
        wait_s = self.receiver.step()
        if self._fresh:
            self._fresh = False
            self._say(self._applied())
        return wait_s

    def _load(self, manifest: WeightsManifest, arrays: Mapping[str, Array], heard_s: float) -> None:
        self.loaded_s.append(self.world.now_s)
        self._fresh = True

    def _applied(self) -> WeightsApplied:
        if (held := self.receiver.loaded) is None:
            return WeightsApplied(robot=self.name, version=NO_VERSION, seconds=0.0)
        told = WeightsApplied(robot=self.name, version=held.manifest.version, seconds=0.0)
        room_bytes = self.receiver.prefetch_budget_bytes
        return replace(told, form=held.manifest.form, digest=held.manifest.digest, ahead_bytes=room_bytes)

    def _ask(self, patch: bytes, first: int, count: int) -> bool:
        return self._say(WeightsRequest(parcel=patch, first=first, count=count))

    def _say(self, message: AnyMessage) -> bool:
        return self.link.send(
            "back", lambda m, p: self.world.distributors[-1].on_message(self.name, m, p), message, None
        )


class WeightsSimulation:
    """One simulation, determined by `seed`. `links` lead from the learner to the gateway, and on to the relay."""

    def __init__(self, folder: Path, seed: int, trouble: bool) -> None:
        self.folder, self.rng, self.now_s = folder, random.Random(seed), 0.0
        self.trouble = trouble
        self.signer = ensure_signer(folder, "learner")
        self.forms: tuple[Precision, ...] = self.rng.choice(
            [("exact",), ("exact",), ("exact", "bf16"), ("exact", "int8")]
        )
        self.period_s = self.rng.choice([0.02, 0.05, 0.1, 0.5, 2.0])
        self.trained = self.rng.choice(TRAINED)
        tensors, size = self.rng.choice(SIZES)
        draws = np.random.default_rng(seed)
        self.weights = {f"layers.{n:04d}.weight": noise(size // 4 // tensors, draws) for n in range(tensors)}
        self.weights["adapter"] = noise(size // 40, draws)
        self.links = [self._link() for _ in range(self.rng.choice([1, 1, 2]))]
        self.distributors = [self._distributor(n) for n in range(len(self.links))]
        forms = (self.forms, self.forms[:1])
        self.robots = [SimulatedRobot(f"robot-{n}", self._link(), self.rng.choice(forms), self) for n in range(2)]
        self.version, self.life = 0, 0
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.learner()
        self.join_relay()
        for robot in self.robots:
            self.join(robot)

    @property
    def size_bytes(self) -> int:
        table_bytes = 80 * len(self.weights)
        return len(self.forms) * (sum(array.nbytes for array in self.weights.values()) + table_bytes)

    def patience_s(self, robot: SimulatedRobot) -> float:
        """The most time of a version to a robot, including one failed request."""
        links = [*self.links, robot.link]
        return 5.0 + sum(3 * self.size_bytes / link.bytes_per_s + 6 * link.round_trip_s for link in links)

    # Participants

    def learner(self) -> None:
        """Starts the learner, or its publisher process."""
        self.life += 1
        config = PublishConfig(precisions=self.forms, governor=GovernorConfig(enabled=False))
        clock, life = (lambda: self.now_s), PublisherEpoch(b"run", self.life)
        self.publisher = Publisher(self, self.signer, config, epoch=life, clock=clock)
        self.links[0].up = True
        self.distributors[0].on_learner_opened("learner")

    def join_relay(self) -> None:
        if len(self.links) > 1:
            self.links[1].up = True
            self.distributors[0].on_robot_opened("relay")

    def join(self, robot: SimulatedRobot) -> None:
        robot.link.up = True
        self.distributors[-1].on_robot_opened(robot.name)

    def _link(self) -> SimulatedLink:
        return SimulatedLink(lambda: self.now_s, *self.rng.choice(LINKS))

    def _distributor(self, number: int) -> WeightsDistributor:
        return WeightsDistributor(
            VersionStore(self.folder / f"distributor-{number}"), self._sender(number), 2, clock=lambda: self.now_s
        )

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
            return robot.link.send("there", robot.hears, message, payload)

        return send

    def _to_learner(self, message: AnyMessage, payload: Payload | None) -> None:
        self.publisher.on_message(Envelope(message, payload))

    def _to_relay(self, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsOffer) and (message.greeting or not self.distributors[1].has_learner):
            self.distributors[1].on_learner_opened("learner")
        self.distributors[1].on_message("learner", message, payload)

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        return self.links[0].send(
            "there", lambda m, p: self.distributors[0].on_message("learner", m, p), message, payload
        )

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        return None

    # Events

    def run(self, seconds: float, publish: bool) -> None:
        end_s, next_s = self.now_s + seconds, self.now_s
        trouble_s = self.now_s + self.rng.expovariate(0.2) if self.trouble and publish else np.inf
        links = [*self.links, *(robot.link for robot in self.robots)]
        while self.now_s < end_s:
            if publish and self.now_s >= next_s:
                self.train()
                next_s += self.period_s
            if self.now_s >= trouble_s:
                self.cause_trouble()
                trouble_s = self.now_s + self.rng.expovariate(0.2)
            for due in [due for due in self.later if due[0] <= self.now_s]:
                self.later.remove(due)
                due[1]()
            for link in links:
                link.carry()
            self.publisher.offer_if_due()
            wait_s = min(min(map(self._work, self.distributors)), min(robot.step() for robot in self.robots))
            events_s = [link.next_s() for link in links] + [at_s for at_s, _ in self.later]
            until_s = min(end_s, trouble_s, next_s if publish else np.inf, self.now_s + max(1e-3, wait_s), *events_s)
            self.now_s = max(self.now_s + 1e-4, until_s)

    def _work(self, distributor: WeightsDistributor) -> float:
        wait_s = distributor.step(0.0)
        while distributor.has_messages:
            wait_s = distributor.step(0.0)
        return wait_s

    def train(self) -> None:
        self.version += 1
        draws = np.random.default_rng(self.version)
        trained = self.trained if self.trained in TRAINED[:-1] else self.rng.choice(TRAINED[:-1])
        names = [name for name in self.weights if name != "adapter"]
        fresh = {"adapter": ["adapter"], "half": names[: len(names) // 2 + 1], "all": names, "few values": []}[trained]
        self.weights |= {name: noise(self.weights[name].size, draws) for name in fresh}
        if trained == "few values":
            for name, array in self.weights.items():
                self.weights[name] = array.copy()
                self.weights[name][self.version % 100 :: 100] += 1
        self.bring_out()

    def bring_out(self) -> None:
        self.publisher.publish(dict(self.weights), self.version, self.version)
        assert self.publisher.encode_pending()

    def cause_trouble(self) -> None:
        what, robot = self.rng.choice(TROUBLE), self.rng.choice(self.robots)
        if what in ("robot", "link of a robot") and robot.link.up:
            robot.link.cut()
            self.distributors[-1].on_peer_closed(robot.name)
            if what == "robot":
                robot.start()
            self._soon(lambda: self.join(robot))
        elif what == "link of the learner" and self.links[0].up:
            self._leave_learner()
            self._soon(self._back)
        elif what in ("learner", "envoy") and self.links[0].up:
            self._leave_learner()
            self.version += 100 if what == "learner" else 0  # reserved version numbers, or the same again
            self.learner()
            self.bring_out()
        elif what == "link of the relay" and self.links[-1].up and len(self.links) > 1:
            self.links[1].cut()
            self.distributors[0].on_peer_closed("relay")
            self._soon(self.join_relay)
        elif what == "gateway" and not self.later:
            for link in self.links:
                link.cut()
            self.distributors[0] = self._distributor(0)
            self._back()
            self.join_relay()
            for each in self.robots if len(self.distributors) == 1 else ():
                each.link.cut()
                self.join(each)

    def _leave_learner(self) -> None:
        self.links[0].cut()
        self.distributors[0].on_peer_closed("learner")

    def _back(self) -> None:
        self.links[0].up = True
        self.distributors[0].on_learner_opened("learner")

    def _soon(self, act: Callable[[], None]) -> None:
        self.later.append((self.now_s + self.rng.uniform(0.1, AWAY_S), act))


def noise(size: int, draws: np.random.Generator) -> Array:
    """Incompressible values."""
    return draws.integers(0, 1 << 30, max(1, size), np.uint32).view(np.float32)


def check(folder: Path, seed: int, trouble: bool) -> None:
    world = WeightsSimulation(folder, seed, trouble)
    seconds = min(max(10.0, 3 * max(map(world.patience_s, world.robots))), 400 * world.period_s)
    world.run(seconds, publish=True)
    for robot in world.robots:
        waits_s = np.diff([0.0, *robot.loaded_s, world.now_s])
        assert trouble or max(waits_s) < world.patience_s(robot), (robot.name, waits_s)
    world.run(max(map(world.patience_s, world.robots)) + AWAY_S, publish=False)
    for robot in world.robots:
        assert robot.receiver.loaded_version == world.version and robot.receiver.loaded is not None, robot.name
        assert trouble or not robot.receiver.rejected, "of a new life it may hear first in another form"
        sent, _ = world.publisher.server.index.manifests[robot.receiver.loaded.manifest.form, world.version]
        assert robot.receiver.loaded.state.digest == sent.digest
    for distributor in world.distributors:
        most = 60 + 4 * OFFER_PIN_S * len(world.forms) / world.period_s
        assert len(distributor.index.patches) < most, "what nobody will want is given up"


@pytest.mark.parametrize("trouble", [False, True])
@pytest.mark.parametrize("seed", [1, 3, 5, 10, 11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))])
def test_every_robot_gets_versions_in_order_and_the_last(tmp_path: Path, seed: int, trouble: bool) -> None:
    check(tmp_path, seed, trouble)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_every_robot_gets_the_last_version_in_many_simulations(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, trouble=seed % 2 == 1)
