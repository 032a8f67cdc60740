"""An arm behind ros2_control, simulated with rclpy in a separate process: ``ros2_peer.py DOMAIN [ARM]``.

It has the nodes, topics, services and parameters of a controller manager with a joint state broadcaster, a joint
trajectory controller, a forward position controller and a force torque sensor broadcaster. It also has two cameras, a
stop button and a robot state publisher. Wherever ROS leaves the order of joints open, it differs. It prints ``ready``,
then executes commands, one per line: see `Peer.execute`. Responses are lines of JSON.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan, pi
from typing import Any

import numpy as np
import rclpy
import simplejpeg
from controller_manager_msgs.msg import ControllerState
from controller_manager_msgs.srv import ListControllers, SwitchController
from geometry_msgs.msg import WrenchStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_profile_sensor_data
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Bool, Float64MultiArray, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

UPDATE_HZ, PICTURE_HZ = 100.0, 30.0
WIDTH, HEIGHT = 64, 48
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


@dataclass(frozen=True)
class Arm:
    """Joints in the trajectory controller's order, in that of joint states, and in the forward controller's; `home`
    gives starts other than 0."""

    joints: tuple[str, ...]
    in_states: tuple[str, ...]
    in_forward: tuple[str, ...]
    urdf: str
    home: Mapping[str, float] = field(default_factory=dict)


THREE = Arm(
    joints=("shoulder", "elbow", "wrist"),
    in_states=("wrist", "finger", "shoulder", "elbow"),
    in_forward=("elbow", "wrist", "shoulder"),
    urdf="""<robot name="three">
  <joint name="mount" type="fixed"><parent link="world"/><child link="base"/><origin xyz="0 0 0.1"/></joint>
  <joint name="shoulder" type="revolute"><parent link="base"/><child link="upper"/><axis xyz="0 0 1"/>
    <limit lower="-2.5" upper="2.5" velocity="2.0" effort="50"/></joint>
  <joint name="elbow" type="revolute"><parent link="upper"/><child link="fore"/>
    <origin xyz="0.3 0 0"/><axis xyz="0 1 0"/>
    <limit lower="-2.0" upper="2.0" velocity="2.0" effort="50"/></joint>
  <joint name="wrist" type="continuous"><parent link="fore"/><child link="hand"/>
    <origin xyz="0.2 0 0"/><axis xyz="1 0 0"/>
    <limit velocity="4.0" effort="20"/></joint>
  <joint name="finger" type="prismatic"><parent link="hand"/><child link="tip"/>
    <origin xyz="0.1 0 0"/><axis xyz="1 0 0"/>
    <limit lower="0.0" upper="0.08" velocity="0.2" effort="20"/></joint>
