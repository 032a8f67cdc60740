"""ros2_control's controllers: their topics, parameters and the controller manager's services.

A joint trajectory controller receives trajectories of one point, due at the end of the control period, with joints by
name. Since ros2_controllers 4.2 it refuses an empty trajectory, so a hold is a trajectory to the measured position. A
forward controller receives positions in the order of its parameter ``joints``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hal.errors import HardwareLost
from hal.spec import Array
from robots.ros2_node import RosNode, RosServiceClient, message_type

ControllerKind = Literal["trajectory", "position"]

RESPONSE_TIMEOUT_S = 2.0
STATE_CHECK_INTERVAL_S = 0.5
ACTIVE, INACTIVE = "active", "inactive"
_STRICT = 2  # controller_manager_msgs/srv/SwitchController
_STRING, _STRINGS = 4, 9  # rcl_interfaces/msg/ParameterType


def read_parameters(ros_node: RosNode, node: str, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Read another node's parameters that are strings or lists of strings; others and unset ones are left out.

    Raises:
        HardwareLost: the node does not answer.
    """
    service = RosServiceClient(ros_node, "rcl_interfaces/srv/GetParameters", f"{node}/get_parameters")
    found: dict[str, Any] = {}
    for name in names:  # one request each: an undeclared name makes the whole response fail
        for value in service.call({"names": [name]}, timeout_s).values:
            if value.type == _STRING:
                found[name] = value.string_value
            elif value.type == _STRINGS:
                found[name] = list(value.string_array_value)
    return found


class RosController:
    """One controller of some joints; it receives targets for the end of a control period."""

    def __init__(self, name: str, kind: ControllerKind, joints: Sequence[str], period_s: float) -> None:
        self.name, self.kind, self.joints = name, kind, tuple(joints)
        self._period_s, self._order = period_s, self.joints
        self._publisher: Any = None

    def open(self, ros_node: RosNode, *, stamped: bool, query_parameters: bool, timeout_s: float) -> None:
        """Connect to the controller. Blocks.

        Args:
            stamped: its clock is synchronised with this computer's.
            query_parameters: read its joints and interface; otherwise use those of the config.

        Raises:
            HardwareLost: it does not answer, moves other joints, or does not command positions.
        """
        self._ros_node, self._stamped = ros_node, stamped
        if query_parameters:
            self._check(read_parameters(ros_node, self._controller_node, ["joints", "interface_name"], timeout_s))
        kind, topic = {
            "trajectory": ("trajectory_msgs/msg/JointTrajectory", f"{self._controller_node}/joint_trajectory"),
            "position": ("std_msgs/msg/Float64MultiArray", f"{self._controller_node}/commands"),
        }[self.kind]
        self._message = message_type(kind)
        self._publisher = ros_node.create_command_publisher(kind, topic, 2 * self._period_s if stamped else None)
        ros_node.wait_until(lambda: self.has_subscriber, timeout_s, f"there is no subscriber on {topic}")

    @property
    def has_subscriber(self) -> bool:
        """Whether the commands have a subscriber."""
        return bool(self._publisher.get_subscription_count())

    def send(self, targets: Mapping[str, float]) -> None:
        """Start the motion to `targets` (rad or m, by joint name), due at the end of a control period.

        Raises:
            HardwareLost: the controller is gone.
        """
        if not self.has_subscriber:
            raise HardwareLost(f"controller {self.name} is gone: its commands have no subscriber")
        values = [float(targets[name]) for name in self._order]
        trajectory = self.kind == "trajectory"
        self._publisher.publish(self._trajectory(values) if trajectory else self._message(data=values))

    @property
    def _controller_node(self) -> str:
        return self.name if self.name.startswith("/") else f"/{self.name}"

    def _check(self, parameters: Mapping[str, Any]) -> None:
        order = parameters.get("joints", [])
        if set(order) != set(self.joints):
            raise HardwareLost(
                f"controller {self.name} moves {order}; the config says {list(self.joints)}: correct `joints` or "
                "`controller`"
            )
        self._order = tuple(order)
        commanded = parameters.get("interface_name", "position")
        if self.kind == "position" and commanded != "position":  # it would move on if this process died
            raise HardwareLost(
                f"controller {self.name} commands {commanded}; use one that commands positions, which stops if "
                "this process dies"
            )

    def _trajectory(self, values: list[float]) -> Any:
        seconds, rest = divmod(round(self._period_s * 1e9), 1_000_000_000)
        point = message_type("trajectory_msgs/msg/JointTrajectoryPoint")(positions=values)
        point.time_from_start.sec, point.time_from_start.nanosec = seconds, rest
        message = self._message(joint_names=list(self._order), points=[point])
        if self._stamped:  # a late trajectory has less time left; an expired one is refused
            message.header.stamp = self._ros_node.rclpy_node.get_clock().now().to_msg()
        return message


