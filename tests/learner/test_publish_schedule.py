"""When the learner publishes: after time, updates or episodes; and when it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from user_sys.codec import Array
from user_sys.errors import ConfigError
from user_sys.learner.learner import VersionPublisher
from user_sys.weights.publisher import PublishConfig

NEVER = PublishConfig(every_s=1e9)


class CountingPublisher:
    """Counts what is published."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.versions_ahead, self.pinned_version, self.is_busy = 0, -1, False

    def publish(self, arrays: Mapping[str, Array], version: int, updates: int) -> None:
        assert version == len(self.updates) + 1
        self.updates.append(updates)

    def observe(self, seconds: float) -> None:
        return

    def scalars(self) -> dict[str, float]:
        return {}


class SimulatedLoop:
    """A learner's loop, one update a second."""

    def __init__(self, config: PublishConfig, staleness: int | None = None, **settings: bool) -> None:
        self.sink, self.now_s, self.episodes = CountingPublisher(), 0.0, 0
        self.publishing = VersionPublisher(config, self.sink, lambda: self.now_s, staleness, **settings)
        self.publishing.version_limit = 1000

    def run(self, updates: int) -> list[int]:
        for update in range(1, updates + 1):
            self.now_s += 1.0
            self.publishing.update_episode_count(lambda: self.episodes)
            if self.publishing.is_due(update):
                self.publishing.publish(update, self)
        return self.sink.updates

    def policy_snapshot(self) -> Mapping[str, Array]:
        return {"w": np.zeros(1)}


def test_publishes_after_so_many_updates() -> None:
    assert SimulatedLoop(replace(NEVER, every_s=0.0, every_updates=7)).run(30) == [7, 14, 21, 28]


def test_publishes_after_so_many_seconds() -> None:
    assert SimulatedLoop(PublishConfig(every_s=10.0)).run(25) == [1, 11, 21]


def test_publishes_at_episode_ends() -> None:
    loop = SimulatedLoop(replace(NEVER, every_s=0.0, at_episode_ends=True))
    assert loop.run(5) == []
    loop.episodes = 3
    assert loop.run(5) == [1]
    loop.episodes = 4
    assert loop.run(2)[1:] == [2]


@pytest.mark.parametrize("when", [{"every_updates": 500}, {"at_episode_ends": True}, {"every_s": 300.0}])
def test_pretrained_policy_is_published_before_the_first_update(when: dict[str, Any]) -> None:
    loop = SimulatedLoop(replace(NEVER, **{"every_s": 0.0, **when}), is_pretrained=True)
    assert loop.publishing.is_due(0)
    loop.publishing.publish(0, loop)
    assert not loop.publishing.is_due(0) and loop.run(5) == [0]


def test_busy_publisher_delays_the_snapshot() -> None:
    loop = SimulatedLoop(replace(NEVER, every_s=0.0, every_updates=2))
    loop.sink.is_busy = True
    assert loop.run(5) == []
    loop.sink.is_busy = False
    assert loop.run(1) == [], "one update is not enough"
    assert loop.run(3) == [2], "what is due waits, and is taken as it is then"


def test_unreserved_version_is_not_published() -> None:
    loop = SimulatedLoop(PublishConfig(every_s=0.0, every_updates=1))
    loop.publishing.version_limit = 4
    assert loop.run(10) == [1, 2, 3, 4] and loop.publishing.version == 4


def test_learner_waits_for_stale_robots_on_request() -> None:
    loop = SimulatedLoop(NEVER, staleness=3)
    for lead, waits in ((0, False), (3, False), (4, True)):
        loop.sink.versions_ahead = lead
        assert loop.publishing.is_too_far_ahead is waits
    loop = SimulatedLoop(NEVER)
    loop.sink.versions_ahead = 1000
    assert not loop.publishing.is_too_far_ahead


def test_on_policy_training_publishes_first_and_after_each_update() -> None:
    loop = SimulatedLoop(replace(NEVER, after_updates=5), staleness=0, after_each_update=True)
    loop.sink.is_busy = True  # such as by the governor's pause
    assert loop.publishing.is_due(0)
    loop.publishing.publish(0, loop)
    assert loop.run(3) == [0, 1, 2, 3] and loop.publishing.is_published(3) and not loop.publishing.is_published(2)


def test_pin_holds_the_learner_that_waits_for_its_robots() -> None:
    loop = SimulatedLoop(NEVER, staleness=1)
    for lead, pinned, is_held in ((1, 4, False), (3, 4, True), (3, -1, False)):
        loop.sink.versions_ahead, loop.sink.pinned_version = lead, pinned
        assert loop.publishing.is_held_by_pin is is_held


@pytest.mark.parametrize("wrong", [{"every_s": 0.0}, {"precisions": ()}])
def test_settings_that_publish_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.publish"):
        PublishConfig(**wrong)  # type: ignore[arg-type]
