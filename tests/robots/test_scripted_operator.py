"""The scripted operator takes over late episodes, finishes them, and hands back at the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from hal.safety import SafetyKernel
from robots import scripted_operator
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.edge.agents import OperatorCommandQueue, SharedControlAgent
from user_sys.edge.control_authority import ControlAuthority, ControlState
from user_sys.edge.driver_client import decode_time_step, encode_time_step
from user_sys.edge.environment import RobotEnvironment
from user_sys.edge.loop import run_episode
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError
from user_sys.messages import EpisodeReport
from user_sys.policies.policy import ActionChunk

ROBOT = RobotConfig(
    task=("lift_red", "lift_blue"), options={"cameras": []}, teleoperators=({"kind": "scripted", "after_steps": 3},)
)


class StillPolicy:
    """Does nothing, with weights of version 7."""

    version, cameras, awaits_weights = 7, tuple[str, ...](), False

    def act(self, query: object) -> ActionChunk:
        still = np.array([[0.0, 0.0, 0.0, 0.08]], np.float32)
        return ActionChunk(still, np.full(1, np.nan, np.float32))

    def begin_episode(self) -> None: ...

    def pause(self) -> None: ...


class NoSession:
    episode = ""

    def rearm(self, person: str, estop_sequence: int) -> bool:
        return True

    def is_stopping(self) -> bool:
        return False

    def has_lease(self) -> bool:
        return True

    def set_driver_mode(self, *, suspended: bool, policy_error: str) -> None:
        pass


@contextmanager
def operated_environment() -> Iterator[RobotEnvironment]:
    setup = build_robot_setup(ROBOT)
    kernel = SafetyKernel(setup.robot.spec)
    environment = RobotEnvironment(setup.robot, setup.task, kernel, teleoperators=setup.teleoperators)
    environment.connect()
    yield environment
    environment.close()


def run_operated(environment: RobotEnvironment, episodes: int) -> tuple[list[EpisodeReport], list[ControlState]]:
    """Also returns who had the robot at the first step of each episode."""
    authority = ControlAuthority("arm", environment.spec)
    commands = OperatorCommandQueue(authority.clock, lambda reply: None)
    agent = SharedControlAgent(environment.spec, authority, StillPolicy(), commands, NoSession())
    results, first = list[EpisodeReport](), list[ControlState]()
    for seed in range(episodes):
        states = list[ControlState]()
        results.append(
            run_episode(
                environment,
                agent,
                None,
                source=EpisodeSource.ONLINE,
                seed=seed,
                listeners=[lambda time_step, selected, states=states: states.append(authority.state)],
            )
        )
        first.append(states[0])
    return results, first


def test_operator_takes_over_finishes_and_hands_back() -> None:
    with operated_environment() as environment:
        results, first = run_operated(environment, 3)
    assert all(result.success and result.intervention_steps >= 5 for result in results)
    assert first == [ControlState.POLICY] * 3
    assert {result.task for result in results} == {"lift_red", "lift_blue"}


def test_operator_whose_expert_fails_hands_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_operator, "MAX_STEPS", 2)
    with operated_environment() as environment:
        results, _ = run_operated(environment, 1)
    assert results[0].intervention_steps == 2 and results[0].success is False


def test_hand_back_passes_the_driver_process() -> None:
    with operated_environment() as environment:
        run_operated(environment, 1)
        time_step = environment.reset(1)
    reply, arrays = encode_time_step(time_step)
    found = decode_time_step(reply, arrays).local_input
    assert found is not None and found.hands_back


def test_task_without_an_expert_is_refused() -> None:
    robot = replace(ROBOT, driver="gym", task="reach", options={"id": "Pendulum-v1"})
    with pytest.raises(ConfigError, match="scripted needs a task with a scripted expert, and 'reach' has none"):
        build_robot_setup(robot)
