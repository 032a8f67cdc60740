"""The only module that uses rclpy: a node with its executor thread, services, and a probe of the ROS graph.

rclpy comes with a sourced ROS 2 installation (Jazzy or later), or as wheels (extra ``ros2``). `RosNode.open` imports
it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hal.errors import HardwareLost, SpecError
from hal.resource import Kind, ResourceRecord, local_node
from robots.device import import_library

POLL_INTERVAL_S = 0.01
SHUTDOWN_TIMEOUT_S = 2.0
GRAPH_DISCOVERY_S = 1.0  # time that a new node needs to discover others
JOINT_STATE_TYPE, WRENCH_TYPE = "sensor_msgs/msg/JointState", "geometry_msgs/msg/WrenchStamped"
IMAGE_TYPES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
TRAJECTORY_TYPE, POSITIONS_TYPE = "trajectory_msgs/msg/JointTrajectory", "std_msgs/msg/Float64MultiArray"
COMMAND_TOPIC = {
    TRAJECTORY_TYPE: ("/joint_trajectory", "trajectory"),
    POSITIONS_TYPE: ("/commands", "position"),
}
"""By the type of a controller's topic: the end of its name, and the controller's kind."""
_STRING, _STRINGS = 4, 9  # rcl_interfaces/msg/ParameterType

log = logging.getLogger(__name__)


@cache
def message_type(name: str) -> Any:
    """The class of a message or service, e.g. ``sensor_msgs/msg/JointState``.

    Raises:
        SpecError: ROS 2, or the package of that message, is not installed.
    """
    package, kind, type_name = name.split("/")
    try:
        return getattr(import_module(f"{package}.{kind}"), type_name)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"{name} cannot be imported ({error}); source a ROS 2 installation that has {package}, or: "
            f"pip install ros-jazzy-{package.replace('_', '-')}"
        ) from error


class RosNode:
    """A node in one DDS domain. Subscription callbacks run on the node's thread.

    `open` and `close` may be called twice. A closed node may be opened again, without its subscriptions and publishers.
    """

    def __init__(self, name: str, domain: int | None = None) -> None:
        """`name`: of the node; characters that ROS forbids are replaced. `domain`: None for ``ROS_DOMAIN_ID``, or 0."""
        self.name = "".join(c if c.isalnum() else "_" for c in name)
        self._domain = domain
        self._node: Any = None
        self._broken = ""

    def open(self) -> None:
        """Raises SpecError without rclpy, HardwareLost if ROS does not start (its log has the reason)."""
        if self._node is not None:
            return
        rclpy = import_library("rclpy", "ros2")
        context, no_handlers = rclpy.Context(), import_module("rclpy.signals").SignalHandlerOptions.NO
        try:
            rclpy.init(args=[], context=context, domain_id=self._domain, signal_handler_options=no_handlers)
            self._node = rclpy.create_node(
                self.name, context=context, enable_rosout=False, start_parameter_services=False
            )
        except Exception as error:  # rclpy passes on any exception of its middleware
            context.try_shutdown()
            raise HardwareLost(f"ROS 2 does not start: {type(error).__name__}: {error}") from error
        self._broken, self._context = "", context
        self._executor = import_module("rclpy.executors").SingleThreadedExecutor(context=context)
        self._executor.add_node(self._node)
        self._thread = threading.Thread(target=self._spin, name=f"ros2 {self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        node, self._node = self._node, None
        if node is None:
            return
        self._executor.shutdown(timeout_sec=SHUTDOWN_TIMEOUT_S)
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        node.destroy_node()
        self._context.try_shutdown()

    @property
    def is_connected(self) -> bool:
        return self._node is not None

    @property
    def rclpy_node(self) -> Any:
        """rclpy's node. Raises HardwareLost if this node is closed, or its thread has ended."""
        if self._node is None:
            raise HardwareLost("the ROS 2 node is not open")
        if self._broken:
            raise HardwareLost(f"the ROS 2 node's thread ended: {self._broken}")
        return self._node

    def subscribe(self, kind: str, topic: str, callback: Callable[[Any], None], *, sensor: bool = True) -> None:
        """Subscribe to a sensor topic, best effort with a short queue, which matches every publisher.

        Otherwise the QoS is that of the topic's present publishers: a transient local one also delivers its last
        message.
        """
        qos = import_module("rclpy.qos")
        quality = qos.qos_profile_sensor_data if sensor else qos.QoSPresetProfiles.BEST_AVAILABLE.value
        self.rclpy_node.create_subscription(message_type(kind), topic, callback, quality)

    def create_command_publisher(self, kind: str, topic: str, lifespan_s: float | None = None) -> Any:
        """Make a publisher for commands: reliable, with a queue of one. A message that is not delivered within
        `lifespan_s` expires, by the clocks of sender and receiver."""
        qos, duration = import_module("rclpy.qos"), import_module("rclpy.duration").Duration
        reliable, volatile = qos.ReliabilityPolicy.RELIABLE, qos.DurabilityPolicy.VOLATILE
        quality = qos.QoSProfile(depth=1, reliability=reliable, durability=volatile)
        if lifespan_s is not None:
            quality.lifespan = duration(seconds=lifespan_s)
        return self.rclpy_node.create_publisher(message_type(kind), topic, quality)

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, error: str, check_stop: Callable[[], None] | None = None
    ) -> None:
        """Block until `condition` holds. Calls `check_stop` periodically; it may raise.

        Raises:
            HardwareLost: the timeout passed; the message begins with `error`.
        """
        end_s = time.monotonic() + timeout_s
        while not condition():
            if check_stop is not None:
                check_stop()
            if time.monotonic() >= end_s:
                domain = self.rclpy_node.context.get_domain_id()
                raise HardwareLost(f"{error} within {timeout_s:.3g} s (ROS 2, domain {domain})")
            time.sleep(POLL_INTERVAL_S)

    def has_publisher(self, topic: str) -> bool:
        return bool(self.rclpy_node.count_publishers(topic) > 0)

    def read_parameters(self, node: str, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Read another node's parameters that are strings or lists of strings; others and unset ones are left out.

        Raises:
            HardwareLost: the node does not answer.
        """
        service = RosServiceClient(self, "rcl_interfaces/srv/GetParameters", f"{node}/get_parameters")
        found: dict[str, Any] = {}
        for name in names:  # one request each: an undeclared name makes the whole response fail
            for value in service.call({"names": [name]}, timeout_s).values:
                if value.type in (_STRING, _STRINGS):
                    found[name] = value.string_value if value.type == _STRING else list(value.string_array_value)
        return found

    def _spin(self) -> None:
        shut_down = import_module("rclpy.executors").ExternalShutdownException
        try:
            self._executor.spin()
        except shut_down:
            log.debug("ros2.shut_down node=%s", self.name)
        except Exception as error:  # of a callback or the middleware; the next use of `rclpy_node` raises it
            self._broken = f"{type(error).__name__}: {error}"
            log.exception("ros2.broken node=%s", self.name)


class RosServiceClient:
    """A client of another node's service."""

    def __init__(self, ros_node: RosNode, kind: str, name: str) -> None:
        """Raises SpecError if the service's type is not installed."""
        self._type, self._ros_node, self.name = message_type(kind), ros_node, name
        self._client = ros_node.rclpy_node.create_client(self._type, name)

    @property
    def is_ready(self) -> bool:
        return bool(self._client.service_is_ready())

    def call_async(self, request: dict[str, Any]) -> Any:
        """Send the request; returns rclpy's future of the response."""
        return self._client.call_async(self._type.Request(**request))

    def call(self, request: dict[str, Any], timeout_s: float) -> Any:
        """Send the request and return the response. Blocks. Raises HardwareLost after the timeout."""
        end_s = time.monotonic() + timeout_s
        self._ros_node.wait_until(lambda: self.is_ready, timeout_s, f"there is no service {self.name}")
        future = self.call_async(request)
        self._ros_node.wait_until(future.done, end_s - time.monotonic(), f"no response from the service {self.name}")
        return future.result()


class GraphProbe:
    """A probe (`hal.discovery`) of the domain of ``ROS_DOMAIN_ID``. It reads names and types of topics only.

    It keeps its node, so that repeated probes cause no discovery traffic.
    """

    def __init__(self) -> None:
        self._node = RosNode("user_sys_discovery")

    def __call__(self) -> Iterator[ResourceRecord]:
        """Yield a BUS record for each joint state topic and a CAMERA record for each image topic; none without ROS 2.

        Raises:
            HardwareLost: ROS 2 is installed and does not start.
        """
        if find_spec("rclpy") is None:
            return
        if not self._node.is_connected:
            self._node.open()
            atexit.register(self._node.close)
            threading.Event().wait(GRAPH_DISCOVERY_S)
        node = self._node.rclpy_node
        topics = node.get_topic_names_and_types()
        published = {topic: types for topic, types in topics if node.count_publishers(topic)}
        subscribed = {topic: types for topic, types in topics if node.count_subscribers(topic)}
        yield from graph_records(published, subscribed, node.context.get_domain_id())


probe_graph = GraphProbe()


def graph_records(
    published: dict[str, list[str]], subscribed: dict[str, list[str]], domain: int
) -> Iterator[ResourceRecord]:
    """Make the records from the topics with publishers and with subscribers; each maps a topic to its types."""
    uses = [
        f"{kind}:{topic.removesuffix(end)}"
        for topic, types in sorted(subscribed.items())
        for end, kind in (COMMAND_TOPIC[each] for each in types if each in COMMAND_TOPIC)
        if topic.endswith(end)
    ]
    uses += [f"wrench:{topic}" for topic, types in sorted(published.items()) if WRENCH_TYPE in types]
    for topic, types in sorted(published.items()):
        is_arm = JOINT_STATE_TYPE in types
        if is_arm or set(types) & set(IMAGE_TYPES):
            yield ResourceRecord(
                kind=Kind.BUS if is_arm else Kind.CAMERA,
                name=f"ros2/{domain}{topic}",
                model="ros2_control" if is_arm else types[0],
                node=local_node(),
                capabilities=tuple(uses) if is_arm else (),
                labels={"domain": str(domain), "topic": topic},
                found_by="ros2",
            )
