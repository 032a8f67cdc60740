"""ros2_control's controllers, as their topics, parameters and the controller manager's services show them.

A joint trajectory controller is sent trajectories of one point, to be reached at the end of the control period, with
joints by name. It refuses an empty one since ros2_controllers 4.2, so that holding is a trajectory to where the arm is.
A forward controller is sent positions in the order of its own parameter ``joints``, which is read for that.
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


def read_parameters(link: RosNode, node: str, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Another node's parameters that are texts or lists of texts; one that is not set, or of another type, is left out.

    Raises:
        HardwareLost: the node does not answer.
    """
    service = RosServiceClient(link, "rcl_interfaces/srv/GetParameters", f"{node}/get_parameters")
    found: dict[str, Any] = {}
    for name in names:  # one by one: a name that was not declared spoils the answer for all
        for value in service.call({"names": [name]}, timeout_s).values:
            if value.type == _STRING:
                found[name] = value.string_value
            elif value.type == _STRINGS:
                found[name] = list(value.string_array_value)
    return found


class RosController:
    """One controller that moves some joints; it is sent targets for the end of a control period."""

    def __init__(self, name: str, kind: ControllerKind, joints: Sequence[str], period_s: float) -> None:
        self.name, self.kind, self.joints = name, kind, tuple(joints)
        self._period_s, self._order = period_s, self.joints
        self._publisher: Any = None

    def open(self, link: RosNode, *, stamped: bool, query_parameters: bool, timeout_s: float) -> None:
        """Finds the controller. Blocks.

        Args:
            stamped: its clock is this computer's.
            ask: it is asked for its joints, and what it commands; otherwise the config is taken at its word.

        Raises:
            HardwareLost: it does not answer, moves other joints, or commands something else than positions.
        """
        self._link, self._stamped = link, stamped
        if query_parameters:
            self._check(read_parameters(link, self._node, ["joints", "interface_name"], timeout_s))
        kind, topic = {
            "trajectory": ("trajectory_msgs/msg/JointTrajectory", f"{self._node}/joint_trajectory"),
            "position": ("std_msgs/msg/Float64MultiArray", f"{self._node}/commands"),
        }[self.kind]
        self._message = message_type(kind)
        self._publisher = link.create_command_publisher(kind, topic, 2 * self._period_s if stamped else None)
        link.wait_until(lambda: self.has_subscriber, timeout_s, f"nobody listens to {topic}")

    @property
    def has_subscriber(self) -> bool:
        """Whether anybody listens to the commands."""
        return bool(self._publisher.get_subscription_count())

    def send(self, targets: Mapping[str, float]) -> None:
        """Starts towards `targets` (rad or m, by joint name), to be there at the end of a control period.

        Raises:
            HardwareLost: the controller is gone.
        """
        if not self.has_subscriber:
            raise HardwareLost(f"controller {self.name} is gone: nobody listens to its commands")
        values = [float(targets[name]) for name in self._order]
        trajectory = self.kind == "trajectory"
        self._publisher.publish(self._trajectory(values) if trajectory else self._message(data=values))

    @property
    def _node(self) -> str:
        return self.name if self.name.startswith("/") else f"/{self.name}"

    def _check(self, parameters: Mapping[str, Any]) -> None:
        order = parameters.get("joints", [])
        if set(order) != set(self.joints):
            raise HardwareLost(f"controller {self.name} moves {order}; the config says {list(self.joints)}")
        self._order = tuple(order)
        commanded = parameters.get("interface_name", "position")
        if self.kind == "position" and commanded != "position":  # it would go on for ever when this process dies
            raise HardwareLost(f"controller {self.name} commands {commanded}; only positions are safe to leave alone")

    def _trajectory(self, values: list[float]) -> Any:
        seconds, rest = divmod(round(self._period_s * 1e9), 1_000_000_000)
        point = message_type("trajectory_msgs/msg/JointTrajectoryPoint")(positions=values)
        point.time_from_start.sec, point.time_from_start.nanosec = seconds, rest
        message = self._message(joint_names=list(self._order), points=[point])
        if self._stamped:  # one that comes late has less time left, and none at all is refused
            message.header.stamp = self._link.node.get_clock().now().to_msg()
        return message


class ControllerManager:
    """Activates and deactivates controllers, and watches that they stay as they were put."""

    def __init__(self, link: RosNode, name: str) -> None:
        """Raises SpecError where ROS 2 lacks the package controller_manager_msgs."""
        self._list = RosServiceClient(link, "controller_manager_msgs/srv/ListControllers", f"{name}/list_controllers")
        self._switch = RosServiceClient(
            link, "controller_manager_msgs/srv/SwitchController", f"{name}/switch_controller"
        )
        self.name = name
        self._asked: Any = None
        self._asked_s = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether its services are there; a node that has just begun does not see them at once."""
        return self._list.is_ready and self._switch.is_ready

    def read_states(self) -> dict[str, str]:
        """Each loaded controller's state. Blocks. Raises HardwareLost."""
        return _controller_states(self._list.call({}, RESPONSE_TIMEOUT_S))

    def require_active(self, controllers: Sequence[str]) -> None:
        """Blocks. Raises HardwareLost where one of `controllers` is not active."""
        _require_active(self.name, self.read_states(), controllers)

    def switch(self, *, activate: Sequence[str] = (), deactivate: Sequence[str] = ()) -> None:
        """Activates those of `on` that are inactive and deactivates those of `off` that are active, all in one step of
        the control loop, or none of them. Blocks.

        Raises:
            HardwareLost: the manager does not answer or refuses; a controller is not loaded, or not configured.
        """
        states = self.read_states()
        unknown = {
            name: states.get(name, "not loaded") for name in activate if states.get(name) not in (ACTIVE, INACTIVE)
        }
        if unknown:
            raise HardwareLost(f"{self.name}: cannot activate {unknown}; there are {states}")
        start = [name for name in activate if states[name] == INACTIVE]
        stop = [name for name in deactivate if states.get(name) == ACTIVE]
        self._asked = None
        if not start and not stop:
            return
        request = {"activate_controllers": start, "deactivate_controllers": stop, "strictness": _STRICT}
        response = self._switch.call(request, RESPONSE_TIMEOUT_S)
        if not response.ok:
            why = getattr(response, "message", "") or "its log says why"
            raise HardwareLost(f"{self.name} did not activate {start} and deactivate {stop}: {why}")

    def check_active(self, controllers: Sequence[str]) -> None:
        """Asks now and then whether `controllers` are active still, without blocking. Call it in each control period.

        Raises:
            HardwareLost: one is not, or the manager has not answered for `RESPONSE_TIMEOUT_S`.
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
        raise HardwareLost(f"{manager}: not active are {stopped}; a person, or a fault, stopped them")


def values_by_joint(joints: Sequence[str], values: Array) -> dict[str, float]:
    """`values` by joint name."""
    return dict(zip(joints, np.asarray(values, np.float64).tolist(), strict=True))
