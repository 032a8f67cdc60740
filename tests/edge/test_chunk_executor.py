"""Action chunks: waiting, asynchronous, late and given-up ones, and the methods of passing from one to the next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hal.spec import ArraySpec
from user_sys.edge.chunk_executor import ChunkExecutor
from user_sys.edge.recorder import SelectedAction
from user_sys.errors import ConfigError, PolicyUnavailable
from user_sys.plugins import load_policy
from user_sys.policies.correction import ChunkCorrection
from user_sys.policies.policy import ActionChunk, ChunkContext, ExecutionConfig, PolicyQuery

LENGTH = 6
STEP_NS = 100_000_000


class Server:
    """A policy server whose chunk takes `takes` control periods. The action for period t is t, by its observation.

    Attributes:
        away: it does not answer.
        drift: added to the actions of each further chunk.
        trained: for so many promised actions.
    """

    def __init__(self, takes: int = 0, execute: int = 0, drift: float = 0.0) -> None:
        self.takes, self.execute, self.drift = takes, execute, drift
        self.version, self.now, self.away, self.requests = 7, 0, False, 0
        self.trained = LENGTH
        self._chunk: ActionChunk | None = None
        self.correction: ChunkCorrection | None = None
        self.context: ChunkContext | None = None
        self._due = 0

    def act(self, query: PolicyQuery) -> ActionChunk:
        self.requests += 1
        self.context = query.context
        actions = float(query.observation["t"][0]) + np.arange(LENGTH, dtype=np.float32) + self.drift * self.requests
        bridged = 0 if query.context is None else min(query.context.assured, self.trained)
        log_prob = -np.arange(LENGTH, dtype=np.float32)
        return ActionChunk(actions[:, None], log_prob, self.execute, self.correction, bridged)

    def request(self, query: PolicyQuery) -> None:
        if self.away:
            raise PolicyUnavailable("the policy does not answer; the robot holds")
        self._chunk = self.act(query)
        self._due = self.now + self.takes

    def response(self, *, wait: bool) -> ActionChunk | None:
        if self.away:
            raise PolicyUnavailable("the policy does not answer; the robot holds")
        return self._chunk if wait or self.now >= self._due else None


class Robot:
    """Executes control periods; its observation counts the executed actions."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self.server, self.executed, self.shift = server, 0, 0.0
        spec = ArraySpec(name="action", labels=("x",), units=("m",), low=(0.0,), high=(100.0,))
        real_time = settings.pop("real_time", "delay_periods" not in settings)
        config = ExecutionConfig(**settings)
        self.executor = ChunkExecutor(server, spec, config, deterministic=True, follows_clock=real_time, clock=clock)
        self.executor.begin_episode()

    def period(self) -> SelectedAction | None:
        """One control period; None if the robot held."""
        self.server.now += 1
        observation = {"t": np.array([self.executed + self.shift], np.float32)}
        try:
            action = self.executor.next_action(lambda: observation, STEP_NS * self.server.now, "go")
        except PolicyUnavailable:
            return None
        self.executed += 1
        return action


def values(robot: Robot, periods: int) -> list[float | None]:
    actions = [robot.period() for _ in range(periods)]
    return [None if each is None else round(float(each.action[0]), 3) for each in actions]


def test_waiting_robot_asks_when_its_chunk_is_used_up() -> None:
    robot = Robot(Server())
    assert values(robot, 14) == [*range(14)] and robot.server.requests == 3
    early = Robot(Server(execute=2))
    assert values(early, 6) == [*range(6)] and early.server.requests == 3


@pytest.mark.parametrize("mode", ["wait", "async"])
def test_chunk_that_is_shorter_than_execute_is_followed_by_the_next(mode: str) -> None:
    robot = Robot(Server(execute=2 * LENGTH), mode=mode)
    assert values(robot, 14) == [*range(14)]


@pytest.mark.parametrize("takes", [1, 2, 3])
def test_asynchronous_robot_never_stops_once_it_knows_the_delay(takes: int) -> None:
    robot = Robot(Server(takes), mode="async")
    first = values(robot, 30)
    assert None not in first[3 * takes + LENGTH :], "no stall after the delay is known"
    acted = [each for each in first if each is not None]
    assert acted == [*map(float, range(len(acted)))], "each action is the one for its time"
    action = robot.period()
    assert action is not None and action.delay == takes and action.chunk_step >= takes
    assert robot.executor.counters.scalars()["chunk_delay_periods"] == takes


def test_late_chunk_is_a_stall_and_goes_on_where_the_robot_is() -> None:
    robot = Robot(Server(), mode="async")
    values(robot, 10)
    robot.server.takes = 9
    shown = values(robot, 12)
    acted = [each for each in shown if each is not None]
    assert None in shown and acted == [*range(10, 10 + len(acted))]
    assert robot.executor.counters.stalls == shown.count(None)


def test_robot_executes_its_promised_actions_when_the_server_dies_and_then_holds() -> None:
    robot = Robot(Server(1), mode="async")
    values(robot, 9)
    robot.server.away = True
    shown = values(robot, LENGTH + 3)
    promised = shown.index(None)
    assert 0 < promised < LENGTH and set(shown[promised:]) == {None}
    robot.server.away = False
    assert [each for each in values(robot, 4) if each is not None]


