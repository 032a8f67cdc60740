"""A simulated arm requests help, as `intervention.help` says, and first goes back along its path by itself."""

from __future__ import annotations

from dataclasses import dataclass

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
from user_sys.messages import EpisodeReport
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
    episode = ""

    def rearm(self, person: str, estop_sequence: int) -> bool:
        return True

    def is_stopping(self) -> bool:
        return False

    def has_lease(self) -> bool:
        return True

    def set_driver_mode(self, *, suspended: bool, policy_error: str) -> None:
        pass


class WaveringPolicy(SidewaysPolicy):
    """Each chunk moves the tool to the other side than the one before."""

    def __init__(self) -> None:
        self._side = 0.01

    def act(self, query: object) -> ActionChunk:
        self._side = -self._side
        actions = np.tile(np.array([0.0, self._side, 0.0, 0.08], np.float32), (4, 1))
        return ActionChunk(actions, np.full(4, np.nan, np.float32), execute=1)


@dataclass(frozen=True)
class Watched:
    """An episode: by control period, the phase of the step, the tool's y in metres, and why help is requested."""

    result: EpisodeReport
    phases: list[Phase | None]
    y_m: list[float]
    reasons: list[str]


def run_with(policy: SidewaysPolicy, grades: HelpConfig) -> Watched:
    setup = build_robot_setup(RobotConfig(task="lift", options={"cameras": []}))
    environment = RobotEnvironment(setup.robot, setup.task, SafetyKernel(setup.robot.spec))
    environment.connect()
    now_s, reasons = [0.0], list[str]()
    authority = ControlAuthority("arm", environment.spec, clock=lambda: now_s[0])
    commands = OperatorCommandQueue(authority.clock, lambda reply: None)
    agent = SharedControlAgent(
        environment.spec, authority, policy, commands, LastingSession(), InterventionConfig(help=grades)
    )
    phases, y_m = list[Phase | None](), list[float]()

    def watch(time_step: TimeStep, selected: SelectedAction | None) -> None:
        phases.append(selected.phase if selected else None)
        y_m.append(float(time_step.observation[STATE][TOOL_POSITION][1]))
        reasons.append(authority.help_reason)
        now_s[0] += 0.1

    result = run_episode(environment, agent, None, source=EpisodeSource.ONLINE, seed=0, listeners=[watch])
    environment.close()
    return Watched(result, phases, y_m, reasons)


def test_arm_returns_tries_again_and_then_requests_help() -> None:
    ran = run_with(SidewaysPolicy(), HelpConfig(after_steps=STEPS, returns=1, return_steps=BACK, wait_s=1.0))
    phases, y_m = ran.phases, ran.y_m
    assert phases[: STEPS + BACK + STEPS] == [Phase.POLICY] * STEPS + [Phase.RECOVERY] * BACK + [Phase.POLICY] * STEPS
    assert phases[STEPS + BACK + STEPS] is None
    assert ran.reasons[STEPS + BACK + STEPS] == f"no success after {STEPS} steps"
    assert abs(y_m[STEPS + BACK - 1] - y_m[STEPS - BACK - 1]) < 0.01 < y_m[STEPS - 1] - y_m[STEPS + BACK - 1]
    assert ran.result.intervention_steps == BACK and not ran.result.success


def test_robot_requests_help_if_successive_chunks_differ() -> None:
    grades = HelpConfig(disagreement=0.05, wait_s=1.0)
    ran = run_with(WaveringPolicy(), grades)
    assert ran.phases[:2] == [Phase.POLICY, None] and ran.reasons[1].startswith("successive action chunks differ by ")
    assert Phase.POLICY in ran.phases[2:], "the policy goes on if no person comes"
    assert not any(run_with(SidewaysPolicy(), grades).reasons)
