"""The ROS 2 driver with rclpy, against a simulated ros2_control in another process: ``make test-ros2``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from peer_kit import REPLY_S, eventually
from ros2_kit import DOMAIN, HERE_ONLY, OTHER_DOMAIN, Ros2Peer, ros2_peer

from hal.camera import Camera
from hal.conformance import CameraConformance, RobotConformance
from hal.driver import RobotSetupRequest
from hal.errors import EmergencyStopped, HardwareLost, StaleObservation, StoppedAtRobot
from hal.resource import ResourceRecord
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import STATE, Array
from robots.ros2 import Ros2Robot, make_robot_setup
from robots.ros2_node import GraphProbe
from robots.ros2_spec import GripperConfig, JointLimits, Ros2Config, RosCameraConfig, WrenchConfig

pytestmark = [
    pytest.mark.ros2,
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # lark, in case an old lark-parser shadows it
]
JOINTS = ("shoulder", "elbow", "wrist")
PLAIN = Ros2Config(
    joints=JOINTS,
    controller="arm_controller",
    rate_hz=10.0,
    limits={"*": JointLimits(-2.0, 2.0, 1.0)},
    domain=DOMAIN,
    connect_s=REPLY_S,
    stale_after_s=1.0,  # for busy machines; the tests of timing use the default
    lost_after_s=3.0,
)
FORWARD = replace(PLAIN, controller="forward", kind="position", instead_of=("arm_controller",))
CAMERA = RosCameraConfig(topic="/camera/image_raw", height=48, width=64)
PACKED = replace(CAMERA, topic="/camera/image_raw/compressed", kind="compressed")
HOME = np.zeros(3, np.float32)


@pytest.fixture(scope="module", autouse=True)
def _here_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HERE_ONLY.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def shared_peer(_here_only: None) -> Iterator[Ros2Peer]:
    with ros2_peer() as peer:
        yield peer


@pytest.fixture
def peer(shared_peer: Ros2Peer) -> Ros2Peer:
    """The peer in its initial state: publishing, no button pressed, the trajectory controller active."""
    for order in (
        "put arm_controller active",
        "put forward inactive",
        "put grip active",
        "press 0",
        "fault 0",
        "refuse 0",
        "skew 0",
    ):
        shared_peer.send(order)
    for what in ("joints", "stamps", "velocities", "positions", "wrench", "pictures"):
        shared_peer.send(f"speak {what}")
    shared_peer.send("force 0 0 0")
    shared_peer.send("skew 0")
    return shared_peer


def arrive(robot: Robot, action: Array) -> None:
    def is_there() -> bool:
        robot.command(action)
        return bool(np.abs(robot.observe().arrays[STATE][: len(action)] - action).max() < 0.005)

    eventually(is_there, f"the arm did not get to {action}")


def await_raise(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object], match: str) -> None:
    """`call` raises eventually."""
    deadline_s = time.monotonic() + REPLY_S
    with pytest.raises(kind, match=match):
        while time.monotonic() < deadline_s:
            call()
            time.sleep(0.02)


class TestTrajectoryController(RobotConformance):
    allows_large_steps = True

    @pytest.fixture(autouse=True)
    def _peer(self, peer: Ros2Peer) -> None:
        self.peer = peer

    def make_robot(self) -> Robot:
        return Ros2Robot(PLAIN)

    def has_not_moved(self, before: Observation, after: Observation) -> bool:
        moved = before.arrays[STATE][:3] - after.arrays[STATE][:3]
        return bool(np.abs(moved).max() < 0.01)


class TestCompressedPictures(CameraConformance):
    @pytest.fixture(autouse=True)
    def _peer(self, peer: Ros2Peer) -> None:
        self.peer = peer

    def make_camera(self) -> Camera:
        return make_camera(PACKED)


def make_camera(topic: RosCameraConfig, **options: object) -> Camera:
    config = {
        "joints": list(JOINTS),
        "limits": {"*": {"low": -2.0, "high": 2.0, "speed_max": 1.0}},
        "domain": DOMAIN,
        "connect_s": REPLY_S,
        "cameras": {
            "front": {"topic": topic.topic, "height": 48, "width": 64, "kind": topic.kind, "stale_after_s": 0.5}
        },
        **options,
    }
    return make_robot_setup(RobotSetupRequest("arm-0", "free", config)).cameras[0]


@pytest.mark.parametrize("config", [PLAIN, FORWARD], ids=["trajectory", "forward"])
def test_joints_are_matched_by_name_and_gripper_has_its_controller(peer: Ros2Peer, config: Ros2Config) -> None:
    grip = GripperConfig("finger", 0.0, 0.08, controller="grip")
    with Ros2Robot(replace(config, gripper=grip)) as robot:
        arrive(robot, np.array([0.1, 0.2, 0.3, 0.05], np.float32))
        robot.stop(StopLevel.HOLD)
        place = peer.state()["place"]
        assert [round(place[name], 2) for name in (*JOINTS, "finger")] == [0.1, 0.2, 0.3, 0.05]
        arrive(robot, np.array([*HOME, 0.0], np.float32))
    assert peer.state()["counts"]["refused"] == 0


def test_description_gives_limits_and_tool_position(peer: Ros2Peer) -> None:
    for source in ("topic:/robot_description", "parameter:/robot_state_publisher"):
        config = replace(PLAIN, limits={"wrist": JointLimits(-1.0, 1.0)}, description=source, tool="hand")
        with Ros2Robot(config) as robot:
            assert robot.spec.limits.joint_low == (-2.5, -2.0, -1.0)
            assert robot.spec.limits.joint_velocity_max == (0.5, 0.5, 1.0)
            tool = robot.observe().arrays[STATE][list(robot.spec.limits.tool_position)]
            np.testing.assert_allclose(tool, [0.5, 0, 0.1], atol=0.01)


def test_force_stops_the_arm_and_is_in_base_frame(peer: Ros2Peer) -> None:
    wrench = WrenchConfig("/wrench", force_max=20.0)
    with Ros2Robot(replace(PLAIN, wrench=wrench, description="topic:/robot_description")) as robot:
        kernel = SafetyKernel(robot.spec)
        assert kernel.filter(HOME, robot.observe()).applied is not None
        arrive(robot, np.array([np.pi / 2, 0, 0], np.float32))
        peer.send("force 30 0 0")
        where = list(robot.spec.limits.tool_force)
        eventually(lambda: abs(robot.observe().arrays[STATE][where]).max() > 1, "no force was reported")
        seen = robot.observe()
        np.testing.assert_allclose(seen.arrays[STATE][where], [0, 30, 0], atol=0.5)
        assert SafetyReason.FORCE in kernel.filter(HOME, seen).reasons
        peer.send("force 0 0 0")
        arrive(robot, HOME)


def test_safe_stop_deactivates_until_next_command(peer: Ros2Peer) -> None:
    with Ros2Robot(replace(PLAIN, stop_service="/stop")) as robot:
        stops = peer.state()["counts"]["stops"]
        robot.command(np.array([0.5, 0, 0], np.float32))
        robot.stop(StopLevel.HOLD)
        held = robot.observe().arrays[STATE][0]
        assert held < 0.45, "not at its last target"
        for _ in range(3):
            robot.stop(StopLevel.SAFE)
        state = peer.state()
        assert state["controllers"]["arm_controller"] == "inactive"
        assert state["counts"]["stops"] == stops + 1
        robot.command(HOME)
        assert peer.state()["controllers"]["arm_controller"] == "active"
        arrive(robot, HOME)
        peer.send("refuse 1")
        with pytest.raises(HardwareLost, match="did not activate .* and deactivate"):
            robot.stop(StopLevel.SAFE)
        assert peer.state()["counts"]["stops"] == stops + 2, "the service is called all the same"
        peer.send("refuse 0")
        robot.command(HOME)
    assert peer.state()["controllers"]["arm_controller"] == "inactive", "closing is a safe stop"


def test_out_of_range_arm_is_refused_without_jump(peer: Ros2Peer) -> None:
    with Ros2Robot(PLAIN) as robot:
        arrive(robot, np.array([0.3, 0, 0], np.float32))
    limits = {"shoulder": JointLimits(-0.1, 0.1, 1.0), "*": JointLimits(-2.0, 2.0, 1.0)}
    with pytest.raises(HardwareLost, match=r"shoulder.pos is at 0\.\d+; .* a person must move it back"):
        Ros2Robot(replace(PLAIN, limits=limits)).connect()
    state = peer.state()
    assert state["place"]["shoulder"] == pytest.approx(0.3, abs=0.02)
    assert state["controllers"]["arm_controller"] == "inactive", "as the safe stop before left it"
    with Ros2Robot(PLAIN) as robot:
        arrive(robot, HOME)


def test_reset_moves_arm_to_configured_home(peer: Ros2Peer) -> None:
    options = {
        "joints": list(JOINTS),
        "controller": "arm_controller",
        "rate_hz": 10.0,
        "limits": {"*": {"low": -2.0, "high": 2.0, "speed_max": 1.0}},
        "domain": DOMAIN,
        "connect_s": REPLY_S,
        "stale_after_s": 1.0,
        "lost_after_s": 3.0,
        "home": [0.3, -0.2, 0.1],
        "reach": {},
    }
    setup = make_robot_setup(RobotSetupRequest("arm-0", "reach", options))
    with setup.robot as robot:
        robot.stop(StopLevel.SAFE)
        setup.task.reset(robot, np.random.default_rng(0))
        np.testing.assert_allclose(robot.observe().arrays[STATE][:3], [0.3, -0.2, 0.1], atol=0.02)
        assert peer.state()["controllers"]["arm_controller"] == "active"


def test_stopped_controller_loses_robot_and_fault_is_not_cleared(peer: Ros2Peer) -> None:
    with Ros2Robot(PLAIN) as robot:
        peer.send("put arm_controller inactive")
        await_raise(StoppedAtRobot, lambda: robot.command(HOME), "a person or a fault")
    assert peer.state()["controllers"]["arm_controller"] == "inactive"
    with pytest.raises(HardwareLost, match="not active"):
        Ros2Robot(replace(PLAIN, activate=False)).connect()
    peer.send("fault 1")
    with Ros2Robot(PLAIN) as robot, pytest.raises(HardwareLost, match="hardware component is in an error"):
        robot.command(HOME)


def test_person_who_guides_the_arm_by_another_controller_keeps_it_until_the_first_command(peer: Ros2Peer) -> None:
    peer.send("put arm_controller inactive")
    peer.send("put forward active")
    with Ros2Robot(replace(PLAIN, instead_of=("forward",))) as robot:
        robot.stop(StopLevel.HOLD)
        robot.stop(StopLevel.SAFE)
        assert peer.state()["controllers"] == {"arm_controller": "inactive", "forward": "active", "grip": "active"}
        held = robot.command(np.array([0.5, 0, 0], np.float32))
        np.testing.assert_allclose(held, robot.observe().arrays[STATE][:3], atol=0.01)
        assert peer.state()["controllers"] == {"arm_controller": "active", "forward": "inactive", "grip": "active"}


def test_silent_stop_button_topic_loses_robot(peer: Ros2Peer) -> None:
    """The peer publishes its state once, as a publisher that hangs would."""
    with Ros2Robot(replace(PLAIN, estop_topic="/stop_button", estop_timeout_s=0.5)) as robot:
        await_raise(HardwareLost, lambda: robot.command(HOME), "no message on /stop_button for")


def test_pressed_stop_button_refuses_commands(peer: Ros2Peer) -> None:
    with Ros2Robot(replace(PLAIN, estop_topic="/stop_button")) as robot:
        robot.command(HOME)
        peer.send("press 1")
        await_raise(EmergencyStopped, lambda: robot.command(HOME), "/stop_button")
        robot.stop(StopLevel.SAFE)
        peer.send("press 0")


def test_pressed_stop_button_refuses_connect(peer: Ros2Peer) -> None:
    with Ros2Robot(PLAIN) as robot:
        robot.stop(StopLevel.SAFE)
    peer.send("press 1")
    with pytest.raises(EmergencyStopped, match=r"is pressed \(/stop_button\)"):
        Ros2Robot(replace(PLAIN, estop_topic="/stop_button")).connect()
    assert peer.state()["controllers"]["arm_controller"] == "inactive"
    peer.send("press 0")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(FORWARD, kind="trajectory"), r"there is no subscriber on /forward/joint_trajectory"),
        (replace(FORWARD, controller="spin"), r"cannot activate \{'spin': 'not loaded'\}"),
        (replace(PLAIN, joints=("shoulder", "elbow", "ankle")), r"ankle on /joint_states"),
        (replace(PLAIN, joints=("shoulder", "elbow")), r"moves \['shoulder', 'elbow', 'wrist'\]"),
        (replace(PLAIN, manager="/elsewhere"), "no controller manager /elsewhere"),
        (replace(PLAIN, estop_topic="/nowhere"), "there is no publisher on /nowhere"),
    ],
)
def test_missing_parts_are_named(peer: Ros2Peer, config: Ros2Config, message: str) -> None:
    with pytest.raises(HardwareLost, match=message):
        Ros2Robot(replace(config, connect_s=3.0)).connect()


@pytest.mark.parametrize(
    ("fate", "message"),
    [("positions", "shoulder on /joint_states"), ("velocities", "velocities of .*set `velocities: false`")],
)
def test_missing_readings_refuse_connect(peer: Ros2Peer, fate: str, message: str) -> None:
    peer.send(f"mute {fate}")
    before = peer.state()["counts"]
    with pytest.raises(HardwareLost, match=message):
        Ros2Robot(replace(PLAIN, connect_s=5.0)).connect()
    assert peer.state()["counts"] == before


def test_velocity_controller_is_refused(peer: Ros2Peer) -> None:
    peer.send("put spin active")
    with pytest.raises(HardwareLost, match="commands velocity; use one that commands positions"):
        Ros2Robot(replace(PLAIN, controller="spin", kind="position")).connect()


def test_clock_difference_needs_robot_clock(peer: Ros2Peer) -> None:
    peer.send("skew -30")
    with pytest.raises(HardwareLost, match="synchronise the clocks"):
        Ros2Robot(replace(PLAIN, connect_s=10.0)).connect()
    peer.send("skew 30")
    with pytest.raises(HardwareLost, match="ahead of this computer's clock"):
        Ros2Robot(replace(PLAIN, connect_s=10.0)).connect()
    with Ros2Robot(replace(PLAIN, clock="robot")) as robot:
        arrive(robot, HOME)


@pytest.mark.parametrize("fate", ["mute joints", "mute stamps"])
def test_silent_readings_become_stale_then_lost(peer: Ros2Peer, fate: str) -> None:
    with Ros2Robot(PLAIN) as robot:
        robot.observe()
        peer.send(fate)
        await_raise(StaleObservation, robot.observe, "old; at most 1 s")
        await_raise(HardwareLost, lambda: hush(robot), "has sent no joint state for")
        peer.send(f"speak {fate.split()[1]}")


def test_silent_force_sensor_is_named(peer: Ros2Peer) -> None:
    with Ros2Robot(replace(PLAIN, wrench=WrenchConfig("/wrench"))) as robot:
        robot.observe()
        peer.send("mute wrench")
        await_raise(HardwareLost, lambda: hush(robot), "has sent no force on /wrench for")
        peer.send("speak wrench")


def hush(robot: Robot) -> None:
    try:
        robot.observe()
    except StaleObservation:
        return


@pytest.mark.parametrize("fate", ["kill", "freeze"])
def test_disappeared_arm_is_lost_and_reconnects(fate: str) -> None:
    with ros2_peer(OTHER_DOMAIN) as own:
        patient = replace(PLAIN, domain=OTHER_DOMAIN)
        robot = Ros2Robot(replace(patient, stale_after_s=None, lost_after_s=0.5))
        robot.connect()
        getattr(own, fate)()
        await_raise((StaleObservation, HardwareLost), lambda: observe_recent(robot), "old|no joint state")
        await_raise(HardwareLost, lambda: hush(robot), "no joint state for")
        await_raise(HardwareLost, lambda: robot.command(HOME), "no joint state for")
        robot.close()
        own.thaw() if fate == "freeze" else own.restart()
        with Ros2Robot(patient) as again:
            again.command(HOME)


def observe_recent(robot: Robot) -> None:
    """An observation is never older than two control periods."""
    asked_ns = time.monotonic_ns()
    assert asked_ns - robot.observe().t_capture_ns <= 2 * robot.spec.period_s * 1e9


def test_probe_follows_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROS_DOMAIN_ID", str(OTHER_DOMAIN))
    probe = GraphProbe()
    with ros2_peer(OTHER_DOMAIN) as own:
        found = await_found(probe, lambda names: f"ros2/{OTHER_DOMAIN}/joint_states" in names)
        arm = found[f"ros2/{OTHER_DOMAIN}/joint_states"]
        assert {"trajectory:/arm_controller", "position:/forward", "wrench:/wrench"} <= set(arm.capabilities)
        assert f"ros2/{OTHER_DOMAIN}/camera/image_raw" in found
        own.kill()
    await_found(probe, lambda names: not names)


def await_found(probe: GraphProbe, settled: Callable[[set[str]], bool]) -> dict[str, ResourceRecord]:
    deadline_s = time.monotonic() + REPLY_S
    while not settled(set(found := {record.name: record for record in probe()})):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)
    return found


def test_camera_delivers_images_of_its_size_and_becomes_stale(peer: Ros2Peer) -> None:
    for topic in (CAMERA, PACKED):
        camera = make_camera(topic)
        camera.connect()
        frame = camera.read()
        assert frame.image[24, 32, 0] > 150 and frame.image[24, 32, 2] < 60
        assert frame.image[2, 2, 2] > 150
        peer.send("mute pictures")
        await_raise(StaleObservation, camera.read, "the newest reading is")
        peer.send("speak pictures")
        camera.close()
    small = {"front": {"topic": PACKED.topic, "kind": PACKED.kind, "height": 32, "width": 32}}
    with pytest.raises(HardwareLost, match="images of 64x48; the config says 32x32"):
        make_camera(PACKED, cameras=small).connect()
