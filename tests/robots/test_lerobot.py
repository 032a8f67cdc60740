"""The LeRobot driver with LeRobot, in LeRobot's environment: ``make test-lerobot``.

The arm is LeRobot's SO-101 follower, unmodified, on a simulated motor bus. The other robot and leader are published
third-party plugins.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from lerobot_kit import LEKIWI_MOTORS, FeetechArmSimulator, allow_torchvision_import, feetech_arm_simulator
from peer_kit import eventually

from hal.conformance import RobotConformance, TeleoperatorConformance
from hal.driver import RobotSetupRequest
from hal.errors import EmergencyStopped, HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.spec import ACTION, STATE, Array, ArraySpec, RobotSpec
from hal.teleoperator import Teleoperator
from robots.lerobot import FeatureConfig, LeaderConfig, LerobotConfig, LerobotLeader, LerobotRobot, make_robot_setup

pytestmark = [
    pytest.mark.lerobot,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
TORQUE, GOAL, LOW_LIMIT, PRESENT, SPEED = 40, 42, 9, 56, 46  # registers
DEADLINE_S = 10.0
DUMMY = LerobotConfig(
    type="dummy_follower", settings={"silent": True}, features={"*.pos": FeatureConfig("deg", -180, 180)}
)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> None:
    allow_torchvision_import()


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[FeetechArmSimulator]:
    with feetech_arm_simulator(tmp_path) as simulated:
        yield simulated


def follower(arm: FeetechArmSimulator, **options: object) -> LerobotRobot:
    options = {"rate_hz": 10.0, **options}
    # type: ignore[arg-type]
    return LerobotRobot(LerobotConfig(type="so101_follower", settings=arm.settings, **options))


def arrive(robot: Robot, action: Array) -> Array:
    """Command until the joints are there; returns the last applied action."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        applied = robot.command(action)
        if np.abs(robot.observe().arrays[STATE] - applied).max() < 0.005:
            return applied
    raise AssertionError(f"the arm did not get to {action}")


class TestFollowerOnItsBus(RobotConformance):
    @pytest.fixture(autouse=True)
    def _arm(self, arm: FeetechArmSimulator) -> None:
        self.arm = arm

    def make_robot(self) -> Robot:
        return follower(self.arm)

    def gentle_action(self, robot: Robot) -> Array:
        return np.array([0, 0, 0, 0, 0, 50], np.float32)

    def has_not_moved(self, before: Observation, after: Observation) -> bool:
        return bool(np.abs(before.arrays[STATE] - after.arrays[STATE]).max() < 0.05)


class TestThirdPartyRobot(RobotConformance):
    def make_robot(self) -> Robot:
        return LerobotRobot(DUMMY)


class TestLeaderOnItsBus(TeleoperatorConformance):
    @pytest.fixture(autouse=True)
    def _arm(self, arm: FeetechArmSimulator) -> None:
        self.arm = arm

    def make_teleoperator(self) -> Teleoperator:
        return leader(self.arm)


class TestThirdPartyLeader(TeleoperatorConformance):
    def make_teleoperator(self) -> Teleoperator:
        labels = tuple(f"joint_{number}.pos" for number in range(1, 7))
        bounds = {"low": (-4.0,) * 6, "high": (4.0,) * 6, "units": ("rad",) * 6, "labels": labels}
        spec = RobotSpec(model="six", rate_hz=10.0, observation=(), action=ArraySpec(name=ACTION, **bounds))
        return LerobotLeader(LeaderConfig(type="hex_dummy_leader", features={"*": FeatureConfig("rad", -4, 4)}), spec)


def leader(arm: FeetechArmSimulator, clock: Callable[[], float] = time.monotonic) -> LerobotLeader:
    return LerobotLeader(LeaderConfig(type="so101_leader", settings=arm.settings), follower(arm).spec, clock)


def test_leader_commands_its_pose_while_it_moves(arm: FeetechArmSimulator) -> None:
    now_s = [100.0]
    device = leader(arm, lambda: now_s[0])
    device.connect()
    try:
        assert not device.read().engaged
        arm.poke("shoulder_pan", PRESENT, 2248)
        reading = device.read()
        assert reading.engaged and reading.target is not None
        assert reading.target[0] == pytest.approx(200 / 4095 * 2 * math.pi, abs=1e-3)
        assert arm.registers("shoulder_pan")[TORQUE] == 0, "a hand can move it"
        now_s[0] += 3.0
        assert not device.read().engaged, "a hand that does nothing is off"
    finally:
        device.close()


