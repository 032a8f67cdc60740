"""Emulate the network between two machines: a TCP proxy that delays, limits, stalls and cuts connections, without root.

A run's configuration starts it (``link:`` of a robot), or a command::

    python -m sim.network_emulator listen=127.0.0.1:6000 target=10.0.0.7:5555 delay_ms=50

The proxy ends TCP on both sides, so it emulates packets by effects on the stream. A lost packet stalls the connection
until TCP would have sent it again. A partition holds all bytes and connection ends until it is over; meanwhile this
machine's kernel accepts new connections, which wait. A new connection costs one round trip, as TCP's handshake does.

At most `WINDOW_BYTES` of a connection are in transit, which bounds memory: 4 MiB over 50 ms are 80 MB/s. The delay is
exact within 1 ms on an idle machine, the bandwidth within 5%, breaks to the byte.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import random
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from hal.signals import stop_on_signals

LinkDirectionName = Literal["up", "down"]


@dataclass(frozen=True)
class LinkBreak:
    """The end of one connection after exactly `at_byte` bytes in direction `way`.

    ``reset`` breaks it for both ends. ``silence`` leaves it open without transfer in either direction. ``mute`` accepts
    bytes in direction `way` and delivers none; the other direction continues.
    """

    at_byte: int
    way: LinkDirectionName = "up"
    how: Literal["reset", "silence", "mute"] = "reset"


@dataclass(frozen=True)
class LinkEvent:
    """A fault of the whole link, from `at_s` after its first connection, for `for_s`.

    Attributes:
        what: ``cut``: no transfer in direction `way`. ``reset``: every open and new connection breaks. ``half-open``:
            the gateway's side of every connection breaks and the edge gets no notice; new connections are accepted and
            never answered.
    """

    at_s: float
    for_s: float = 0.0
    what: Literal["cut", "reset", "half-open"] = "cut"
    way: Literal["both", "up", "down"] = "both"


@dataclass(frozen=True)
class LinkConfig:
    """The properties of a link. ``up`` is from the connecting side to the target.

    Attributes:
        delay_ms: one way; a round trip takes twice that.
        jitter_ms: greatest additional delay, drawn for each read; order is kept.
        up_mbit_s, down_mbit_s: shared by all connections; 0 for no limit.
        loss: share of lost packets; each stalls its connection for `stall_ms`.
        resets_per_min: mean rate of connections that break at random times.
        breaks: for the first connections, one each, in order.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0
    loss: float = 0.0
    stall_ms: float = 200.0
    resets_per_min: float = 0.0
    seed: int = 0
    events: tuple[LinkEvent, ...] = ()
    breaks: tuple[LinkBreak, ...] = ()

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "up_mbit_s", "down_mbit_s", "stall_ms", "resets_per_min"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"link: {name} is {getattr(self, name)}; it must be at least 0")
        if not 0 <= self.loss < 1:
            raise ValueError(f"link: loss is {self.loss}; it must be in [0, 1)")


