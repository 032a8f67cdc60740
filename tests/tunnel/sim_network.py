"""A network between simulated machines, behind the interface of libzmq that the tunnel uses.

A connection behaves as TCP: messages arrive whole and in order. Connections are independent. A broken one loses the
last messages in flight of each direction; earlier ones of its client may arrive after the client has opened another.
The gateway gets no event of a broken connection.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import zmq
from sim_runtime import Runtime, SimTask

from user_sys.errors import LinkDown
from user_sys.tunnel.connection import ChannelSocket, Connection
from user_sys.tunnel.flow_control import SendQueue
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import SESSION_BYTES, Channel
from user_sys.tunnel.session import channel_limits

UP, DOWN = "up", "down"


@dataclass(eq=False)
class SimFrame:
    """One part of a message, with its sender and connection."""

    body: bytes
    more: bool
    public: str
    descriptor: int

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.body)

    @property
    def bytes(self) -> bytes:
        return self.body

    def get(self, key: str | int) -> str | int:
        return self.descriptor if key == zmq.SRCFD else self.public


@dataclass(eq=False)
class SimPipe:
    """One direction of a connection: messages and their arrival times, and the state in its receiver's kernel."""

    descriptor: int
    heard_s: float
    waiting: deque[tuple[float, list[bytes]]] = field(default_factory=deque)
    last_s: float = 0.0


@dataclass(eq=False)
class SimConnection:
    edge: str
    routing_id: bytes
    client: SimTask
    pipes: dict[str, SimPipe]
    open: bool
    stalled: bool = False


class SimNetwork:
    """The connections of all edges to the gateway.

    Attributes:
        slow_s: the bound of a message's delay.
        blocked: (edge, direction) pairs without arrivals.
    """

    def __init__(self, runtime: Runtime, limits: TunnelLimits) -> None:
        self.runtime, self.limits = runtime, limits
        self.slow_s = 0.02
        self.blocked: set[tuple[str, str]] = set()
        self.connections: dict[bytes, SimConnection] = {}
        self.gateway: SimTask | None = None
        self._descriptors = 0

    def dial(self, edge: str, routing_id: bytes, client: SimTask) -> SimConnection:
        pipes = {}
        for direction in (UP, DOWN):
            self._descriptors += 1
            pipes[direction] = SimPipe(self._descriptors, self.runtime.now_s)
        connection = SimConnection(edge, routing_id, client, pipes, open=self.gateway is not None)
        if connection.open:
            self.connections[routing_id] = connection
        return connection

    def send(self, connection: SimConnection, direction: str, frames: list[bytes]) -> None:
        """Raises ZMQError if libzmq accepts no more, or if the peer is gone."""
        pipe, runtime = connection.pipes[direction], self.runtime
        if not connection.open:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        if len(pipe.waiting) >= self.limits.pipe_messages:
            raise zmq.ZMQError(errno.EAGAIN)
        pipe.last_s = max(pipe.last_s, runtime.now_s + runtime.rng.random() ** 3 * self.slow_s)
        pipe.waiting.append((pipe.last_s, frames))
        self._announce(connection, direction)

    def _announce(self, connection: SimConnection, direction: str) -> None:
        task = self.gateway if direction == UP else connection.client
        waiting = connection.pipes[direction].waiting
        if task is not None and waiting and not self._is_blocked(connection, direction):
            self.runtime.poke(task, max(0.0, waiting[0][0] - self.runtime.now_s))

    def arrived(self, connection: SimConnection, direction: str) -> bool:
        waiting = connection.pipes[direction].waiting
        here = bool(waiting) and waiting[0][0] <= self.runtime.now_s
        return here and not self._is_blocked(connection, direction)

    def _is_blocked(self, connection: SimConnection, direction: str) -> bool:
        return connection.stalled or (connection.edge, direction) in self.blocked

    def take(self, connection: SimConnection, direction: str) -> tuple[list[bytes], int]:
        """A message that has arrived, and the connection's descriptor."""
        pipe = connection.pipes[direction]
        frames = pipe.waiting.popleft()[1]
        pipe.heard_s = self.runtime.now_s
        self._announce(connection, direction)
        return frames, pipe.descriptor

    def silence_s(self, descriptor: int) -> float:
        """As `sockets.silence_s`."""
        for connection in self.connections.values():
            for direction, pipe in connection.pipes.items():
                if pipe.descriptor == descriptor and not self.arrived(connection, direction):
                    return self.runtime.now_s - pipe.heard_s
        return 0.0

    def break_connection(self, connection: SimConnection) -> None:
        """A reset, or a close by the client."""
        if not connection.open:
            return
        connection.open = False
        waiting = connection.pipes[UP].waiting
        for _ in range(self.runtime.rng.randint(0, len(waiting))):
            waiting.pop()
        connection.pipes[DOWN].waiting.clear()
        self.runtime.poke(connection.client)

    def forget(self) -> None:
        """Closes the gateway's end of all connections, with the messages in flight."""
        self.gateway = None
        for connection in self.connections.values():
            connection.open = False
            self.runtime.poke(connection.client)
        self.connections.clear()

    def heal(self) -> None:
        self.blocked.clear()
        for connection in self.connections.values():
            connection.stalled = False
            for direction in (UP, DOWN):
                self._announce(connection, direction)

    def sweep(self) -> None:
        """Removes broken connections without messages in flight."""
        self.connections = {key: c for key, c in self.connections.items() if c.open or c.pipes[UP].waiting}