def test_unplugged_leader_is_lost_and_can_be_closed(arm: FeetechArmSimulator) -> None:
    device = leader(arm)
    device.connect()
    arm.unplug()
    with pytest.raises(HardwareLost, match="reading"):
        device.read()
    device.close()
    device.close()


def test_leader_with_other_elements_is_refused() -> None:
    with pytest.raises(SpecError, match="lacks"):
        LerobotLeader(
            LeaderConfig(type="hex_dummy_leader", features={"*": FeatureConfig("rad", -4, 4)}), LerobotRobot(DUMMY).spec
        )


def test_positions_are_radians_and_calibration_is_read_only(arm: FeetechArmSimulator) -> None:
    before, written_ns = arm.calibration.read_bytes(), arm.calibration.stat().st_mtime_ns
    with follower(arm) as robot:
        assert robot.spec.action.units == ("rad",) * 5 + ("%",)
        assert robot.spec.action.labels[:2] == ("shoulder_pan.pos", "shoulder_lift.pos")
        assert (robot.spec.joint_target, robot.spec.gripper) == ((0, 1, 2, 3, 4), 5)
        arrive(robot, np.array([0.5, -0.25, 0, 0, 0, 100], np.float32))
        assert abs(arm.word("shoulder_pan", GOAL) - (2048 + 0.5 / (2 * math.pi) * 4095)) <= 1
        assert arm.word("gripper", GOAL) == 3072
        half_range = 1024 / 4095 * 2 * math.pi
        asked = np.array([3.0, 0, 0, 0, 0, 50], np.float32)
        assert robot.command(asked)[0] == pytest.approx(half_range, abs=1e-3), "within the calibrated range"
    assert (arm.calibration.read_bytes(), arm.calibration.stat().st_mtime_ns) == (before, written_ns)
    assert list(arm.calibrations.iterdir()) == [arm.calibration]


def test_missing_or_different_calibration_is_refused(arm: FeetechArmSimulator) -> None:
    arm.poke("elbow_flex", LOW_LIMIT, 0)
    with pytest.raises(HardwareLost, match=r"another calibration than .*arm\.json"):
        follower(arm).connect()
    arm.calibration.unlink()
    with pytest.raises(HardwareLost, match="not calibrated"):
        follower(arm).connect()


def test_close_holds_position_under_torque(arm: FeetechArmSimulator) -> None:
    with follower(arm) as robot:
        robot.command(np.array([1.5, 0, 0, 0, 0, 80], np.float32))
        robot.stop(StopLevel.HOLD)
        held = arm.word("shoulder_pan", GOAL)
        assert abs(held - 2048) < 300, "the hold is where the arm was, not at its goal"
        assert arm.word("gripper", GOAL) == 1024 + 0.8 * 2048 // 1, "the grip is kept"
        robot.stop(StopLevel.SAFE)
        assert arm.word("shoulder_pan", GOAL) == held
    assert arm.registers("shoulder_pan")[TORQUE] == 1


def test_torque_off_releases_motors_until_next_command(
    arm: FeetechArmSimulator,
) -> None:
    with follower(arm, torque_off=True) as robot:
        robot.stop(StopLevel.HOLD)
        assert arm.registers("elbow_flex")[TORQUE] == 1
        robot.stop(StopLevel.SAFE)
        robot.stop(StopLevel.SAFE)
        assert arm.registers("elbow_flex")[TORQUE] == 0
        robot.command(np.array([0, 0, 0, 0, 0, 50], np.float32))
        assert arm.registers("elbow_flex")[TORQUE] == 1
    assert arm.registers("elbow_flex")[TORQUE] == 0


def test_e_stop_while_the_torque_is_enabled_moves_nothing(arm: FeetechArmSimulator) -> None:
    with follower(arm, torque_off=True) as robot:
        robot.stop(StopLevel.SAFE)
        goal = arm.word("gripper", GOAL)

        def press() -> None:
            robot.stop(StopLevel.SAFE)
            raise EmergencyStopped("pressed by ada")

        robot.check_stop = press
        with pytest.raises(EmergencyStopped, match="ada"):
            robot.command(np.array([0, 0, 0, 0, 0, 50], np.float32))
        assert arm.registers("elbow_flex")[TORQUE] == 0 and abs(arm.word("gripper", GOAL) - goal) < 50


