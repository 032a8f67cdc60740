"""A simulated arm goes back along its path by itself, as `intervention.help` says, before it requests help."""

from __future__ import annotations

import numpy as np

from hal.safety import SafetyKernel
from hal.spec import STATE
from sim.robot import TOOL_POSITION
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.edge.agents import OperatorCommandQueue, SharedControlAgent
from user_sys.edge.control_authority import ControlAuthority
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.help_requests import HelpConfig, InterventionConfig
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import SelectedAction
from user_sys.episode import EpisodeSource, Phase
from user_sys.policies.policy import ActionChunk

STEPS, BACK = 10, 6


class SidewaysPolicy:
    """Moves the tool along y, and never succeeds."""

    version, cameras, awaits_weights = 7, tuple[str, ...](), False

    def act(self, query: object) -> ActionChunk:
        return ActionChunk(np.array([[0.0, 0.01, 0.0, 0.08]], np.float32), np.full(1, np.nan, np.float32))

    def begin_episode(self) -> None: ...

    def pause(self) -> None: ...


class LastingSession:
    def rearm(self, person: str, estop_sequence: int) -> bool:
        return True

    def is_stopping(self) -> bool:
        return False

    def has_lease(self) -> bool:
        return True


def test_arm_returns_tries_again_and_then_requests_help() -> None:
    setup = build_robot_setup(RobotConfig(task="lift", options={"cameras": []}))
    environment = RobotEnvironment(setup.robot, setup.task, SafetyKernel(setup.robot.spec))
    environment.connect()
    now_s, reasons = [0.0], list[str]()
    authority = ControlAuthority("arm", environment.spec, clock=lambda: now_s[0])
    grades = HelpConfig(after_steps=STEPS, returns=1, return_steps=BACK, wait_s=1.0)
    commands = OperatorCommandQueue(authority.clock, lambda reply: None)
    agent = SharedControlAgent(
        environment.spec, authority, SidewaysPolicy(), commands, LastingSession(), InterventionConfig(help=grades)
    )
    phases, y_m = list[Phase | None](), list[float]()

    def watch(time_step: TimeStep, selected: SelectedAction | None) -> None:
        phases.append(selected.phase if selected else None)
        y_m.append(float(time_step.observation[STATE][TOOL_POSITION][1]))
        reasons.append(authority.help_reason)
        now_s[0] += 0.1

    result = run_episode(environment, agent, None, source=EpisodeSource.ONLINE, seed=0, listeners=[watch])
    environment.close()
    assert phases[: STEPS + BACK + STEPS] == [Phase.POLICY] * STEPS + [Phase.RECOVERY] * BACK + [Phase.POLICY] * STEPS
    assert phases[STEPS + BACK + STEPS] is None and reasons[STEPS + BACK + STEPS] == f"no success after {STEPS} steps"
    assert abs(y_m[STEPS + BACK - 1] - y_m[STEPS - BACK - 1]) < 0.01 < y_m[STEPS - 1] - y_m[STEPS + BACK - 1]
    assert result.intervention_steps == BACK and not result.success
