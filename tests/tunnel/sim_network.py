"""A network between simulated machines, behind the interfaces of `Connection` and `GuardedRouter`.

A connection behaves as TCP: messages arrive whole and in order. Connections are independent. A broken one loses the
last messages in flight of each direction; earlier ones of its client may arrive after the client has opened another.
The gateway gets no event of a broken connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sim_runtime import Runtime, SimTask

from user_sys.errors import LinkDown
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import SESSION_BYTES, Channel, Payload
from user_sys.tunnel.router import RoutedMessage

UP, DOWN = "up", "down"


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

    def send(self, connection: SimConnection, direction: str, frames: list[Payload]) -> bool:
        """Returns False if libzmq accepts no more, or if the peer is gone."""
        pipe, runtime = connection.pipes[direction], self.runtime
        if not connection.open or len(pipe.waiting) >= self.limits.pipe_messages:
            return False
        pipe.last_s = max(pipe.last_s, runtime.now_s + runtime.rng.random() ** 3 * self.slow_s)
        pipe.waiting.append((pipe.last_s, [bytes(frame) for frame in frames]))
        self._announce(connection, direction)
        return True

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

    def take(self, connection: SimConnection, direction: str) -> list[Payload]:
        """A message that has arrived."""
        pipe = connection.pipes[direction]
        frames = pipe.waiting.popleft()[1]
        pipe.heard_s = self.runtime.now_s
        self._announce(connection, direction)
        return [memoryview(frame) for frame in frames]

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


class SimRouter:
    """As `GuardedRouter`; all keys are allowed."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    def _ready(self) -> list[SimConnection]:
        return [c for c in self._network.connections.values() if self._network.arrived(c, UP)]

    def has_message(self) -> bool:
        return bool(self._ready())

    def receive(self) -> RoutedMessage | None:
        ready = self._ready()
        if not ready:
            return None
        connection = self._network.runtime.rng.choice(ready)
        frames, descriptor = self._network.take(connection, UP), connection.pipes[UP].descriptor
        return RoutedMessage(connection.routing_id, frames, connection.edge, "", descriptor)

    def send(self, routing_id: bytes, frames: list[Payload]) -> bool:
        connection = self._network.connections.get(routing_id)
        return connection is not None and self._network.send(connection, DOWN, frames)

    def authorize(self, descriptor: int, session: bytes) -> None:
        return

    def deauthorize(self, session: bytes) -> None:
        return

    def wake(self) -> None:
        self._network.runtime.poke(self._network.gateway) if self._network.gateway else None


class SimLink:
    """As `Connection`."""

    network: SimNetwork  # of the running simulation

    def __init__(
        self, context: object, endpoint: str, keys: KeyPair, server_key: str, limits: TunnelLimits, wakeup: object
    ) -> None:
        self.endpoint = endpoint
        runtime = self.network.runtime
        assert runtime.running is not None
        session = runtime.rng.randbytes(SESSION_BYTES)
        self._connections = {
            channel: self.network.dial(keys.public, channel.value + session, runtime.running) for channel in Channel
        }

    def send(self, channel: Channel, frames: list[Payload]) -> bool:
        return self.network.send(self._connections[channel], UP, frames)

    def receive(self, channel: Channel) -> list[Payload] | None:
        connection = self._connections[channel]
        return self.network.take(connection, DOWN) if self.network.arrived(connection, DOWN) else None

    def silence_s(self, channel: Channel) -> float:
        return self.network.silence_s(self._connections[channel].pipes[DOWN].descriptor)

    def wait(self, timeout_s: float) -> None:
        readable = any(self.network.arrived(connection, DOWN) for connection in self._connections.values())
        self.network.runtime.pause(0.0 if readable else max(0.0, timeout_s))
        if not all(connection.open for connection in self._connections.values()):
            raise LinkDown(f"{self.endpoint}: the connection ended")

    def close(self, linger_ms: int = 0) -> None:
        for connection in self._connections.values():
            self.network.break_connection(connection)


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