@pytest.mark.parametrize("fate", ["kill", "freeze", "unplug"])
def test_disconnected_arm_is_lost_within_two_periods(arm: FeetechArmSimulator, fate: str) -> None:
    with follower(arm) as robot:
        robot.command(np.array([0, 0, 0, 0, 0, 50], np.float32))
        getattr(arm, fate)()
        started_s = time.monotonic()
        with pytest.raises(HardwareLost, match="so101_follower"):
            robot.observe()
        assert time.monotonic() - started_s < 2 * robot.spec.period_s + 0.1


def test_replugged_arm_reconnects(arm: FeetechArmSimulator) -> None:
    robot = follower(arm)
    with robot:
        arm.unplug()
        with pytest.raises(HardwareLost):
            robot.observe()
    with pytest.raises(HardwareLost, match="connecting failed"):
        robot.connect()
    arm.plug_in()
    with robot:
        robot.command(np.array([0.1, 0, 0, 0, 0, 50], np.float32))


def test_lost_packet_is_retried(arm: FeetechArmSimulator) -> None:
    arm.lose(1)
    with follower(arm) as robot:
        arm.lose(1)
        robot.observe()


def test_connect_does_not_move_the_arm(arm: FeetechArmSimulator) -> None:
    arm.poke("shoulder_lift", PRESENT, 2600)
    with follower(arm):
        assert arm.registers("shoulder_lift")[TORQUE] == 1
        assert max(arm.leaps()) <= 1
        assert abs(arm.word("shoulder_lift", PRESENT) - 2600) <= 1


@pytest.fixture
def two_arms(tmp_path: Path) -> Iterator[tuple[FeetechArmSimulator, FeetechArmSimulator]]:
    """Calibrated as the arms of the robot ``bi``."""
    left, right, calibrations = (tmp_path / name for name in ("left", "right", "calibration"))
    for folder in (left, right, calibrations):
        folder.mkdir()
    with feetech_arm_simulator(left) as one, feetech_arm_simulator(right) as other:
        (calibrations / "bi_left.json").write_bytes(one.calibration.read_bytes())
        (calibrations / "bi_right.json").write_bytes(other.calibration.read_bytes())
        yield one, other


def bimanual(left: FeetechArmSimulator, right: FeetechArmSimulator, **options: object) -> LerobotRobot:
    settings = {
        "id": "bi",
        "calibration_dir": str(left.port.parents[1] / "calibration"),
        "left_arm_config": {"port": str(left.port)},
        "right_arm_config": {"port": str(right.port)},
    }
    # type: ignore[arg-type]
    return LerobotRobot(LerobotConfig("bi_so_follower", settings, rate_hz=10.0, **options))


def test_both_arms_connect_without_motion_and_hold_when_closed(
    two_arms: tuple[FeetechArmSimulator, FeetechArmSimulator],
) -> None:
    for arm in two_arms:
        arm.poke("shoulder_lift", PRESENT, 2600)
    with bimanual(*two_arms):
        for arm in two_arms:
            assert max(arm.leaps()) <= 1 and abs(arm.word("shoulder_lift", PRESENT) - 2600) <= 1
    assert [arm.registers("shoulder_lift")[TORQUE] for arm in two_arms] == [1, 1]


def test_torque_off_releases_both_arms(two_arms: tuple[FeetechArmSimulator, FeetechArmSimulator]) -> None:
    with bimanual(*two_arms, torque_off=True) as robot:
        robot.stop(StopLevel.SAFE)
        assert [arm.registers("shoulder_lift")[TORQUE] for arm in two_arms] == [0, 0]
        robot.command(robot.spec.rest_action(robot.observe().arrays))
        assert [arm.registers("shoulder_lift")[TORQUE] for arm in two_arms] == [1, 1]
    assert [arm.registers("shoulder_lift")[TORQUE] for arm in two_arms] == [0, 0]


def test_each_arm_has_the_units_and_the_calibrated_range_of_its_own_motors(
    two_arms: tuple[FeetechArmSimulator, FeetechArmSimulator],
) -> None:
    other = two_arms[0].port.parents[1] / "calibration" / "bi_right.json"
    with bimanual(*two_arms) as robot:
        units = dict(zip(robot.spec.action.labels, robot.spec.action.units, strict=True))
        assert units["left_shoulder_pan.pos"] == "rad" and units["right_gripper.pos"] == "%"
        applied = robot.command(np.where(np.array(robot.spec.action.units) == "rad", 3.0, 50.0).astype(np.float32))
        panned = [applied[robot.spec.action.labels.index(f"{side}_shoulder_pan.pos")] for side in ("left", "right")]
        assert panned == pytest.approx([1024 / 4095 * 2 * math.pi] * 2, abs=1e-3), "half of the calibrated range"
    other.unlink()
    with pytest.raises(HardwareLost, match=r"bi_so_follower is not calibrated: there is no .*bi_right\.json"):
        bimanual(*two_arms).connect()