def test_delay_of_a_simulated_robot_is_counted_in_control_periods() -> None:
    runs = []
    for _ in range(2):
        robot = Robot(Server(takes=0, drift=0.01), mode="async", delay_periods=3)
        runs.append(values(robot, 20))
    assert runs[0] == runs[1] and runs[0][:3] == [None] * 3
    action = robot.period()
    assert action is not None and action.delay == 3


def test_request_has_the_promised_actions_and_the_predicted_delay() -> None:
    robot = Robot(Server(2), mode="async")
    values(robot, 12)
    while robot.server.requests < 6:
        before = robot.executed
        robot.period()
    context = robot.server.context
    assert context is not None and context.delay == 2
    np.testing.assert_array_equal(context.prefix[:, 0], before + np.arange(len(context.prefix)))
    assert len(context.prefix) > 2, "promised actions cover the delay"
    waiting = Robot(Server())
    waiting.period()
    assert waiting.server.context is None


def test_robot_that_does_not_follow_the_clock_waits_for_a_chunk_without_delay() -> None:
    robot = Robot(Server(takes=3), mode="async", real_time=False)  # a policy server needs time
    assert values(robot, 8) == [*map(float, range(8))]


def test_robot_that_follows_the_clock_never_waits() -> None:
    server = Server(takes=5)
    config = ExecutionConfig(mode="async", delay_periods=2)
    spec = ArraySpec(name="action", labels=("x",), units=("m",), low=(0.0,), high=(100.0,))
    executor = ChunkExecutor(server, spec, config, deterministic=True, follows_clock=True)
    for server.now in range(5):
        with pytest.raises(PolicyUnavailable, match="has not arrived"):
            executor.next_action(lambda: {"t": np.zeros(1, np.float32)}, 0, "go")


def test_measured_delay_is_counted_in_control_periods() -> None:
    clock = itertools.count(step=0.25)  # 2.5 control periods between two looks
    robot = Robot(Server(), lambda: next(clock), mode="async", delay_periods="measured")
    assert values(robot, 20)[:4] == [None] * 3 + [0.0]
    action = robot.period()
    assert action is not None and action.delay == 3


def test_chunk_that_is_shorter_than_the_delay_is_named() -> None:
    robot = Robot(Server(takes=2 * LENGTH), mode="async")
    values(robot, 3 * LENGTH + 7)
    with pytest.raises(
        PolicyUnavailable, match=r"not arrived after 9 control periods, and a chunk of 6 actions"
    ) as late:
        robot.executor.next_action(lambda: {"t": np.zeros(1, np.float32)}, 0, "go")
    assert "policy.options.chunk_length" in str(late.value) and "18 or more" in str(late.value)
    assert "policy.options.config.chunk_size" in str(late.value), "lerobot has no chunk_length"
    assert "of steered policy.options.execute and base_options.chunk_length" in str(late.value)
    steered, settings = load_policy("steered", {"execute": 18, "base_options": {"chunk_length": 18}})
    assert steered.execution_delays(settings)["switch"] == 9