class _SimSocket:
    """The methods of a libzmq socket that both ends use."""

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self._in: deque[SimFrame] = deque()

    def send(self, frame: bytes | memoryview, flags: int, copy: bool) -> None:
        self._out.append(bytes(frame))
        if flags & zmq.SNDMORE:
            return
        frames, self._out = self._out, []
        self._send(frames)

    def recv(self, flags: int, copy: bool) -> SimFrame:
        if not self._in:
            frames, public, descriptor = self._receive()
            self._in.extend(SimFrame(body, at < len(frames) - 1, public, descriptor) for at, body in enumerate(frames))
        return self._in.popleft()

    def getsockopt(self, option: int) -> int:
        return zmq.POLLIN if option == zmq.EVENTS and self._readable() else 0

    def _send(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _receive(self) -> tuple[list[bytes], str, int]:
        raise NotImplementedError

    def _readable(self) -> bool:
        raise NotImplementedError


class Dealer(_SimSocket):
    def __init__(self, network: SimNetwork, connection: SimConnection) -> None:
        super().__init__()
        self._network, self.connection = network, connection

    def _send(self, frames: list[bytes]) -> None:
        self._network.send(self.connection, UP, frames)

    def _receive(self) -> tuple[list[bytes], str, int]:
        frames, descriptor = self._network.take(self.connection, DOWN)
        return frames, "", descriptor

    def _readable(self) -> bool:
        return self._network.arrived(self.connection, DOWN)

    def disable_monitor(self) -> None:
        return

    def close(self, linger_ms: int) -> None:
        self._network.break_connection(self.connection)


class Router(_SimSocket):
    def __init__(self, network: SimNetwork) -> None:
        super().__init__()
        self._network = network

    def _send(self, frames: list[bytes]) -> None:
        connection = self._network.connections.get(frames[0])
        if connection is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        self._network.send(connection, DOWN, frames[1:])

    def _ready(self) -> list[SimConnection]:
        return [c for c in self._network.connections.values() if self._network.arrived(c, UP)]

    def _receive(self) -> tuple[list[bytes], str, int]:
        connection = self._network.runtime.rng.choice(self._ready())
        frames, descriptor = self._network.take(connection, UP)
        return [connection.routing_id, *frames], connection.edge, descriptor

    def _readable(self) -> bool:
        return bool(self._ready())


class SimLink(Connection):
    """A connection over simulated sockets; its channel sockets are the real ones."""

    network: SimNetwork  # of the running simulation

    def __init__(
        self,
        contexts: object,
        endpoint: str,
        keys: KeyPair,
        server_key: str,
        limits: TunnelLimits,
        send_queues: Mapping[Channel, SendQueue],
        wakeup: object,
    ) -> None:
        self.endpoint, self.sockets = endpoint, {}
        self._stuck_after_s = limits.stuck_after_s
        runtime = self.network.runtime
        assert runtime.running is not None
        session = runtime.rng.randbytes(SESSION_BYTES)
        self._connections: list[SimConnection] = []
        for channel, window in channel_limits(limits).items():
            connection = self.network.dial(keys.public, channel.value + session, runtime.running)
            self._connections.append(connection)
            socket = Dealer(self.network, connection)
            self.sockets[channel] = ChannelSocket(socket, send_queues[channel], window, limits, channel)  # type: ignore[arg-type]

    def wait(self, timeout_s: float, read_elsewhere: Collection[Channel] = ()) -> None:
        self.network.runtime.pause(
            0.0 if any(line.has_message for line in self.sockets.values()) else max(0.0, timeout_s)
        )
        if not all(connection.open for connection in self._connections):
            raise LinkDown(f"{self.endpoint}: the connection ended")

    def close(self, linger_ms: int = 0) -> None:
        for line in self.sockets.values():
            line.close(linger_ms)


class SimWakeup:
    """Wakes the process that created it."""

    def __init__(self) -> None:
        self._process = SimLink.network.runtime.current

    def set(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.poke()

    def clear(self) -> None:
        return

    def close(self) -> None:
        return

    def fileno(self) -> int:
        return -1
