"""Discover robots in the ROS 2 graph: joint states with their controllers, and image topics.

The probe reads topic names and types only, in the domain of ``ROS_DOMAIN_ID``. It neither subscribes nor calls
services.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from importlib.util import find_spec

from hal.resource import Kind, ResourceRecord, local_node
from robots.ros2_node import RosNode

GRAPH_DISCOVERY_S = 1.0  # time that a new node needs to discover others
JOINT_STATE_TYPE, WRENCH_TYPE = "sensor_msgs/msg/JointState", "geometry_msgs/msg/WrenchStamped"
IMAGE_TYPES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
CONTROLLER_FROM_TYPE = {
    "trajectory_msgs/msg/JointTrajectory": ("/joint_trajectory", "trajectory"),
    "std_msgs/msg/Float64MultiArray": ("/commands", "position"),
}
"""By the type of a controller's topic: the end of its name, and `robots.ros2_controllers.ControllerKind`."""

Topics = dict[str, list[str]]


class GraphProbe:
    """A probe (`hal.discovery`) that keeps its node, so that repeated probes cause no discovery traffic."""

    def __init__(self) -> None:
        self._node: RosNode | None = None

    def __call__(self) -> Iterator[ResourceRecord]:
        """Yield a BUS record for each joint state topic and a CAMERA record for each image topic; none without ROS 2.

        Raises:
            HardwareLost: ROS 2 is installed and does not start.
        """
        if find_spec("rclpy") is None:
            return
        if self._node is None:
            ros_node = RosNode("user_sys_discovery")
            ros_node.open()
            atexit.register(ros_node.close)
            self._node = ros_node
            threading.Event().wait(GRAPH_DISCOVERY_S)
        node = self._node.rclpy_node
        published = {topic: types for topic, types in node.get_topic_names_and_types() if node.count_publishers(topic)}
        subscribed = {
            topic: types for topic, types in node.get_topic_names_and_types() if node.count_subscribers(topic)
        }
        yield from graph_records(published, subscribed, node.context.get_domain_id())


probe_graph = GraphProbe()


def graph_records(published: Topics, subscribed: Topics, domain: int) -> Iterator[ResourceRecord]:
    """Make the records from the topics with publishers and with subscribers; each maps a topic to its types."""
    wrenches = [f"wrench:{topic}" for topic, types in sorted(published.items()) if WRENCH_TYPE in types]
    controllers = [
        f"{kind}:{topic.removesuffix(end)}"
        for topic, types in sorted(subscribed.items())
        for end, kind in (CONTROLLER_FROM_TYPE[each] for each in types if each in CONTROLLER_FROM_TYPE)
        if topic.endswith(end)
    ]
    for topic, types in sorted(published.items()):
        if JOINT_STATE_TYPE in types:
            yield _record(Kind.BUS, "ros2_control", topic, domain, (*controllers, *wrenches))
        elif any(each in IMAGE_TYPES for each in types):
            yield _record(Kind.CAMERA, types[0], topic, domain, ())


def _record(kind: Kind, model: str, topic: str, domain: int, capabilities: tuple[str, ...]) -> ResourceRecord:
    return ResourceRecord(
        kind=kind,
        name=f"ros2/{domain}{topic}",
        model=model,
        node=local_node(),
        capabilities=capabilities,
        labels={"domain": str(domain), "topic": topic},
        found_by="ros2",
    )