def test_hold_keeps_the_grip_of_both_hands(two_arms: tuple[FeetechArmSimulator, FeetechArmSimulator]) -> None:
    with bimanual(*two_arms) as robot:
        grips = [index for index, name in enumerate(robot.spec.action.labels) if "gripper" in name]
        action = robot.observe().arrays[STATE]
        action[grips] = 0.0
        robot.command(action)
        for arm in two_arms:
            arm.poke("gripper", PRESENT, 2000)  # an object between the fingers
        robot.stop(StopLevel.HOLD)
        assert [arm.word("gripper", GOAL) for arm in two_arms] == [1024, 1024], "closed"


@pytest.mark.parametrize("fault", ["mute", "unplug"])
def test_torque_off_releases_the_other_motors_if_one_arm_fails(
    two_arms: tuple[FeetechArmSimulator, FeetechArmSimulator], fault: str
) -> None:
    left, right = two_arms
    robot = bimanual(left, right, torque_off=True, answer_within_s=DEADLINE_S)
    device = robot.device
    with robot:
        action = robot.spec.rest_action(robot.observe().arrays)
        action[robot.spec.action.labels.index("right_shoulder_pan.pos")] = 0.5
        robot.command(action)
        if fault == "mute":
            left.mute("shoulder_pan")
        else:
            left.unplug()
        with pytest.raises(HardwareLost, match="reading failed"):
            robot.stop(StopLevel.SAFE)
        assert abs(right.word("shoulder_pan", GOAL) - 2048) < 10, "the pose measured before the command"
        limp = [right.registers("shoulder_lift")[TORQUE]]
        if fault == "mute":
            limp.append(left.registers("shoulder_lift")[TORQUE])
        assert not any(limp)
    assert not device.right_arm.bus.is_connected


@pytest.fixture
def lekiwi(tmp_path: Path) -> Iterator[tuple[LerobotRobot, FeetechArmSimulator]]:
    """A mobile arm that drives forward at 0.2 m/s."""
    speeds = {axis: FeatureConfig("m/s", -0.3, 0.3) for axis in ("x.vel", "y.vel")}
    features = {**speeds, "theta.vel": FeatureConfig("deg/s", -60, 60)}
    with feetech_arm_simulator(tmp_path, LEKIWI_MOTORS) as bus:
        config = LerobotConfig("lekiwi", bus.settings, rate_hz=10.0, features=features, answer_within_s=2.0)
        with LerobotRobot(config) as robot:
            action = robot.spec.rest_action(robot.observe().arrays)
            action[robot.spec.action.labels.index("x.vel")] = 0.2
            robot.command(action)
            assert wheel_speeds(bus) != {0}
            yield robot, bus


def wheel_speeds(bus: FeetechArmSimulator) -> set[int]:
    return {bus.word(motor, SPEED) for motor in LEKIWI_MOTORS[-3:]}


def test_wheels_stop_although_the_arm_cannot_be_read(lekiwi: tuple[LerobotRobot, FeetechArmSimulator]) -> None:
    robot, bus = lekiwi
    bus.mute("arm_elbow_flex")
    with pytest.raises(HardwareLost, match="reading failed"):
        robot.stop(StopLevel.HOLD)
    assert wheel_speeds(bus) == {0}


def test_wheels_stop_after_a_reading_that_took_too_long(lekiwi: tuple[LerobotRobot, FeetechArmSimulator]) -> None:
    robot, bus = lekiwi
    let_go, read = threading.Event(), robot.device.get_observation
    robot.device.get_observation = lambda: let_go.wait(DEADLINE_S) and read()
    with pytest.raises(HardwareLost, match="reading took longer"):
        robot.observe()
    robot.close()
    let_go.set()
    eventually(lambda: wheel_speeds(bus) == {0}, "the wheels turn after the robot is closed")


