"""Many versions through drops, reorders, duplicates, corruption, restarts of each party and wrong bases."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from weights_simulation import Faults, SimulatedLink, WeightsSimulation, noise, with_few_changes

from user_sys.codec import Array

FAULTS = Faults(lost=0.02, repeated=0.05, swapped=0.05, corrupted=0.02)
PERIOD_S = 0.5


class LossyWorld:
    """Two robots behind a relay. The learner trains all weights, few values, or an adapter."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        draws = np.random.default_rng(seed)
        weights = {"frozen": noise(5_000, draws), "w": noise(5_000, draws), "adapter": noise(200, draws)}
        robots: tuple[tuple[str, ...], ...] = (("exact",), ("bf16", "exact"))
        self.simulation = WeightsSimulation(
            folder,
            weights,
            ("exact", "bf16"),
            seed,
            links=2,
            make_link=self._link,
            robots=robots,  # type: ignore[arg-type]
        )

    def _link(self) -> SimulatedLink:
        return SimulatedLink(lambda: self.simulation.now_s, 0.02, 5e6, FAULTS, self.rng)

    def act(self) -> None:
        """Publishes a version; now and then a party restarts or loses its link."""
        sim, draws = self.simulation, np.random.default_rng(self.simulation.version)
        weights: dict[str, Array] = dict(sim.weights)
        match self.rng.randrange(4):
            case 0:
                weights["w"] = noise(weights["w"].size, draws)
            case 1:
                weights["w"] = with_few_changes(weights["w"], sim.version)
            case 2:
                weights["adapter"] = noise(200, draws)
            case 3:
                weights = {name: with_few_changes(array, sim.version) for name, array in weights.items()}
        sim.publish(weights)
        if self.rng.random() < 0.03:
            self.rng.choice((self.restart_robot, self.restart_publisher, sim.restart_gateway, self.restart_relay))()

    def restart_robot(self) -> None:
        robot = self.rng.choice(self.simulation.robots)
        self.simulation.leave(robot)
        robot.start()
        self.simulation.join(robot)

    def restart_publisher(self) -> None:
        self.simulation.disconnect_learner()
        self.simulation.start_learner()
        self.simulation.publish_again()

    def restart_relay(self) -> None:
        sim = self.simulation
        sim.links[1].cut()
        sim.distributors[0].on_peer_closed("relay")
        sim.distributors[1] = sim.make_distributor(1)
        sim.join_relay()
        for robot in sim.robots:
            robot.link.cut()
            sim.join(robot)


def check(folder: Path, seed: int, versions: int) -> None:
    world = LossyWorld(folder, seed)
    world.simulation.run(versions * PERIOD_S - PERIOD_S / 2, every_s=PERIOD_S, act=world.act)
    assert world.simulation.version == versions
    for _ in range(20):  # the last messages may be lost; each further version is another chance
        world.simulation.run(10.0)
        try:
            world.simulation.assert_robots_have_newest()
        except AssertionError:
            world.simulation.publish(world.simulation.weights)
    world.simulation.assert_robots_have_newest()
    for robot in world.simulation.robots:
        assert len(robot.loaded_s) > versions / 4


def test_versions_end_digest_equal(tmp_path: Path) -> None:
    check(tmp_path, 0, 200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_versions_end_digest_equal(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, 1000)