def test_late_policy_of_one_action_is_told_to_wait() -> None:
    one = ActionChunk(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
    server = Server(takes=1)
    server.act = lambda query: one  # type: ignore[method-assign]
    robot = Robot(server, mode="async")
    assert values(robot, 7) == [None, 0.0] * 3 + [None], "half of the control periods are lost"
    robot.server.takes = 3
    values(robot, 2)
    with pytest.raises(PolicyUnavailable, match="gives one action at once: set policy.execution.mode: wait"):
        robot.executor.next_action(lambda: {"t": np.zeros(1, np.float32)}, 0, "go")


def test_vlash_uses_a_chunk_from_the_end_of_its_promised_actions() -> None:
    server = Server(drift=100.0)
    robot = Robot(server, mode="async", method="vlash", delay_periods=3)
    actions = [robot.period() for _ in range(16)]
    found = [each for each in actions if each is not None]
    assert actions[:3] == [None] * 3, "the first chunk has no promise"
    assert [each.chunk for each in found[:7]] == [0] * 5 + [1] * 2
    assert [each.chunk_step for each in found[:8]] == [0, 1, 2, 3, 4, 0, 1, 2], "no action is skipped"
    assert {each.delay for each in found[5:]} == {3}
    assert server.context is not None and server.context.method == "vlash"


def test_early_vlash_chunk_waits_for_its_first_period() -> None:
    server = Server(takes=3, drift=100.0)
    robot = Robot(server, mode="async", method="vlash")
    values(robot, 40)
    server.takes = 0  # now sooner than the 95th percentile
    steps = [each.chunk_step for each in (robot.period() for _ in range(12)) if each is not None]
    assert len(steps) == 12 and robot.executor.counters.delays[-1] == 0
    assert 0 in steps[1:] and all(after in (0, before + 1) for before, after in itertools.pairwise(steps))


def test_vlash_chunk_begins_after_the_actions_that_its_policy_has_bridged() -> None:
    server = Server(takes=3)
    server.trained = 2
    robot = Robot(server, mode="async", method="vlash")
    acted = [each for each in (robot.period() for _ in range(40)) if each is not None]
    later = [each for each in acted if each.chunk >= 3]
    assert {each.delay for each in later} == {3}
    first_steps = {each.chunk: each.chunk_step for each in reversed(later)}
    assert {*first_steps.values()} == {1}, "it is used one control period after its first action was due"


@pytest.mark.parametrize(("method", "setting"), [("vlash", "offset_max"), ("training_rtc", "prefix_max")])
def test_delay_beyond_the_training_is_noted_while_it_lasts(method: str, setting: str) -> None:
    server = Server(takes=3)
    robot = Robot(server, mode="async", method=method)
    values(robot, 40)
    assert robot.executor.delay_note == ""
    server.trained = 1
    values(robot, 8)
    assert f"trained for 1 at most: train with policy.options.{setting} 3" in robot.executor.delay_note
    robot.executor.discard()
    assert robot.executor.delay_note == "", "another source of control moves the robot"
    plain = Robot(Server(takes=3), mode="async")
    plain.server.trained = 0
    values(plain, 40)
    assert plain.executor.delay_note == "", "plain switching needs no training"


def test_first_chunk_of_a_session_says_nothing_about_the_delay() -> None:
    server = Server(takes=20)  # it starts
    robot = Robot(server, mode="async")
    values(robot, 20)
    server.takes = 2
    values(robot, 12)
    assert robot.executor.counters.predicted_delay() == 2


def test_a2c2_corrects_by_the_newest_observation() -> None:
    weight = np.array([[1.0, -1.0, 0.0, 0.0]], np.float32)  # what the newest vector differs from the chunk's
    one = np.ones(1, np.float32)
    server = Server(takes=2)
    server.correction = ChunkCorrection(
        ("t",), 0 * one, 0.01 * one, 0 * one, 50 * one, 50 * one, LENGTH, ((weight, 0 * one),)
    )
    robot = Robot(server, mode="async", method="a2c2")
    values(robot, 2)
    robot.shift = 4.0
    action = robot.period()
    assert action is not None and np.isnan(action.log_prob)
    assert action.action[0] == pytest.approx(0 + 50 * 0.01 * 4.0, abs=1e-5)
    switching = Robot(Server(takes=2), mode="async")
    assert values(switching, 3)[-1] == 0.0, "without it, the chunk is executed as it is"


def test_a2c2_executes_the_action_of_the_chunk_if_the_corrected_one_is_not_finite() -> None:
    one, server = np.ones(1, np.float32), Server()
    layer = np.zeros((1, 4), np.float32), np.nan * one
    server.correction = ChunkCorrection(("t",), one, one, one, one, one, LENGTH, (layer,))
    assert values(Robot(server, mode="async", method="a2c2"), 3) == [0.0, 1.0, 2.0]


def test_ensemble_averages_the_chunks_of_a_period() -> None:
    robot = Robot(Server(drift=1.0), mode="async", method="ensemble", ensemble_decay=0.0)
    assert values(robot, 3) == [1.0, 1 + 1.5, 2 + 2.0], "the means of drifts 1; 1, 2; 1, 2, 3"
    action = robot.period()
    assert action is not None and np.isnan(action.log_prob)


def test_disagreement_is_the_difference_of_overlapping_chunks() -> None:
    agreed = Robot(Server(execute=2))
    values(agreed, 6)
    assert agreed.executor.counters.disagreement == 0.0
    drifting = Robot(Server(takes=1, drift=5.0), mode="async")
    values(drifting, 12)
    assert drifting.executor.counters.disagreement == pytest.approx(0.05)
    drifting.executor.discard()
    assert drifting.executor.counters.disagreement == 0.0


@pytest.mark.parametrize("method", ["switch", "ensemble"])
def test_first_learned_chunk_replaces_a_random_one_without_disagreement(method: str) -> None:
    server = Server(drift=5.0)
    server.version = -1
    robot = Robot(server, mode="async", method=method, delay_periods=1)
    while server.requests < 3 or not robot.executor.counts_delay:
        robot.period()
        assert robot.executor.counters.disagreement == 0.0
    server.version, used = 0, robot.executor.counters.chunks
    while robot.executor.counters.chunks == used:
        action = robot.period()
    assert action is not None and action.policy_version == 0 and robot.executor.counters.disagreement == 0.0
    assert action.action[0] == robot.executed - 1 + 5 * action.chunk + 5, "no random action is part of it"


def test_another_source_of_control_drops_the_promise() -> None:
    server = Server(2)
    robot = Robot(server, mode="async")
    values(robot, 8)
    robot.executor.discard()
    robot.executed = 50  # a person has moved the robot
    shown = [each for each in values(robot, 8) if each is not None]
    assert shown[0] == 50


def test_settings_of_asynchronous_execution_need_its_mode() -> None:
    for settings in ({"method": "ensemble"}, {"delay_periods": 2}):
        with pytest.raises(ConfigError, match="mode async"):
            ExecutionConfig(**settings)  # type: ignore[arg-type]