def test_out_of_range_arm_holds_without_jump(
    arm: FeetechArmSimulator,
) -> None:
    arm.poke("shoulder_pan", PRESENT, 2700)
    with follower(arm, features={"shoulder_pan.pos": FeatureConfig("deg", -30, 30)}) as robot:
        for level in (StopLevel.HOLD, StopLevel.HOLD, StopLevel.SAFE):
            assert abs(arm.word("shoulder_pan", GOAL) - 2700) <= 1
            robot.stop(level)
        assert abs(arm.word("shoulder_pan", GOAL) - 2700) <= 1
        with pytest.raises(HardwareLost, match=r"shoulder_pan.pos is at 0.99.*: a person must move it back"):
            robot.command(robot.spec.rest_action(robot.observe().arrays))
        assert abs(arm.word("shoulder_pan", GOAL) - 2700) <= 1


def test_reset_moves_arm_to_configured_home(arm: FeetechArmSimulator) -> None:
    home = [0.4, -0.3, 0.2, 0.0, 0.1]
    options = {"type": "so101_follower", "settings": arm.settings, "rate_hz": 10.0, "torque_off": True, "home": home}
    setup = make_robot_setup(RobotSetupRequest("so101-0", "tidy", {**options, "reduced_speed": 1.0}))
    with setup.robot as robot:
        arrive(robot, np.array([0, 0, 0, 0, 0, 75], np.float32))
        robot.stop(StopLevel.SAFE)
        setup.task.reset(robot, np.random.default_rng(0))
        assert np.abs(robot.observe().arrays[STATE][:5] - home).max() < 0.02
        assert arm.word("gripper", GOAL) == 2560, "the grip is kept"


def test_home_out_of_calibrated_range_is_refused(arm: FeetechArmSimulator) -> None:
    with pytest.raises(SpecError, match=r"home: shoulder_pan\.pos is 2; it must be between -1\.57\d* and 1\.57"):
        follower(arm, home=(2.0, 0.0, 0.0, 0.0, 0.0))


def test_arm_that_keeps_degrees_has_its_calibrated_range_in_degrees(arm: FeetechArmSimulator) -> None:
    kept, half_range = {"*.pos": FeatureConfig("lerobot_deg", -180, 180)}, 1024 / 4095 * 360
    with pytest.raises(SpecError, match=r"shoulder_pan\.pos is 91; it must be between -90\.02\d* and 90\.02"):
        follower(arm, features=kept, home=(91.0, 0.0, 0.0, 0.0, 0.0))
    robot = follower(arm, features=kept, home=(60.0, -30.0, 0.0, 0.0, 0.0))
    robot.connect()
    try:
        robot.observe()
        applied = robot.command(np.array([170, 60, 0, 0, 0, 50], np.float32))
        assert applied[:2] == pytest.approx([half_range, 60], abs=0.1)
    finally:
        robot.close()


def test_reach_goals_out_of_calibrated_range_are_refused(arm: FeetechArmSimulator) -> None:
    options = {"type": "so101_follower", "settings": arm.settings}
    make_robot_setup(RobotSetupRequest("so101-0", "reach", options))
    arm.calibration.write_text(arm.calibration.read_text().replace("1024", "1124"))
    wrong = (
        r"shoulder_pan.pos has goals from -1.571 to 1.571, and is calibrated from -1.49\d to 1.49\d; set `reach.low`"
    )
    with pytest.raises(SpecError, match=wrong):
        make_robot_setup(RobotSetupRequest("so101-0", "reach", options))


def test_invalid_options_are_explained() -> None:
    with pytest.raises(SpecError, match="did you mean 'so101_follower'"):
        LerobotRobot(LerobotConfig(type="so101_folower"))
    with pytest.raises(SpecError, match=r"units of .*shoulder_pan.pos.* are not known"):
        LerobotRobot(LerobotConfig(type="dummy_follower"))
    with pytest.raises(SpecError, match="no motor bus"):
        make_robot_setup(RobotSetupRequest("arm", "free", {"type": "dummy_follower", "torque_off": True}))


def test_setup_has_configured_cameras() -> None:
    options = {
        "type": "dummy_follower",
        "settings": {"silent": True},
        "features": {"*.pos": {"unit": "deg", "low": -180, "high": 180}},
        "cameras": {"top": {"device": 0, "width": 64, "height": 48}},
    }
    setup = make_robot_setup(RobotSetupRequest("dummy-0", "tidy", options))
    assert [camera.spec for camera in setup.cameras] == list(setup.robot.spec.cameras)
    assert setup.robot.spec.action.labels[-1] == "gripper.pos"
    assert setup.task.instruction == "tidy"
