"""When the learner publishes: after time, updates, episodes, or when the policy has moved; and when it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from user_sys.algorithms.conformance import example_batch
from user_sys.algorithms.rlpd import Rlpd
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.learner.learner import VersionPublisher
from user_sys.policies.conformance import example_spec
from user_sys.weights.distribution import StalenessHistogram
from user_sys.weights.gpu_copy import HostCopier
from user_sys.weights.publisher import PublishConfig

NEVER = PublishConfig(every_s=1e9)


class CountingPublisher:
    """Counts what is published."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.versions_ahead, self.is_busy = 0, False

    def publish(self, arrays: Mapping[str, Array], version: int, updates: int) -> None:
        assert version == len(self.updates) + 1
        self.updates.append(updates)

    def observe(self, seconds: float) -> None:
        return

    def scalars(self) -> dict[str, float]:
        return {}


class SimulatedLoop:
    """A learner's loop, one update a second."""

    def __init__(self, config: PublishConfig) -> None:
        self.sink, self.now_s, self.moved, self.episodes = CountingPublisher(), 0.0, 0.0, 0
        self.publishing = VersionPublisher(config, self.sink, lambda: self.now_s)
        self.publishing.version_limit = 1000

    def run(self, updates: int, moves: float = 0.0) -> list[int]:
        for update in range(1, updates + 1):
            self.now_s += 1.0
            self.moved += moves
            self.publishing.update_episode_count(lambda: self.episodes)
            self.publishing.publish_if_due(update, lambda: {"w": np.zeros(1)}, self.kl)
        return self.sink.updates

    def kl(self, former: Mapping[str, Array]) -> float:
        moved, self.moved = self.moved, 0.0
        return moved


def test_every_so_many_updates() -> None:
    assert SimulatedLoop(replace(NEVER, every_s=0.0, every_updates=7)).run(30) == [7, 14, 21, 28]


def test_every_so_many_seconds() -> None:
    assert SimulatedLoop(PublishConfig(every_s=10.0)).run(25) == [1, 11, 21]


def test_at_the_ends_of_episodes() -> None:
    loop = SimulatedLoop(replace(NEVER, every_s=0.0, at_episode_ends=True))
    assert loop.run(5) == []
    loop.episodes = 3
    assert loop.run(5) == [1]
    loop.episodes = 4
    assert loop.run(2)[1:] == [2]


def test_when_the_policy_has_moved_far_enough() -> None:
    loop = SimulatedLoop(replace(NEVER, every_s=0.0, kl=0.5))
    assert loop.run(100, moves=0.01)[0] == 10, "the first is due at the first measurement"
    assert len(loop.sink.updates) == 1
    assert len(SimulatedLoop(replace(NEVER, every_s=0.0, kl=0.05)).run(100, moves=0.01)) == 10


def test_no_snapshot_is_taken_while_the_version_before_is_not_ready() -> None:
    loop = SimulatedLoop(replace(NEVER, every_s=0.0, every_updates=2))
    loop.sink.is_busy = True
    assert loop.run(5) == []
    loop.sink.is_busy = False
    assert loop.run(1) == [], "one update is not enough"
    assert loop.run(3) == [2], "what is due waits, and is taken as it is then"


def test_no_number_is_given_that_no_checkpoint_reserved() -> None:
    loop = SimulatedLoop(PublishConfig(every_s=0.0, every_updates=1))
    loop.publishing.version_limit = 4
    assert loop.run(10) == [1, 2, 3, 4] and loop.publishing.version == 4


def test_the_learner_waits_for_robots_that_are_too_far_behind_when_it_is_told_to() -> None:
    loop = SimulatedLoop(replace(NEVER, max_versions_ahead=3))
    for lead, waits in ((0, False), (3, False), (4, True)):
        loop.sink.versions_ahead = lead
        assert loop.publishing.is_too_far_ahead is waits
    assert not SimulatedLoop(NEVER).publishing.is_too_far_ahead


@pytest.mark.parametrize("wrong", [{"every_s": 0.0}, {"every_s": -1.0}, {"kl": -0.1}, {"precisions": ()}])
def test_settings_that_publish_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.publish"):
        PublishConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("fetched", [False, True])
def test_how_far_a_policy_has_moved_is_zero_at_first_and_grows(fetched: bool) -> None:
    spec, batch = example_spec(), example_batch(np.random.default_rng(0), 64)
    config = RlpdConfig(actor_hidden=(16,), critic_hidden=(8,), critics=2, acting_rate=1.0)
    algorithm = Rlpd(config, spec, seed=0, copier=HostCopier(torch.device("cpu")) if fetched else None)
    former = algorithm.policy_snapshot() if fetched else algorithm.policy_weights()
    assert algorithm.policy_kl(former, batch) == pytest.approx(0.0, abs=1e-6)
    found = []
    for _ in range(3):
        for _ in range(20):
            algorithm.update(batch)
        found.append(algorithm.policy_kl(former, batch))
    assert 0 < found[0] < found[-1]


def test_staleness_is_counted_from_when_a_version_was_overtaken() -> None:
    staleness = StalenessHistogram()
    for version, at_s in ((1, 0.0), (2, 10.0), (3, 12.0)):
        staleness.set_newest(version, at_s)
    for robot, version in (("new", 3), ("old", 2), ("older", 1)):
        staleness.set_version(robot, version)
    staleness.sample(12.5)
    found = staleness.scalars()
    assert (found["staleness_s/new"], found["staleness_s/old"], found["staleness_s/older"]) == (0.0, 0.5, 2.5)
    assert found["staleness_s/old/up_to_0.2"] == 0 and found["staleness_s/old/up_to_0.5"] == 1
    assert staleness.oldest_in_use == 1
    staleness.remove("older")
    assert staleness.oldest_in_use == 2 and "staleness_s/older" not in staleness.scalars()
