"""The Franka driver with franky on an independent simulation of the robot's protocol: ``make test-franka``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from peer_kit import PeerProcess, eventually, free_host

from hal.conformance import RobotConformance
from hal.driver import RobotSetupRequest
from hal.errors import HardwareLost, SpecError, StaleObservation, StoppedAtRobot
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array
from robots import franka
from robots.franka import FrankaConfig, FrankaRobot, make_robot_setup


class FrankaSimulator(PeerProcess):
    def __init__(self) -> None:
        self.host = free_host()
        super().__init__("franka_peer.py", self.host)

    def set(self, name: str, value: Any) -> None:
        self.ask(f"set {name} {json.dumps(value)}")

    def angles(self) -> list[float]:
        """The joint angles (7,) of the arm, rad."""
        found: list[float] = self.ask("angles")
        return found


pytestmark = pytest.mark.franka
PATIENT = {"rate_hz": 10.0, "answer_within_s": 30.0, "stale_after_s": 30.0, "realtime": False}
GUIDING, REFLEX, USER_STOPPED = 3, 4, 5


@pytest.fixture
def simulated() -> Iterator[FrankaSimulator]:
    found = FrankaSimulator()
    yield found
    found.kill()


def arm(simulated: FrankaSimulator, **options: object) -> FrankaRobot:
    return FrankaRobot(FrankaConfig(host=simulated.host, **{**PATIENT, **options}))  # type: ignore[arg-type]


def state(robot: FrankaRobot) -> Array:
    return robot.observe().arrays[STATE]


def stands(robot: FrankaRobot) -> bool:
    """By its angles: a late simulation does not report speeds of 0."""
    before = state(robot)[:7]
    time.sleep(0.2)
    return bool(np.abs(state(robot)[:7] - before).max() < 1e-3)


class TestArmByToolSteps(RobotConformance):
    @pytest.fixture(autouse=True)
    def _arm(self, simulated: FrankaSimulator) -> None:
        self.simulated = simulated

    def make_robot(self) -> Robot:
        return arm(self.simulated)

    def has_not_moved(self, before: Observation, after: Observation) -> bool:
        return bool(np.abs(before.arrays[STATE] - after.arrays[STATE])[:7].max() < 1e-2)


def test_tool_steps_keep_rotation(simulated: FrankaSimulator) -> None:
    with arm(simulated) as robot:
        before = state(robot)
        applied = sum(robot.command(np.array([0.01, 0.0, -0.01], np.float32)) for _ in range(4))
        goal = before[14:17] + applied
        eventually(lambda: bool(np.abs(state(robot)[14:17] - goal).max() < 5e-3), "the tool did not get there")
        assert np.abs(state(robot)[17:23] - before[17:23]).max() < 0.05


def test_joint_steps_add_up_and_hold_brakes(simulated: FrankaSimulator) -> None:
    with arm(simulated, action="joint_delta") as robot:
        before, step = state(robot)[6], np.array([0, 0, 0, 0, 0, 0, 0.05], np.float32)
        for _ in range(4):
            robot.command(step)
        eventually(lambda: abs(state(robot)[6] - before - 0.2) < 0.02, "the joint did not arrive")
        robot.command(10 * step)
        robot.stop(StopLevel.HOLD)
        eventually(lambda: stands(robot), "the arm did not stand still")
        robot.command(step)


def test_safety_kernel_stops_motion_against_measured_force(simulated: FrankaSimulator) -> None:
    with arm(simulated) as robot:
        simulated.set("O_F_ext_hat_K", [0, 0, -80.0, 0, 0, 0])  # of the tool that presses on a table, on the table
        eventually(lambda: abs(state(robot)[25]) == 80, "the force is not reported")
        kernel, observation = SafetyKernel(robot.spec), robot.observe()
        assert observation.arrays[STATE][23:26].tolist() == [0, 0, 80]
        down, up = (kernel.filter(np.array([0, 0, dz], np.float32), observation) for dz in (-0.01, 0.01))
        assert down.applied is not None and down.applied[2] == 0
        assert up.applied is not None and up.applied[2] > 0


def test_target_of_a_tool_returns_to_it_under_too_much_force(simulated: FrankaSimulator) -> None:
    with arm(simulated, dynamics=0.02) as robot:
        for _ in range(5):
            robot.command(np.array([0.0, 0.0, -0.02], np.float32))
        simulated.set("O_F_ext_hat_K", [0, 0, -80.0, 0, 0, 0])
        eventually(lambda: state(robot)[25] == 80, "the force is not reported")
        height = state(robot)[16]
        assert robot.command(np.zeros(3, np.float32)).tolist() == [0.0] * 3
        eventually(lambda: stands(robot), "the tool does not stop")
        assert state(robot)[16] > height - 0.02, "the tool presses on"


def test_reflex_is_reported_and_not_recovered(simulated: FrankaSimulator) -> None:
    words = "a reflex"
    robot = arm(simulated)
    with robot:
        simulated.set("robot_mode", REFLEX)
        with pytest.raises(HardwareLost, match=f"{words}.*; a person must clear it"):
            eventually(lambda: robot.observe() is None, "nothing was reported")
    with pytest.raises(HardwareLost, match=words):
        robot.connect()
    simulated.set("robot_mode", 1)
    with robot:
        robot.observe()


@pytest.mark.parametrize(("mode", "words"), [(USER_STOPPED, "the user stop"), (GUIDING, "guiding by hand")])
def test_person_at_the_arm_stops_it(simulated: FrankaSimulator, mode: int, words: str) -> None:
    robot = arm(simulated)
    with robot:
        simulated.set("robot_mode", mode)
        with pytest.raises(StoppedAtRobot, match=f"{words}.*; a person must clear it"):
            eventually(lambda: robot.observe() is None, "nothing was reported")
    with pytest.raises(StoppedAtRobot, match=words):
        robot.connect()


@pytest.mark.parametrize(("mode", "kind"), [("UserStopped", StoppedAtRobot), ("Reflex", HardwareLost)])
def test_abort_of_a_motion_is_a_persons_by_the_state(
    monkeypatch: pytest.MonkeyPatch, mode: str, kind: type[HardwareLost]
) -> None:
    """With libfranka's exception, which the simulation does not cause."""

    def abort() -> None:
        if device.state.robot_mode.name == mode:
            raise RuntimeError("libfranka: Move command aborted: User Stop pressed!")

    state = SimpleNamespace(robot_mode=SimpleNamespace(name="Idle"), time=SimpleNamespace(to_sec=lambda: 1.0))
    state.last_motion_errors = state.current_errors = ""
    device = SimpleNamespace(state=state, poll_motion=abort, join_motion=lambda timeout_s: True)
    realtime = SimpleNamespace(Enforce=0, Ignore=1)
    library = SimpleNamespace(Robot=lambda host, **settings: device, RealtimeConfig=realtime)
    monkeypatch.setattr(franka, "import_library", lambda *names: library)
    with FrankaRobot(FrankaConfig(host=free_host(), answer_within_s=30.0)) as robot:
        device.state.robot_mode.name = mode
        with pytest.raises(HardwareLost) as caught:
            robot.observe()
        assert type(caught.value) is kind


def test_killed_arm_is_lost(simulated: FrankaSimulator) -> None:
    with arm(simulated) as robot:
        robot.command(np.array([0.01, 0, 0], np.float32))
        simulated.kill()
        with pytest.raises(HardwareLost, match=simulated.host):
            eventually(lambda: robot.observe() is None, "no loss was reported")
    with pytest.raises(HardwareLost, match="connecting failed"):
        robot.connect()


def test_frozen_arm_is_stale_or_lost(simulated: FrankaSimulator) -> None:
    with arm(simulated, stale_after_s=None, answer_within_s=None) as robot:
        simulated.freeze()
        with pytest.raises((StaleObservation, HardwareLost)):
            eventually(lambda: robot.observe() is None, "nothing was reported")


def test_invalid_options_are_explained() -> None:
    for wrong, message in (
        ({"dynamics": 2.0}, "dynamics"),
        ({"answer_within_s": 0.0}, "answer_within_s"),
        ({"force_threshold": 0.0}, "force_threshold"),
    ):
        with pytest.raises(SpecError, match=message):
            make_robot_setup(RobotSetupRequest("franka-0", "free", {"host": "10.0.0.2", **wrong}))