</robot>""",
)
# Universal Robots, "DH parameters for calculations of kinematics and dynamics": d, a and alpha of the link before each
# joint; and its range. All turn at up to half a turn a second.
UR5E_DH = {
    "shoulder_pan_joint": (0.0, 0.0, 0.0, 2 * pi),
    "shoulder_lift_joint": (0.1625, 0.0, pi / 2, 2 * pi),
    "elbow_joint": (0.0, -0.425, 0.0, pi),
    "wrist_1_joint": (0.0, -0.3922, 0.0, 2 * pi),
    "wrist_2_joint": (0.1333, 0.0, pi / 2, 2 * pi),
    "wrist_3_joint": (0.0997, 0.0, -pi / 2, 2 * pi),
}
UR5E_FLANGE_M = 0.0996


def ur5e() -> Arm:
    """Like ``joint_state_broadcaster``, it publishes the joints in alphabetical order."""
    links = ["base_link", *(f"{name.removesuffix('joint')}link" for name in UR5E_DH)]
    turning = [
        f'<joint name="{name}" type="revolute"><parent link="{links[i]}"/><child link="{links[i + 1]}"/>'
        f'<origin xyz="{a} 0 {d}" rpy="{alpha} 0 0"/><axis xyz="0 0 1"/>'
        f'<limit lower="{-most}" upper="{most}" velocity="{pi}" effort="150"/></joint>'
        for i, (name, (d, a, alpha, most)) in enumerate(UR5E_DH.items())
    ]
    flange = (
        f'<joint name="flange" type="fixed"><parent link="{links[-1]}"/><child link="tool0"/>'
        f'<origin xyz="0 0 {UR5E_FLANGE_M}"/></joint>'
    )
    names = tuple(UR5E_DH)
    urdf = f'<robot name="ur5e">{"".join(turning)}{flange}</robot>'
    home = dict(zip(names, (0.0, -pi / 2, pi / 2, -pi / 2, -pi / 2, 0.0), strict=True))
    return Arm(names, tuple(sorted((*names, "finger"))), names[::-1], urdf, home)


ARMS = {"three": lambda: THREE, "ur5e": ur5e}


class Peer:
    def __init__(self, domain: int, arm: Arm) -> None:
        self.arm = arm
        self.context = rclpy.Context()
        rclpy.init(args=[], context=self.context, domain_id=domain)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.place = {name: arm.home.get(name, 0.0) for name in arm.in_states}
        self.speed = dict.fromkeys(arm.in_states, 0.0)
        self.states = {"arm_controller": "active", "forward": "inactive", "grip": "active"}
        self.way: tuple[dict[str, float], dict[str, float], float, float] | None = None
        self.goal: dict[str, float] = {}
        self.counts = {"trajectories": 0, "refused": 0, "forwards": 0, "ignored": 0, "stops": 0, "switches": 0}
        self.force, self.fault, self.skew_s = [0.0, 0.0, 0.0], False, 0.0
        self.refuses = False
        self.mute: set[str] = set()
        self._manager()
        self._sensors()
        self._arm()

    def _node(self, name: str, **parameters: Any) -> Any:
        node = rclpy.create_node(name, context=self.context)
        for key, value in parameters.items():
            node.declare_parameter(key, value)
        self.executor.add_node(node)
        return node

    def _manager(self) -> None:
        self.manager = self._node("controller_manager")
        self.manager.create_service(ListControllers, "~/list_controllers", self._list)
        self.manager.create_service(SwitchController, "~/switch_controller", self._switch)
        self.manager.create_timer(1 / UPDATE_HZ, self._update)
        self.manager.create_service(Trigger, "/stop", self._stop)
        self.button = self.manager.create_publisher(Bool, "/stop_button", LATCHED)
        self.button.publish(Bool(data=False))

    def _sensors(self) -> None:
        node = self._node("robot_state_publisher", robot_description=self.arm.urdf)
        self.description = node.create_publisher(String, "/robot_description", LATCHED)
        self.description.publish(String(data=self.arm.urdf))
        self.joint_states = node.create_publisher(JointState, "/joint_states", 10)
        self.wrench = node.create_publisher(WrenchStamped, "/wrench", 10)
        self.image = node.create_publisher(Image, "/camera/image_raw", qos_profile_sensor_data)
        self.packed = node.create_publisher(CompressedImage, "/camera/image_raw/compressed", qos_profile_sensor_data)
        node.create_timer(1 / PICTURE_HZ, self._show)
        self.node = node

    def _arm(self) -> None:
        arm = self._node("arm_controller", joints=list(self.arm.joints), command_interfaces=["position"])
        arm.create_subscription(JointTrajectory, "~/joint_trajectory", self._trajectory, 1)
        forward = self._node("forward", joints=list(self.arm.in_forward), interface_name="position")
        forward.create_subscription(Float64MultiArray, "~/commands", self._forward, 1)
        grip = self._node("grip", joints=["finger"], interface_name="position")
        grip.create_subscription(Float64MultiArray, "~/commands", self._grip, 1)
        spin = self._node("spin", joints=list(self.arm.joints), interface_name="velocity")
        spin.create_subscription(Float64MultiArray, "~/commands", lambda _: None, 1)

    def _list(self, _: Any, response: Any) -> Any:
        response.controller = [ControllerState(name=name, state=state) for name, state in self.states.items()]
        return response

    def _switch(self, request: Any, response: Any) -> Any:
        self.counts["switches"] += 1
        after = {**self.states, **dict.fromkeys(request.deactivate_controllers, "inactive")}
        after.update(dict.fromkeys(request.activate_controllers, "active"))
        if self.refuses:
            response.message = "it is busy"
        elif self.fault and request.activate_controllers:
            response.message = "the hardware component is in an error"
        elif after["arm_controller"] == after["forward"] == "active":
            response.message = "the position interfaces are claimed twice"
        else:
            self.states, response.ok = after, True
            self.way = None
        return response

    def _stop(self, _: Any, response: Any) -> Any:
        self.counts["stops"] += 1
        response.success = True
        return response

    def _trajectory(self, message: Any) -> None:
        now_s, stamp = time.time(), message.header.stamp
        start_s = stamp.sec + stamp.nanosec / 1e9 or now_s
        if self.states["arm_controller"] != "active":
            self.counts["ignored"] += 1
            return
        point = message.points[-1] if message.points else None
        end_s = start_s + (point.time_from_start.sec + point.time_from_start.nanosec / 1e9 if point else 0)
        if point is None or set(message.joint_names) != set(self.arm.joints) or end_s < now_s:
            self.counts["refused"] += 1
            return
        self.counts["trajectories"] += 1
        self.goal = dict(zip(message.joint_names, point.positions, strict=True))
        self.way = ({name: self.place[name] for name in self.goal}, self.goal, now_s, end_s)

    def _forward(self, message: Any) -> None:
        if self.states["forward"] == "active":
            self.counts["forwards"] += 1
            self.place.update(zip(self.arm.in_forward, message.data, strict=True))

    def _grip(self, message: Any) -> None:
        if self.states["grip"] == "active":
            self.place["finger"] = message.data[0]

    def _update(self) -> None:
        before = dict(self.place)
        if self.way is not None:
            start, goal, from_s, until_s = self.way
            share = min(1.0, (time.time() - from_s) / max(until_s - from_s, 1e-6))
            self.place.update({name: start[name] + share * (goal[name] - start[name]) for name in goal})
        self.speed = {name: (self.place[name] - before[name]) * UPDATE_HZ for name in self.arm.in_states}
        if "stamps" not in self.mute:
            self.stamp = rclpy.time.Time(nanoseconds=time.time_ns() + round(self.skew_s * 1e9)).to_msg()
        if "joints" not in self.mute:
            message = JointState(name=list(self.arm.in_states))
            message.position = [nan if "positions" in self.mute else self.place[n] for n in self.arm.in_states]
            message.velocity = [nan if "velocities" in self.mute else self.speed[n] for n in self.arm.in_states]
            message.header.stamp = self.stamp
            self.joint_states.publish(message)
        if "wrench" not in self.mute:
            pushed = WrenchStamped()
            pushed.header.stamp, pushed.header.frame_id = self.stamp, "hand"
            pushed.wrench.force.x, pushed.wrench.force.y, pushed.wrench.force.z = self.force
            self.wrench.publish(pushed)

    def _show(self) -> None:
        if "pictures" in self.mute:
            return
        picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        picture[..., 0], picture[:8, :8, 2] = 200, 255
        raw = Image(height=HEIGHT, width=WIDTH, encoding="bgr8", step=3 * WIDTH + 4)
        raw.data = np.pad(picture[..., ::-1].reshape(HEIGHT, -1), ((0, 0), (0, 4))).tobytes()
        packed = CompressedImage(format="jpeg", data=simplejpeg.encode_jpeg(picture, colorspace="RGB"))
        raw.header.stamp = packed.header.stamp = self.node.get_clock().now().to_msg()
        self.image.publish(raw)
        self.packed.publish(packed)

    def execute(self, order: str, *words: str) -> None:
        """Execute a command.

        ``state``; ``mute WHAT`` and ``speak WHAT`` (joints, stamps, positions and velocities, which become NaN, wrench,
        pictures); ``force X Y Z``; ``press 0|1``; ``put CONTROLLER STATE``; ``fault 0|1``; ``refuse 0|1`` for every
        switch; ``skew SECONDS`` for its clock.
        """
        if order == "state":
            state = {"place": self.place, "goal": self.goal, "controllers": self.states, "counts": self.counts}
            sys.stdout.write(json.dumps(state) + "\n")
            sys.stdout.flush()
        elif order == "mute":
            self.mute.add(words[0])
        elif order == "speak":
            self.mute.discard(words[0])
        elif order == "force":
            self.force = [float(word) for word in words]
        elif order == "press":
            self.button.publish(Bool(data=words[0] == "1"))
        elif order == "put":
            self.states[words[0]] = words[1]
        elif order == "fault":
            self.fault = words[0] == "1"
        elif order == "refuse":
            self.refuses = words[0] == "1"
        elif order == "skew":
            self.skew_s = float(words[0])

    def run(self) -> None:
        """Run until standard input ends."""
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        waiting = b""
        while True:
            self.executor.spin_once(timeout_sec=0.01)
            while select.select([0], [], [], 0)[0]:
                if not (read := os.read(0, 4096)):
                    return
                *orders, waiting = (waiting + read).split(b"\n")
                for each in orders:
                    self.execute(*each.decode().split())


if __name__ == "__main__":
    Peer(int(sys.argv[1]), ARMS[sys.argv[2] if len(sys.argv) > 2 else "three"]()).run()
