"""A policy whose weights arrive while it acts: when it swaps, and what it reports."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from wait_kit import until

from hal.spec import Array, RobotSpec
from user_sys.errors import PolicyUnavailable, SessionRefused
from user_sys.inference.live_policy import LivePolicy
from user_sys.messages import SignedRecord, WeightsApplied, WeightsOffer
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.policy import ActionChunk, Policy, PolicyQuery
from user_sys.tunnel.protocol import Envelope, TunnelState
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig, UpdatePlanner

OBSERVATION = example_observation(np.random.default_rng(0))
EMPTY = WeightsOffer(manifests=(), signer=b"", greeting=True)


class Constant(Policy):
    """Acts with its weight."""

    def __init__(self, spec: RobotSpec) -> None:
        self._actions = np.zeros((1, *spec.action.shape), np.float32)

    def act(self, observation: object, sentence: str, *, deterministic: bool, context: object = None) -> ActionChunk:
        return ActionChunk(self._actions, np.zeros(1, np.float32))

    def load(self, weights: object) -> None:
        self._actions = self._actions + weights["value"]  # type: ignore[index]


class SilentClient:
    """A tunnel client without a gateway, which keeps its reports."""

    def __init__(self) -> None:
        self.sent: list[WeightsApplied] = []
        self.state, self.reason = TunnelState.OPEN, ""
        self.counters = Counter[str]()
        self.offers: deque[WeightsOffer] = deque()

    def send(self, message: WeightsApplied) -> bool:
        self.sent.append(message)
        return True

    def send_weights(self, message: object) -> bool:
        return False

    def receive_weights(self, wait_s: float) -> Envelope | None:
        if self.state is TunnelState.CLOSED:
            raise RuntimeError("it is closed")
        if self.offers:
            return Envelope(self.offers.popleft())
        time.sleep(min(wait_s, 0.01))
        return None


class World:
    def __init__(self, keys: Path, *, explore: bool, swap_at: Literal["chunk", "episode"] = "chunk") -> None:
        self.policies, self.client = DoubleBufferedPolicy(lambda: Constant(example_spec())), SilentClient()
        config = ReceiverConfig(swap_at=swap_at)
        self.policy = LivePolicy(self.policies, self.client, "left", config, keys, None, explore=explore)  # type: ignore[arg-type]

    def load(self, version: int) -> None:
        self.policies.load(version, {"value": np.float32(1.0)})

    def act(self) -> int:
        """The version that acts."""
        chunk: Array = self.policy.act(PolicyQuery(OBSERVATION, "", True)).actions
        assert chunk.shape == (1, 2)
        return self.policy.version


def test_policy_without_weights_holds_unless_it_may_explore(tmp_path: Path) -> None:
    world = World(tmp_path, explore=True)
    with world.policy:
        with pytest.raises(PolicyUnavailable, match="waiting for weights"):  # the gateway may have a version
            world.act()
        assert world.policy.awaits_weights
        world.client.offers.append(EMPTY)
        until(lambda: not world.policy.awaits_weights, "the gateway has no version")
        world.client.state = TunnelState.LOST
        assert world.act() == -1, "a session goes on without its gateway"
        world.client.offers.append(WeightsOffer(manifests=(SignedRecord(b"", bytes(64)),), signer=bytes(32)))
        until(lambda: world.policy.awaits_weights, "a version is offered, and has not arrived")
    world = World(tmp_path, explore=False)
    with pytest.raises(PolicyUnavailable, match="waiting for weights"):
        world.act()
    assert world.policy.awaits_weights
    world.load(1)
    assert world.act() == 1 and not world.policy.awaits_weights


def test_policy_may_explore_only_after_the_gateway_has_said_in_this_session_that_it_has_no_version(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, explore=False)
    policy, client = world.policy, world.client
    with policy:
        assert not policy.may_explore
        client.offers.append(EMPTY)
        until(lambda: policy.may_explore, "the gateway has no version")
        assert policy.scalars()["weights/refused"] == 0
        client.state = TunnelState.LOST
        assert not policy.may_explore
        client.state, client.counters["lost"] = TunnelState.OPEN, 1
        assert not policy.may_explore, "it is another session"
        client.offers.append(EMPTY)
        until(lambda: policy.may_explore, "nor has it in this session")
        client.offers.append(WeightsOffer(manifests=(SignedRecord(b"", bytes(64)),), signer=bytes(32)))
        until(lambda: not policy.may_explore, "there are weights, also if they are refused")


def test_weights_are_swapped_between_chunks_and_reported(tmp_path: Path) -> None:
    world = World(tmp_path, explore=True)
    for version in (1, 2, 3):
        world.load(version)
        assert world.act() == version
    assert [report.version for report in world.client.sent] == [1, 2, 3]
    world.load(4)
    world.policy.pause()
    assert world.policy.version == 4


def test_weights_are_swapped_between_episodes_only(tmp_path: Path) -> None:
    world = World(tmp_path, explore=True, swap_at="episode")
    with world.policy:
        world.client.offers.append(EMPTY)
        until(lambda: world.policy.may_explore, "the gateway has no version")
        world.load(1)
        world.policy.pause()
        assert world.act() == -1
        world.policy.begin_episode()
        world.load(2)
        assert world.act() == 1


def test_robot_that_is_paused_before_its_episode_ends_uses_no_version_until_it_acts(tmp_path: Path) -> None:
    world = World(tmp_path, explore=False, swap_at="episode")
    world.load(1)
    world.policy.begin_episode()
    assert world.act() == 1
    world.load(5)
    for _ in range(3):  # an operator drives
        world.policy.pause()
    assert [report.version for report in world.client.sent] == [1, -1], "a learner need not wait for the robot"
    assert [world.act(), world.act()] == [1, 1]
    world.policy.pause()
    world.policy.begin_episode()
    assert world.act() == 5
    assert [report.version for report in world.client.sent] == [1, -1, 1, -1, 5]


def test_refused_policy_holds_with_the_reason_and_fails_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, explore=False)
    world.load(1)
    assert world.act() == 1
    world.client.state, world.client.reason = TunnelState.REFUSED, "the gateway does not allow this key"
    with pytest.raises(PolicyUnavailable, match="holds: the gateway does not allow this key"):
        world.act()
    world.policy.raise_failure()
    monkeypatch.setattr("user_sys.inference.live_policy.REFUSED_PAUSE_S", 0.0)
    with pytest.raises(SessionRefused, match="does not allow this key"):
        world.policy.raise_failure()


@pytest.mark.parametrize("stored", [False, True])
def test_robot_without_weights_of_this_run_holds_if_they_are_refused_and_says_why(tmp_path: Path, stored: bool) -> None:
    world = World(tmp_path, explore=False)
    if stored:
        world.policies.load(100, {"value": np.float32(1.0)}, run=b"the last run")
        assert world.act() == -2, "until this run offers weights"
    with world.policy:
        world.client.offers.append(WeightsOffer(manifests=(SignedRecord(b"", bytes(64)),), signer=bytes(32)))
        until(lambda: "refused" in world.policy.hold_reason(explore=False), "the refusal is shown")
        with pytest.raises(PolicyUnavailable, match="holds: this run's weights are refused: .*sign"):
            world.act()
        world.load(1)
        assert world.act() == 1, "it holds no robot that has weights of this run"


def run_receiver(world: World, *, fails: bool) -> None:
    with world.policy:
        world.load(1)
        if fails:
            world.client.state = TunnelState.CLOSED
            until(lambda: has_failed(world.policy), "the receiver's thread ends")


def has_failed(policy: LivePolicy) -> bool:
    try:
        policy.raise_failure()
    except RuntimeError as error:
        error.__traceback__ = None  # as in `PolicyServer`: it refers to the policy
        return True
    return False


def planners() -> int:
    return sum(type(each) is UpdatePlanner for each in gc.get_objects())


@pytest.mark.parametrize("fails", [False, True])
def test_closed_policy_is_freed_at_once(tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "user_sys.threads")  # pytest keeps the traceback of a record
    gc.collect()
    gc.disable()
    try:
        before, world = planners(), World(tmp_path, explore=True)
        freed = weakref.ref(world.policies)
        assert planners() == before + 1
        run_receiver(world, fails=fails)
        del world
        assert freed() is None and planners() == before
    finally:
        gc.enable()