def make_link_config(settings: Mapping[str, Any]) -> LinkConfig:
    """Make the configuration from plain `settings`. Raises ValueError for an unknown key or an invalid value."""
    config = msgspec.convert(settings, LinkConfig)
    parts: list[tuple[Mapping[str, Any], type]] = [(settings, LinkConfig)]
    for key, part in (("events", LinkEvent), ("breaks", LinkBreak)):
        parts += [(given, part) for given in settings.get(key, ())]
    for given, kind in parts:
        if unknown := given.keys() - {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(f"{kind.__name__} has no {min(unknown)!r}")
    return config


PACKET_BYTES = 1460  # payload of a TCP segment over Ethernet
MAX_READ_BYTES = 64 << 10
MAX_READ_S = 1e-3  # transmission time of one read at most, so that connections alternate
WINDOW_BYTES = 4 << 20  # of one connection and direction in transit, like a TCP window
MAX_QUEUE_S = 0.02  # queued data at most before senders are held back, like a router's queue


class LinkBroken(ConnectionResetError):
    """A connection has met its `LinkBreak`."""

    def __init__(self, cause: LinkBreak) -> None:
        super().__init__(f"broken at byte {cause.at_byte} {cause.way}")
        self.how = cause.how


class LinkDirection:
    """One direction of a link: a queue at some bandwidth, then a delay.

    Attributes:
        is_open: cleared during a partition; bytes in transit then wait.
        delivered_bytes: so far.
    """

    def __init__(
        self, mbit_s: float, delay_s: float, jitter_s: float, loss: float, stall_s: float, rng: random.Random
    ) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.delivered_bytes = 0
        self.delay_s = delay_s
        self._bytes_s = mbit_s * 1e6 / 8
        self._jitter_s, self._loss, self._stall_s, self._random = jitter_s, loss, stall_s, rng
        self._transmitted_s = 0.0
        at_once = int(self._bytes_s * MAX_READ_S) or MAX_READ_BYTES
        self.read_bytes = min(MAX_READ_BYTES, max(PACKET_BYTES, at_once))

    async def wait_for_room(self) -> None:
        """Block until the link is open and the queue has room."""
        while True:
            await self.is_open.wait()
            over_s = self._transmitted_s - MAX_QUEUE_S - _now()
            if over_s <= 0:
                return
            await asyncio.sleep(over_s)

    def schedule_arrival(self, size: int) -> float:
        """Queue `size` bytes for transmission; returns their arrival time on the loop's clock."""
        self._transmitted_s = max(self._transmitted_s, _now()) + (size / self._bytes_s if self._bytes_s else 0.0)
        packets = -(-size // PACKET_BYTES)
        lost = self._loss > 0 and self._random.random() < 1 - (1 - self._loss) ** packets
        late_s = self._jitter_s * self._random.random() + self._stall_s * lost
        return self._transmitted_s + self.delay_s + late_s

    async def sleep_until(self, due_s: float) -> None:
        """Return at `due_s`, or at the end of a partition that lasts then."""
        if (wait_s := due_s - _now()) > 0:
            await asyncio.sleep(wait_s)
        await self.is_open.wait()


class StreamForwarder:
    """One direction of one connection: reads from `source`, delivers to `sink` in order and in time.

    Run `read` and `write` concurrently. Either raises ConnectionResetError if an end has reset the connection, when the
    other end would notice. `write` raises `LinkBroken` at `broken`. Both return after the end of the stream.
    """

    def __init__(
        self,
        direction: LinkDirection,
        return_direction: LinkDirection,
        source: socket.socket,
        sink: socket.socket,
        broken: LinkBreak | None,
    ) -> None:
        self._direction, self._return_direction, self._source, self._sink, self._broken = (
            direction,
            return_direction,
            source,
            sink,
            broken,
        )
        self._queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._buffered_bytes = 0
        self._bytes_before_break = broken.at_byte if broken else 0
        self._due_s = 0.0

    def raise_if_broken(self) -> None:
        """Raises `LinkBroken` after the last allowed byte, except for ``mute``."""
        if self._broken is not None and self._bytes_before_break == 0 and self._broken.how != "mute":
            raise LinkBroken(self._broken)

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        received: bytes | None = b"-"
        while received:
            await self._direction.wait_for_room()
            await self._room.wait()
            try:
                received = await loop.sock_recv(self._source, self._direction.read_bytes)
            except OSError:
                received = None  # a reset travels like bytes
            self._buffered_bytes += len(received or b"")
            if self._buffered_bytes >= WINDOW_BYTES:
                self._room.clear()
            self._due_s = max(self._due_s, self._direction.schedule_arrival(len(received or b"")))
            self._queue.put_nowait((self._due_s, received))

    async def write(self) -> None:
        while True:
            self.raise_if_broken()
            due_s, content = await self._queue.get()
            await self._direction.sleep_until(due_s)
            if content is None:
                raise ConnectionResetError
            if not content:
                self._sink.shutdown(socket.SHUT_WR)
                return
            await self._deliver(content)
            self._buffered_bytes -= len(content)
            self._room.set()

    async def _deliver(self, content: bytes) -> None:
        passing = content
        if self._broken is not None:
            passing = content[: self._bytes_before_break]
            self._bytes_before_break -= len(passing)
        try:
            await asyncio.get_running_loop().sock_sendall(self._sink, passing)
        except OSError:  # the receiver is gone: the sender notices after the delay of the link
            await self._return_direction.sleep_until(_now() + self._return_direction.delay_s)
            raise ConnectionResetError from None
        self._direction.delivered_bytes += len(passing)


def _now() -> float:
    return asyncio.get_running_loop().time()


logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Open at the same time; further ones wait. The loop uses select() for precise timers, which is limited to 1,024
descriptors."""
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
COUNTS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class LinkTraffic:
    """Totals so far: bytes, accepted connections, and connections that this link broke."""

    up_bytes: int
    down_bytes: int
    connections: int
    broken: int


class _EmulatedConnection:
    """One connection through the link; `fate` is set when the link ends it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.fate: asyncio.Future[Literal["reset", "half-open"]] = asyncio.get_running_loop().create_future()

    def end(self, fate: Literal["reset", "half-open"]) -> None:
        if not self.fate.done():
            self.fate.set_result(fate)


class _Proxy:
    """Accepts and forwards the connections of a link, and applies its faults. All methods run on one loop.

    Attributes:
        breaks: for the next connections, one each.
    """

    def __init__(self, config: LinkConfig, listener: socket.socket, target: tuple[str, int]) -> None:
        self._config, self._listener, self._target = config, listener, target
        self._random = random.Random(config.seed)
        self.breaks = deque(config.breaks)
        self._connections: dict[asyncio.Task[None], _EmulatedConnection] = {}
        self._accepted = self._broken = 0
        self._resetting = False
        self._accepts_connections = asyncio.Event()
        self._accepts_connections.set()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._directions: dict[LinkDirectionName, LinkDirection] = {
            "up": self._make_direction(config.up_mbit_s),
            "down": self._make_direction(config.down_mbit_s),
        }

    @property
    def traffic(self) -> LinkTraffic:
        up, down = self._directions["up"], self._directions["down"]
        return LinkTraffic(up.delivered_bytes, down.delivered_bytes, self._accepted, self._broken)

    async def serve(self) -> None:
        """Accept connections until cancelled; then close all of them."""
        try:
            await self._accept()
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _make_direction(self, mbit_s: float) -> LinkDirection:
        c = self._config
        rng = random.Random(self._random.random())
        return LinkDirection(mbit_s, c.delay_ms / 1e3, c.jitter_ms / 1e3, c.loss, c.stall_ms / 1e3, rng)

    async def _accept(self) -> None:
        event_tasks: list[asyncio.Task[None]] = []
        try:
            while True:
                await self._slots.acquire()
                client, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                self._accepted += 1
                if not event_tasks:
                    event_tasks = [asyncio.create_task(self._run_event(event)) for event in self._config.events]
                    event_tasks += [asyncio.create_task(self._reset_at_random())] if self._config.resets_per_min else []
                connection = _EmulatedConnection(client)
                task = asyncio.create_task(self._handle_connection(connection))
                self._connections[task] = connection
                task.add_done_callback(self._on_connection_end)
        finally:
            for event_task in event_tasks:
                event_task.cancel()

    def _on_connection_end(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("link.failed %s", error, exc_info=error)

    async def _handle_connection(self, connection: _EmulatedConnection) -> None:
        """One connection from accept to close."""
        gateway, was_broken = socket.socket(_family(self._target)), True
        try:
            await self._connect_gateway(connection, gateway)
            was_broken = await self._transfer(connection, gateway)
        except OSError as error:
            logger.debug("link.unreachable %s:%d %s", *self._target, error)
        finally:
            self._broken += was_broken
            _close(connection.client, abruptly=was_broken)
            _close(gateway, abruptly=was_broken)

    async def _connect_gateway(self, connection: _EmulatedConnection, gateway: socket.socket) -> None:
        """Connect to the gateway; raises OSError if it does not listen."""
        connection.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.client.setblocking(False)
        gateway.setblocking(False)
        for direction in self._directions.values():
            await asyncio.sleep(direction.delay_s)
            await direction.is_open.wait()
        if self._resetting or not self._accepts_connections.is_set():
            await self._accepts_connections.wait()
            raise ConnectionResetError("the link does not answer")
        if _is_closed_by_peer(connection.client):
            raise ConnectionAbortedError("the client left while it waited")
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(gateway, self._target), CONNECT_TIMEOUT_S)
        gateway.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _transfer(self, connection: _EmulatedConnection, gateway: socket.socket) -> bool:
        """Transfer in both directions. True if the link or an end broke the connection, False if both closed it."""
        client, broken = connection.client, self.breaks.popleft() if self.breaks else None
        up, down = self._directions["up"], self._directions["down"]
        forwarding = asyncio.create_task(
            _run_forwarders(
                StreamForwarder(up, down, client, gateway, broken if broken and broken.way == "up" else None),
                StreamForwarder(down, up, gateway, client, broken if broken and broken.way == "down" else None),
            )
        )
        try:
            either: tuple[asyncio.Future[Any], ...] = (forwarding, connection.fate)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:  # close sockets only when no task waits for them
            forwarding.cancel()
            (outcome,) = await asyncio.gather(forwarding, return_exceptions=True)
        if connection.fate.done():
            silent = connection.fate.result() == "half-open"
            if silent:
                _close(gateway, abruptly=True)
        elif outcome is None:
            return False
        else:
            silent = isinstance(outcome, LinkBroken) and outcome.how == "silence"
            if not isinstance(outcome, ConnectionResetError):
                raise outcome
        if silent:
            await _discard_until_closed(client)
        return True

    # Faults

    async def _run_event(self, event: LinkEvent) -> None:
        await asyncio.sleep(event.at_s)
        logger.info("link.event what=%s way=%s for_s=%g", event.what, event.way, event.for_s)
        match event.what:
            case "cut":
                self.partition(event.way, is_open=False)
            case "reset":
                self.end_all("reset")
                self._resetting = True
            case "half-open":
                self.go_half_open()
        await asyncio.sleep(event.for_s)
        match event.what:
            case "cut":
                self.partition(event.way, is_open=True)
            case "reset":
                self._resetting = False
            case "half-open":
                self._accepts_connections.set()
        logger.info("link.event_over what=%s way=%s", event.what, event.way)

    async def _reset_at_random(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(self._config.resets_per_min / 60))
            if self._connections:
                self._random.choice(list(self._connections.values())).end("reset")

    def partition(self, way: Literal["both", "up", "down"], *, is_open: bool) -> None:
        for name, each in self._directions.items():
            if way in ("both", name):
                each.is_open.set() if is_open else each.is_open.clear()

    def restore(self) -> None:
        self.partition("both", is_open=True)
        self._accepts_connections.set()

    def go_half_open(self) -> None:
        self._accepts_connections.clear()
        self.end_all("half-open")

    def end_all(self, fate: Literal["reset", "half-open"]) -> None:
        for connection in self._connections.values():
            connection.end(fate)


class EmulatedLink:
    """A link from `listen` to `target`, from `start` to `close`. Any thread may call it.

    Both are ``HOST:PORT``; an IPv6 address is in brackets.

    Attributes:
        address: the listening address, with the actual port if `listen` has port 0.
    """

    def __init__(self, target: str, config: LinkConfig | None = None, listen: str = "127.0.0.1:0") -> None:
        """Raises OSError if `listen` is not available."""
        self.config = config or LinkConfig()
        destination, place = _split_host_port(target), _split_host_port(listen)
        self._listener = socket.create_server(place, family=_family(place), backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._proxy = _Proxy(self.config, self._listener, destination)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(CALL_TIMEOUT_S):
            raise TimeoutError("the link's thread did not start")

    def close(self) -> None:
        """Break all connections and stop listening. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CALL_TIMEOUT_S)
        self._listener.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """`address` in ZeroMQ's format."""
        return f"tcp://{self.address}"

    @property
    def traffic(self) -> LinkTraffic:
        return self._proxy.traffic

    def partition(self, direction: Literal["both", "up", "down"] = "both") -> None:
        """Stop all transfer in a direction until `restore`."""
        self._call(lambda: self._proxy.partition(direction, is_open=False))

    def restore(self) -> None:
        """End partitions and `half_open`; waiting bytes continue."""
        self._call(self._proxy.restore)

    def reset(self) -> None:
        """Break every open connection."""
        self._call(lambda: self._proxy.end_all("reset"))

    def half_open(self) -> None:
        """Break the gateway's side of every connection without notice to the other; new connections get no answer until
        `restore`."""
        self._call(self._proxy.go_half_open)

    def schedule_breaks(self, *breaks: LinkBreak) -> None:
        """Apply `breaks` to the next connections, one each."""
        self._call(lambda: self._proxy.breaks.extend(breaks))

    def _call(self, change: Callable[[], None]) -> None:
        done = threading.Event()

        def apply() -> None:
            change()
            done.set()

        self._loop.call_soon_threadsafe(apply)
        if not done.wait(CALL_TIMEOUT_S):
            raise TimeoutError("the link's thread does not answer")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_precise_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self._proxy.serve())
        self._ready.set()
        await self._stop.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _run_forwarders(*pipes: StreamForwarder) -> None:
    """Run forwarders until all have ended. The first exception stops the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for pipe in pipes:
                pipe.raise_if_broken()
            for pipe in pipes:
                group.create_task(pipe.read())
                group.create_task(pipe.write())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _discard_until_closed(end: socket.socket) -> None:
    """Read without answering until the other end closes."""
    try:
        while await asyncio.get_running_loop().sock_recv(end, 64 << 10):
            pass
    except OSError:
        return


def _is_closed_by_peer(end: socket.socket) -> bool:
    try:
        return end.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def _close(end: socket.socket, *, abruptly: bool) -> None:
    if abruptly and end.fileno() >= 0:  # SO_LINGER of 0: the other end sees a reset
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def _precise_loop() -> asyncio.AbstractEventLoop:
    """A loop with timers exact to microseconds; epoll rounds up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _family(place: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in place[0] else socket.AF_INET


def _split_host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise ValueError(f"{address!r} is not an address; write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.network_emulator", description="An emulated network link: a TCP proxy."
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="listen and target (HOST:PORT), and the fields of LinkConfig, as YAML",
    )
    parser.add_argument("--config", type=Path, help="a YAML file with such settings")
    parser.add_argument("--counts", type=Path, help=f"append the bytes so far as JSON, each {COUNTS_INTERVAL_S} s")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        settings = msgspec.yaml.decode(args.config.read_bytes(), type=dict[str, Any]) if args.config else {}
        settings |= {key: msgspec.yaml.decode(value) for key, _, value in (s.partition("=") for s in args.settings)}
        listen, target = (str(settings.pop(key, "")) for key in ("listen", "target"))
        link = EmulatedLink(target, make_link_config(settings), listen)
    except (OSError, ValueError) as error:
        logger.error("link.failed %s", " ".join(str(error).split()))
        return 2
    with link:
        logger.info("link.listening %s to %s: %s", link.address, target, link.config)
        while not stop.wait(COUNTS_INTERVAL_S):
            if args.counts:
                _append_counts(args.counts, link.traffic)
    return 0


def _append_counts(path: Path, traffic: LinkTraffic) -> None:
    line = {"time_unix_s": time.time(), **dataclasses.asdict(traffic)}
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
