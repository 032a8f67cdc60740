"""Faults of an arm behind ros2_control, with stand-ins for ROS. This test does not need ROS."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simplejpeg

from hal.errors import EmergencyStopped, HardwareLost, SpecError, StaleObservation, StoppedAtRobot
from hal.robot import StopLevel, no_op
from hal.spec import CameraSpec
from robots import ros2
from robots.ros2 import ControllerManager, Ros2Robot, RosCamera
from robots.ros2_spec import GripperConfig, JointLimits, Ros2Config, RosCameraConfig, WrenchConfig

PLAIN: dict[str, Any] = {"joints": ("a",), "limits": {"a": JointLimits(-1, 1, 1)}, "velocities": False}
PLAIN["stale_after_s"] = 60.0  # a busy machine is late by seconds
IMAGE = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8), colorspace="RGB")
URDF = """<robot name="two">
  <joint name="a" type="revolute"><parent link="base"/><child link="arm"/>
    <limit lower="-1" upper="1" velocity="1"/></joint>
  <joint name="b" type="revolute"><parent link="arm"/><child link="sensor"/>
    <limit lower="-1" upper="1" velocity="1"/></joint>
</robot>"""


class Node:
    """Delivers one message to each subscription, stamped by a clock that is `ahead_s` (of forces and images)."""

    is_connected, rclpy_node = True, object()

    def __init__(self, *_: object) -> None:
        self.silent, self.ahead_s = False, 0.0

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def subscribe(self, kind: str, topic: str, callback: Callable[[Any], None]) -> None:
        if self.silent:
            return
        ahead_s = 0.0 if "JointState" in kind else self.ahead_s
        seconds, nanoseconds = divmod(time.time_ns() + int(ahead_s * 1e9), 1_000_000_000)
        header = SimpleNamespace(stamp=SimpleNamespace(sec=seconds, nanosec=nanoseconds), frame_id="sensor")
        if "Image" in kind:
            callback(SimpleNamespace(header=header, data=IMAGE))
        elif "Wrench" in kind:
            force = SimpleNamespace(x=0.0, y=0.0, z=1.0)
            callback(SimpleNamespace(header=header, wrench=SimpleNamespace(force=force)))
        else:
            callback(SimpleNamespace(header=header, name=["a", "grip"], position=[0.0, 0.0], velocity=[]))

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, error: str, check_stop: Callable[[], None] = no_op
    ) -> None:
        if not condition():
            check_stop()
            raise HardwareLost(error)


class Controller:
    def __init__(self, name: str, log: list[str], *_: object) -> None:
        self.name, self.is_gone, self._log = name, False, log

    def open(self, *_: object, **__: object) -> None:
        """Nothing to open."""

    def send(self, targets: dict[str, float]) -> None:
        if self.is_gone:
            raise HardwareLost(f"controller {self.name} is gone")
        self._log.append(self.name)


class Manager:
    """Notes what it switches, or refuses to."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.refuses, self.finds_active = log, False, True
        self.check_active = self.require_active = lambda: None

    def is_active(self) -> bool:
        return self.finds_active

    def activate(self, instead_of: object) -> None:
        if self.refuses:
            raise HardwareLost("the manager refuses")
        self._log.append("activate")

    def deactivate(self) -> None:
        if self.refuses:
            raise HardwareLost("the manager refuses")
        self._log.append("deactivate")


