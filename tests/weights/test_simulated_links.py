"""Every robot gets versions in order, and the last one, over links of any delay and bandwidth.

The links are cut and processes restart. A cut link loses the messages in flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from weights_simulation import SimulatedLink, WeightsSimulation, noise, with_few_changes

from user_sys.messages import Precision
from user_sys.weights.catalog import OFFER_PIN_S

LINKS = ((0.001, 5e7), (0.05, 1.25e7), (0.3, 2e6), (0.6, 2.5e6), (0.04, 125e3), (0.2, 5e5), (1.0, 1e6))
"""Seconds of a round trip, and bytes/s."""
SIZES = ((1, 4 << 10), (16, 4 << 10), (300, 4 << 10), (1, 200 << 10), (16, 200 << 10), (300, 200 << 10))
"""Number of tensors and their total bytes; 300 tensors have a table that is not part of the offer."""
TRAINED = ("all", "few values", "adapter", "half", "changing")
TROUBLE = ("robot link", "robot", "learner link", "gateway", "learner", "publisher", "relay link")
AWAY_S = 2.0


class World:
    """A simulation with a learner that trains; `seed` determines it."""

    def __init__(self, folder: Path, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.precisions: tuple[Precision, ...] = rng.choice([("exact",), ("exact",), ("exact", "bf16")])
        self.period_s = rng.choice([0.02, 0.05, 0.1, 0.5, 2.0])
        self.trained = rng.choice(TRAINED)
        tensors, size = rng.choice(SIZES)
        draws = np.random.default_rng(seed)
        weights = {f"layers.{n:04d}.weight": noise(size // 4 // tensors, draws) for n in range(tensors)}
        weights["adapter"] = noise(size // 40, draws)
        robots = tuple(rng.choice([self.precisions, self.precisions[::-1], ("exact",)]) for _ in range(2))
        self.simulation = WeightsSimulation(
            folder, weights, self.precisions, seed, links=rng.choice([1, 1, 2]), make_link=self._link, robots=robots
        )

    def _link(self) -> SimulatedLink:
        return SimulatedLink(self._now_s, *self.rng.choice(LINKS))

    def _now_s(self) -> float:
        return self.simulation.now_s

    def patience_s(self, robot: int) -> float:
        """The most time of a version to a robot, including one failed request."""
        sim = self.simulation
        size = len(self.precisions) * (sum(a.nbytes for a in sim.weights.values()) + 80 * len(sim.weights))
        links = [*sim.links, sim.robots[robot].link]
        return 5.0 + sum(3 * size / link.bytes_per_s + 6 * link.round_trip_s for link in links)

    def train(self) -> None:
        sim = self.simulation
        draws, weights = np.random.default_rng(sim.version + 1), dict(sim.weights)
        trained = self.trained if self.trained != "changing" else self.rng.choice(TRAINED[:-1])
        names = [name for name in weights if name != "adapter"]
        fresh = {"adapter": ["adapter"], "half": names[: len(names) // 2 + 1], "all": names, "few values": []}[trained]
        weights |= {name: noise(weights[name].size, draws) for name in fresh}
        if trained == "few values":
            weights = {name: with_few_changes(array, sim.version) for name, array in weights.items()}
        sim.publish(weights)

    def cause_trouble(self) -> None:
        sim, what, robot = self.simulation, self.rng.choice(TROUBLE), self.rng.choice(self.simulation.robots)
        if what in ("robot", "robot link") and robot.link.up:
            sim.leave(robot)
            if what == "robot":
                robot.start()
            self._soon(lambda: sim.join(robot))
        elif what == "learner link" and sim.links[0].up:
            sim.disconnect_learner()
            self._soon(sim.reconnect_learner)
        elif what in ("learner", "publisher") and sim.links[0].up:
            sim.disconnect_learner()
            sim.version += 100 if what == "learner" else 0  # reserved version numbers, or the same again
            sim.start_learner()
            if sim.version:
                sim.publish_again()
        elif what == "relay link" and sim.links[-1].up and len(sim.links) > 1:
            sim.links[1].cut()
            sim.distributors[0].on_peer_closed("relay")
            self._soon(sim.join_relay)
        elif what == "gateway" and not sim.later:
            sim.restart_gateway()

    def _soon(self, act: Callable[[], None]) -> None:
        self.simulation.later_in(self.rng.uniform(0.1, AWAY_S), act)

    def schedule_trouble(self, until_s: float) -> None:
        at_s = self.rng.expovariate(0.2)
        while at_s < until_s:
            self.simulation.later_in(at_s, self.cause_trouble)
            at_s += self.rng.expovariate(0.2)


def check(folder: Path, seed: int, trouble: bool) -> None:
    world = World(folder, seed)
    sim, robots = world.simulation, range(len(world.simulation.robots))
    seconds = min(max(10.0, 3 * max(map(world.patience_s, robots))), 150 * world.period_s)
    if trouble:
        world.schedule_trouble(seconds)
    sim.run(seconds, every_s=world.period_s, act=world.train)
    for number in robots:
        waits_s = np.diff([0.0, *sim.robots[number].loaded_s, sim.now_s])
        assert trouble or max(waits_s) < world.patience_s(number), (number, waits_s)
    sim.run(max(map(world.patience_s, robots)) + AWAY_S)
    sim.assert_robots_have_newest()
    for robot in sim.robots:
        assert not robot.planner.rejected
    most = (60 + 2 * OFFER_PIN_S / world.period_s) * len(world.precisions)
    for distributor in sim.distributors:
        assert len(distributor.catalog.versions) < most, "old versions are dropped"


@pytest.mark.parametrize(("seed", "trouble"), [(1, False), (2, True), (3, False), (5, True), (10, False), (11, True)])
def test_every_robot_gets_versions_in_order_and_the_last(tmp_path: Path, seed: int, trouble: bool) -> None:
    check(tmp_path, seed, trouble)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *range(100, 200)])
def test_every_robot_gets_the_last_version_in_many_simulations(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, trouble=seed % 2 == 1)