class ControllerManager:
    """Activates and deactivates controllers, and checks that they stay active."""

    def __init__(self, ros_node: RosNode, name: str) -> None:
        """Raises SpecError if ROS 2 lacks the package controller_manager_msgs."""
        self._list = RosServiceClient(
            ros_node, "controller_manager_msgs/srv/ListControllers", f"{name}/list_controllers"
        )
        self._switch = RosServiceClient(
            ros_node, "controller_manager_msgs/srv/SwitchController", f"{name}/switch_controller"
        )
        self.name = name
        self._asked: Any = None
        self._asked_s = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether its services are available; a new node needs a moment to discover them."""
        return self._list.is_ready and self._switch.is_ready

    def read_states(self) -> dict[str, str]:
        """The state of each loaded controller. Blocks. Raises HardwareLost."""
        return _controller_states(self._list.call({}, RESPONSE_TIMEOUT_S))

    def require_active(self, controllers: Sequence[str]) -> None:
        """Raises HardwareLost if one of `controllers` is not active. Blocks."""
        _require_active(self.name, self.read_states(), controllers)

    def switch(self, *, activate: Sequence[str] = (), deactivate: Sequence[str] = ()) -> None:
        """Activate the inactive controllers of `activate` and deactivate the active ones of `deactivate`, in one cycle
        of the control loop, or none of them. Blocks.

        Raises:
            HardwareLost: the manager does not answer or refuses; a controller is not loaded or not configured.
        """
        states = self.read_states()
        unknown = {
            name: states.get(name, "not loaded") for name in activate if states.get(name) not in (ACTIVE, INACTIVE)
        }
        if unknown:
            raise HardwareLost(f"{self.name}: cannot activate {unknown}; the controllers are {states}")
        start = [name for name in activate if states[name] == INACTIVE]
        stop = [name for name in deactivate if states.get(name) == ACTIVE]
        self._asked = None
        if not start and not stop:
            return
        request = {"activate_controllers": start, "deactivate_controllers": stop, "strictness": _STRICT}
        response = self._switch.call(request, RESPONSE_TIMEOUT_S)
        if not response.ok:
            why = getattr(response, "message", "") or "its log has the reason"
            raise HardwareLost(f"{self.name} did not activate {start} and deactivate {stop}: {why}")

    def check_active(self, controllers: Sequence[str]) -> None:
        """Check periodically, without blocking, that `controllers` are active. Call it in each control period.

        Raises:
            HardwareLost: one is not active, or the manager has not answered for `RESPONSE_TIMEOUT_S`.
        """
        now_s = time.monotonic()
        if self._asked is None:
            if now_s - self._asked_s >= STATE_CHECK_INTERVAL_S and self._list.is_ready:
                self._asked, self._asked_s = self._list.call_async({}), now_s
        elif self._asked.done():
            states, self._asked = _controller_states(self._asked.result()), None
            _require_active(self.name, states, controllers)
        if now_s - self._asked_s > STATE_CHECK_INTERVAL_S + RESPONSE_TIMEOUT_S:
            raise HardwareLost(f"{self.name} has not answered for {now_s - self._asked_s:.1f} s")


def _controller_states(response: Any) -> dict[str, str]:
    return {each.name: each.state for each in response.controller}


def _require_active(manager: str, states: Mapping[str, str], controllers: Sequence[str]) -> None:
    stopped = {name: states.get(name, "not loaded") for name in controllers if states.get(name) != ACTIVE}
    if stopped:
        raise HardwareLost(f"{manager}: not active: {stopped}; a person or a fault stopped them")


def values_by_joint(joints: Sequence[str], values: Array) -> dict[str, float]:
    """`values` by joint name."""
    return dict(zip(joints, np.asarray(values, np.float64).tolist(), strict=True))