class Stopping:
    """An arm and a gripper; `log` has what was called since they connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.manager, self.node = Manager(self.log), Node()
        self.controllers: list[Controller] = []
        service = SimpleNamespace(call=lambda *_: (self.log.append("service"), SimpleNamespace(success=True))[1])
        monkeypatch.setattr(ros2, "RosNode", lambda *_: self.node)
        monkeypatch.setattr(ros2, "RosController", self._controller)
        monkeypatch.setattr(ros2, "ControllerManager", lambda *_: self.manager)
        monkeypatch.setattr(ros2, "RosServiceClient", lambda *_: service)
        grip = GripperConfig("grip", 0, 0.1, controller="hand")
        self.robot = Ros2Robot(Ros2Config(controller="arm", gripper=grip, stop_service="/stop", **PLAIN))

    def connect(self) -> None:
        self.robot.connect()
        self.log.clear()

    def _controller(self, name: str, *_: object) -> Controller:
        self.controllers.append(Controller(name, self.log))
        return self.controllers[-1]


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Stopping:
    return Stopping(monkeypatch)


@pytest.mark.parametrize("gone", [0, 1])
def test_safe_stop_runs_every_step_without_a_controller(stopping: Stopping, gone: int) -> None:
    stopping.connect()
    stopping.controllers[gone].is_gone = True
    with pytest.raises(HardwareLost, match=f"controller {stopping.controllers[gone].name} is gone"):
        stopping.robot.stop(StopLevel.SAFE)
    assert stopping.log == [stopping.controllers[1 - gone].name, "deactivate", "service"]


def test_refused_deactivation_is_repeated(stopping: Stopping) -> None:
    stopping.connect()
    stopping.manager.refuses = True
    with pytest.raises(HardwareLost, match="refuses"):
        stopping.robot.stop(StopLevel.SAFE)
    assert stopping.log == ["arm", "hand", "service"]
    stopping.manager.refuses = False
    stopping.robot.stop(StopLevel.SAFE)
    assert stopping.log[3:] == ["arm", "hand", "deactivate", "service"]
    stopping.robot.stop(StopLevel.SAFE)
    assert len(stopping.log) == 7, "done"


@pytest.mark.parametrize("silent", [True, False])
def test_stop_during_connect_activates_nothing(stopping: Stopping, silent: bool) -> None:
    def press() -> None:
        raise EmergencyStopped("pressed by ada")

    stopping.robot.check_stop, stopping.node.silent = press, silent
    with pytest.raises(EmergencyStopped):
        stopping.robot.connect()
    assert stopping.log == []


def test_inactive_controllers_are_activated_at_the_first_command_and_hold(stopping: Stopping) -> None:
    """A person may guide the arm by another controller, under a latched e-stop or before a session."""
    stopping.manager.finds_active = False
    robot = stopping.robot
    robot.connect()
    robot.stop(StopLevel.HOLD)
    assert stopping.log == ["arm", "hand"], "which ignore it"
    robot.stop(StopLevel.SAFE)
    assert stopping.log[2:] == ["arm", "hand", "deactivate", "service"]
    stopping.log.clear()
    action = np.array([0.1, 0.05], np.float32)
    assert robot.command(action).tolist() == [0.0, 0.0], "where the arm was measured"
    assert stopping.log == ["activate", "arm", "hand"]
    assert robot.command(action).tolist() == action.tolist()
    assert stopping.log == ["activate", *["arm", "hand"] * 2]


def test_controllers_whose_activation_failed_are_deactivated_at_the_next_stop(stopping: Stopping) -> None:
    stopping.connect()
    stopping.robot.stop(StopLevel.SAFE)
    stopping.manager.refuses = True
    with pytest.raises(HardwareLost, match="refuses"):
        stopping.robot.command(np.array([0.1, 0.05], np.float32))
    stopping.manager.refuses = False
    stopping.log.clear()
    stopping.robot.stop(StopLevel.SAFE)
    assert stopping.log == ["arm", "hand", "deactivate", "service"], "the manager may have activated them"


def test_e_stop_while_the_controllers_are_activated_again_moves_nothing(stopping: Stopping) -> None:
    stopping.connect()
    robot = stopping.robot
    robot.stop(StopLevel.SAFE)
    stopping.log.clear()

    def press() -> None:
        """As the driver process: it stops the robot first."""
        stopping.log.append("press")
        robot.stop(StopLevel.SAFE)
        raise EmergencyStopped("pressed by ada")

    robot.check_stop = press
    with pytest.raises(EmergencyStopped, match="ada"):
        robot.command(np.array([0.1, 0.05], np.float32))
    assert stopping.log == ["activate", "press", "arm", "hand", "deactivate", "service"], "it holds, and ends active"


def test_controller_manager_that_answered_is_not_lost_after_a_pause_of_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, answers = [100.0], [True]
    active = SimpleNamespace(controller=[SimpleNamespace(name="arm", state="active")])
    asked = SimpleNamespace(done=lambda: answers[0], result=lambda: active)
    service = SimpleNamespace(is_ready=True, call_async=lambda _: asked)
    monkeypatch.setattr(ros2, "RosServiceClient", lambda *_: service)
    monkeypatch.setattr(ros2, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    manager = ControllerManager(Node(), "/manager", ["arm"], 1.0)  # type: ignore[arg-type]  # a stand-in
    for _ in range(4):
        now_s[0] += 5.0  # for example a reset that waits for its fixture
        manager.check_active()
    answers[0] = False
    manager.check_active()
    now_s[0] += 5.0
    with pytest.raises(HardwareLost, match="has not answered for 5.0 s"):
        manager.check_active()


class Services:
    """Those of a controller manager, which lists its controllers without its namespace."""

    def __init__(self, **states: str) -> None:
        self.states, self.switched = states, list[dict[str, Any]]()
        self.is_ready = True

    def call(self, request: dict[str, Any], _: float) -> SimpleNamespace:
        if request:
            self.switched.append(request)
            self.states |= dict.fromkeys(request["activate_controllers"], "active")
            self.states |= dict.fromkeys(request["deactivate_controllers"], "inactive")
        listed = [SimpleNamespace(name=name, state=state) for name, state in self.states.items()]
        return SimpleNamespace(ok=True, controller=listed)

    def call_async(self, request: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(done=lambda: True, result=lambda: self.call(request, 0.0))


def test_controllers_in_a_namespace_are_switched_by_the_names_that_their_manager_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = Services(arm="inactive", hand="inactive", forward="active")
    monkeypatch.setattr(ros2, "RosServiceClient", lambda *_: services)
    names = ["/left/arm", "left/hand"]
    manager = ControllerManager(Node(), "/left/controller_manager", names, 1.0)  # type: ignore[arg-type]
    assert not manager.is_active()
    manager.activate(["/left/forward"])
    manager.require_active()
    assert manager.is_active()
    assert services.states == {"arm": "active", "hand": "active", "forward": "inactive"}
    manager.deactivate()
    assert set(services.states.values()) == {"inactive"}


@pytest.mark.parametrize(("state", "latches"), [("inactive", True), ("unconfigured", False), ("not loaded", False)])
def test_controller_that_is_deactivated_while_it_runs_latches_the_estop(
    monkeypatch: pytest.MonkeyPatch, state: str, latches: bool
) -> None:
    services, now_s = Services(arm="active"), [100.0]
    monkeypatch.setattr(ros2, "RosServiceClient", lambda *_: services)
    monkeypatch.setattr(ros2, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    manager = ControllerManager(Node(), "/manager", ["arm"], 1.0)  # type: ignore[arg-type]  # a stand-in
    services.states = {} if state == "not loaded" else {"arm": state}
    with pytest.raises(HardwareLost, match="not active") as at_start:
        manager.require_active()
    now_s[0] += 1.0
    manager.check_active()
    with pytest.raises(HardwareLost, match=f"'arm': '{state}'.; a person or a fault stopped them") as running:
        manager.check_active()
    assert [isinstance(each.value, StoppedAtRobot) for each in (at_start, running)] == [False, latches]


def test_force_sensor_beyond_an_unknown_joint_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "two.urdf").write_text(URDF)
    monkeypatch.setattr(ros2, "RosNode", Node)
    config = Ros2Config(description=str(tmp_path / "two.urdf"), wrench=WrenchConfig("/wrench"), **PLAIN)
    with pytest.raises(SpecError, match=r"wrench: .* to sensor has joints that are missing in the config: \['b'\]"):
        Ros2Robot(config).connect()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """That of the arm, or of a camera. No controller needs it."""
    node = Node()
    monkeypatch.setattr(ros2, "RosNode", lambda *_: node)
    monkeypatch.setattr(ros2, "RosController", lambda name, *_: Controller(name, []))
    return node


FORCE = Ros2Config(wrench=WrenchConfig("/wrench"), manager="", **PLAIN)


def test_force_sensor_whose_clock_is_ahead_is_named(node: Node) -> None:
    node.ahead_s = 0.4
    ahead = "/wrench: stamps are 0\\.[34]\\d* s ahead of this computer's clock: synchronise the clocks, or set `clock`"
    with pytest.raises(HardwareLost, match=ahead):
        Ros2Robot(FORCE).connect()


def test_camera_whose_clock_is_ahead_is_named(node: Node) -> None:
    node.ahead_s, node.is_connected = 0.4, False
    topic = RosCameraConfig(topic="/camera", kind="compressed")
    camera = RosCamera("arm_front", CameraSpec(name="front", height=48, width=64, rate_hz=30.0), topic, FORCE)
    ahead = "no image on /camera: stamps are 0\\.[34]\\d* s ahead of this computer's clock: synchronise the clocks"
    with pytest.raises(HardwareLost, match=ahead):
        camera.connect()


def test_force_sensor_that_is_silent_is_named(node: Node) -> None:
    node.ahead_s = -100.0
    robot = Ros2Robot(FORCE)
    robot.connect()
    with pytest.raises(HardwareLost, match="has sent no force on /wrench for 100"):
        robot.observe()
    robot.command(np.array([0.1], np.float32))  # the joint states are recent


def test_damaged_image_keeps_the_last_one_until_it_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    camera_config = RosCameraConfig(topic="/camera", kind="compressed", stale_after_s=0.5)
    config = Ros2Config(**PLAIN)
    send: list[Callable[[Any], None]] = []
    node = SimpleNamespace(is_connected=False, open=lambda: None, close=lambda: None, wait_until=lambda *_: None)
    node.subscribe = lambda kind, topic, callback: (send.append(callback), put(IMAGE))
    monkeypatch.setattr(ros2, "RosNode", lambda *_: node)
    camera = RosCamera("arm_front", CameraSpec(name="front", height=48, width=64, rate_hz=30.0), camera_config, config)

    def put(content: bytes) -> None:
        seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        stamp = SimpleNamespace(sec=seconds, nanosec=nanoseconds)
        send[0](SimpleNamespace(header=SimpleNamespace(stamp=stamp), data=content))

    camera.connect()
    node.is_connected = True
    first = camera.read()
    put(IMAGE[:-100])
    assert camera.read() is first
    time.sleep(0.6)
    put(IMAGE[:-100])
    with pytest.raises(StaleObservation):
        camera.read()
    put(IMAGE)
    assert camera.read().t_capture_ns > first.t_capture_ns
    put(simplejpeg.encode_jpeg(np.zeros((32, 32, 3), np.uint8)))
    with pytest.raises(HardwareLost, match="images of 32x32; the config says 64x48"):
        camera.read()
