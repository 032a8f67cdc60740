"""The link of a console to the sessions on the same computer, without gateway and network.

``user-sys edge --console`` serves such a console. It has one Unix socket in the user's runtime folder, and each session
connects to it. What cannot be sent at once is dropped: all messages are states, or useless when late.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from hal.context import StartedAtEntry
from user_sys.edge.driver_client import socket_endpoint
from user_sys.errors import WireError
from user_sys.messages import Preview
from user_sys.tunnel.connection import Wakeup
from user_sys.tunnel.flow_control import CoalescingQueue
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    AnyMessage,
    Channel,
    Envelope,
    Payload,
    coalescing_key,
    decode_envelope,
    encode_envelope,
)

MAX_QUEUED = 256
POLL_MS = 500
CLOSE_TIMEOUT_S = 5.0
LIMITS = TunnelLimits()

log = logging.getLogger(__name__)

OnMessage = Callable[[AnyMessage, Payload | None], object]


def local_console_endpoint(name: str) -> str:
    """The socket of the console `name` on this computer. Raises as `socket_endpoint`."""
    return socket_endpoint(f"{name}.console", "give the runtime folder a shorter path")


class LocalLink(StartedAtEntry):
    """One end of the link: that of `robot`'s session, or the console's. A context manager; any thread may send.

    Without an endpoint there is no console, and `send` has no effect. An error ends the link, and not the session.
    """

    def __init__(self, endpoint: str, on_message: OnMessage, robot: str = "") -> None:
        """Args:
        endpoint: of `local_console_endpoint`; empty for none.
        on_message: called in the link's thread with each message and its payload.
        robot: whose session's end this is; empty for the console's end.
        """
        self._endpoint, self._on_message, self._robot = endpoint, on_message, robot
        self._queue: CoalescingQueue[tuple[str, Envelope]] = CoalescingQueue(MAX_QUEUED)
        self._wakeup = Wakeup()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="local-console", daemon=True)

    def send(self, message: AnyMessage, payload: Payload | None = None, robot: str = "") -> bool:
        """Sends a message to the console, or to the session of `robot`. Never blocks; False if too many wait."""
        if not self._endpoint:
            return False
        key = coalescing_key(message)
        queued = self._queue.put((robot, Envelope(message, payload)), None if key is None else (robot, key))
        self._wakeup.set()
        return queued

    def start(self) -> None:
        if self._endpoint:
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._endpoint:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._wakeup.close()

    def _run(self) -> None:
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER if self._robot else zmq.ROUTER) as socket:
                self._open(socket)
                poller = zmq.Poller()
                poller.register(socket, zmq.POLLIN)
                poller.register(self._wakeup.fileno(), zmq.POLLIN)
                while not self._stopping.is_set():
                    poller.poll(POLL_MS)
                    self._wakeup.clear()
                    self._receive(socket)
                    self._send(socket)
        except Exception:  # of any kind: the robot goes on without this console
            log.exception("local_console.failed endpoint=%s", self._endpoint)
            self._endpoint = ""

    def _open(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, LIMITS.max_message_bytes)
        if self._robot:
            socket.setsockopt(zmq.IMMEDIATE, 1)  # no messages wait for a console to start
            socket.setsockopt(zmq.ROUTING_ID, self._robot.encode())
            socket.connect(self._endpoint)
        else:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a session that has restarted
            socket.bind(self._endpoint)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(MAX_QUEUED):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                channel, *content = frames if self._robot else frames[1:]
                envelope = decode_envelope(Channel(channel), list(content), LIMITS)
            except (WireError, ValueError) as error:
                log.warning("local_console.rejected %s", error)
            else:
                self._on_message(envelope.message, envelope.payload)

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        while (item := self._queue.get_nowait()) is not None:
            robot, envelope = item
            channel = Channel.EXPERIENCE if isinstance(envelope.message, Preview) else Channel.CONTROL
            frames = [channel.value, *encode_envelope(envelope)]
            try:
                socket.send_multipart(frames if self._robot else [robot.encode(), *frames], zmq.NOBLOCK)
            except zmq.Again:
                log.debug("local_console.dropped %s", type(envelope.message).__name__)
