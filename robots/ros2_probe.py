"""What the ROS 2 graph shows of robots: joint states with the controllers beside them, and topics of pictures.

Nothing is subscribed to, and no service is called: topics and their types are read, in the domain of ``ROS_DOMAIN_ID``.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from importlib.util import find_spec

from hal.resource import Kind, ResourceRecord, local_node
from robots.ros2_node import RosNode

GRAPH_DISCOVERY_S = 1.0  # that others take to show themselves to a node that has just begun
JOINT_STATE_TYPE, WRENCH_TYPE = "sensor_msgs/msg/JointState", "geometry_msgs/msg/WrenchStamped"
IMAGE_TYPES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
CONTROLLER_FROM_TYPE = {
    "trajectory_msgs/msg/JointTrajectory": ("/joint_trajectory", "trajectory"),
    "std_msgs/msg/Float64MultiArray": ("/commands", "position"),
}
"""By the type of a controller's topic: how its name ends, and `robots.ros2_controllers.ControllerKind`."""

Topics = dict[str, list[str]]


class GraphProbe:
    """A probe (`hal.discovery`) that keeps its node, so that looking again costs nothing on the network."""

    def __init__(self) -> None:
        self._link: RosNode | None = None

    def __call__(self) -> Iterator[ResourceRecord]:
        """One BUS record for each topic of joint states, one CAMERA record for each of pictures; none without ROS 2.

        Raises:
            HardwareLost: ROS 2 is installed and does not start.
        """
        if find_spec("rclpy") is None:
            return
        if self._link is None:
            link = RosNode("user_sys_discovery")
            link.open()
            atexit.register(link.close)
            self._link = link
            threading.Event().wait(GRAPH_DISCOVERY_S)
        node = self._link.node
        shown = {topic: types for topic, types in node.get_topic_names_and_types() if node.count_publishers(topic)}
        heard = {topic: types for topic, types in node.get_topic_names_and_types() if node.count_subscribers(topic)}
        yield from graph_records(shown, heard, node.context.get_domain_id())


probe_graph = GraphProbe()


def graph_records(published: Topics, subscribed: Topics, domain: int) -> Iterator[ResourceRecord]:
    """The records of what is published (`shown`) and subscribed to (`heard`), each a topic's types by its name."""
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
