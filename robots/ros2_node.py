"""The only module that uses rclpy: a node, its executor thread, and waits with timeouts.

rclpy comes with a sourced ROS 2 installation (Jazzy or later), or as wheels (extra ``ros2``). `RosNode.open` imports
it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Self

from hal.errors import HardwareLost, SpecError, install_hint

POLL_INTERVAL_S = 0.01
SHUTDOWN_TIMEOUT_S = 2.0

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


def _import_rclpy() -> Any:
    try:
        return import_module("rclpy")
    except ImportError as error:
        raise SpecError(
            f"ROS 2 cannot be imported ({error}); source a ROS 2 installation, or: {install_hint('ros2')}"
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
        rclpy = _import_rclpy()
        executors = import_module("rclpy.executors")
        context = rclpy.Context()
        try:
            rclpy.init(args=[], context=context, domain_id=self._domain, signal_handler_options=_no_signal_handlers())
            self._node = rclpy.create_node(
                self.name, context=context, enable_rosout=False, start_parameter_services=False
            )
        except Exception as error:  # rclpy passes on any exception of its middleware
            context.try_shutdown()
            raise HardwareLost(f"ROS 2 does not start: {type(error).__name__}: {error}") from error
        self._broken = ""
        self._context = context
        self._executor = executors.SingleThreadedExecutor(context=context)
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

    def subscribe_sensor(self, kind: str, topic: str, callback: Callable[[Any], None]) -> None:
        """Subscribe to a sensor topic: best effort and a short queue, which match every publisher."""
        quality = import_module("rclpy.qos").qos_profile_sensor_data
        self.rclpy_node.create_subscription(message_type(kind), topic, callback, quality)

    def subscribe_state(self, kind: str, topic: str, callback: Callable[[Any], None]) -> None:
        """Subscribe to a topic that changes rarely, with the QoS of its current publishers. A transient local publisher
        also delivers its last message."""
        quality = import_module("rclpy.qos").QoSPresetProfiles.BEST_AVAILABLE.value
        self.rclpy_node.create_subscription(message_type(kind), topic, callback, quality)

    def create_command_publisher(self, kind: str, topic: str, lifespan_s: float | None = None) -> Any:
        """Make a publisher for commands: reliable, with a queue of one. A message that is not delivered within
        `lifespan_s` expires, by the clocks of sender and receiver."""
        qos, duration = import_module("rclpy.qos"), import_module("rclpy.duration").Duration
        quality = qos.QoSProfile(
            depth=1, reliability=qos.ReliabilityPolicy.RELIABLE, durability=qos.DurabilityPolicy.VOLATILE
        )
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

    def _spin(self) -> None:
        shut_down = import_module("rclpy.executors").ExternalShutdownException
        try:
            self._executor.spin()
        except shut_down:
            log.debug("ros2.shut_down node=%s", self.name)
        except Exception as error:  # of a callback or the middleware; the next use of `node` raises it
            self._broken = f"{type(error).__name__}: {error}"
            log.exception("ros2.broken node=%s", self.name)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _no_signal_handlers() -> Any:
    return import_module("rclpy.signals").SignalHandlerOptions.NO
