"""What an emulated link does, and when.

How bytes travel over an emulated link: one direction that all connections share, and one connection's part of it.

Everything here runs on one asyncio loop, that of `sim.network_emulator`.

An emulated network between two machines: a TCP proxy that delays, narrows, loses and cuts, and needs no root.

Anyone rehearses two sites on one machine: from a run's configuration (``link:`` of a robot), or by hand::

    python -m sim.network_emulator listen=127.0.0.1:6000 target=10.0.0.7:5555 delay_ms=50 'events=[{at_s: 60, for_s:
    120}]'

A proxy ends TCP at both of its sides, so what happens to packets is emulated by what happens to the stream: a lost
packet is a stall of the connection until it would have been sent again; a partition holds all bytes, and ends of
connections too, until it is over; while it lasts new connections are accepted by this machine's kernel and wait. A new
connection costs one round trip, as TCP's handshake does. `WINDOW_BYTES` of a connection are on the way at most, so that
memory is bounded: 4 MiB over 50 ms are 80 MB/s. What is deliberate is exact: delay within a millisecond on an idle
machine, bandwidth within 5%, breaks to the byte.
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
    """The end of one connection once exactly `at_byte` bytes have passed in direction `way`.

    ``reset`` breaks it for both ends; ``silence`` leaves it open, and nothing passes any more in either direction;
    ``mute`` goes on taking what comes in direction `way`, delivers none of it, and lets the other direction pass.
    """

    at_byte: int
    way: LinkDirectionName = "up"
    how: Literal["reset", "silence", "mute"] = "reset"


@dataclass(frozen=True)
class LinkEvent:
    """Something that happens to a link, `at_s` seconds after its first connection, and lasts `for_s`.

    Attributes:
        what: ``cut``: nothing passes in the direction `way`. ``reset``: every connection breaks, and so do new ones
            while it lasts. ``half-open``: the gateway's side of every connection breaks and the edge is not told; new
            ones are accepted and never answered.
    """

    at_s: float
    for_s: float = 0.0
    what: Literal["cut", "reset", "half-open"] = "cut"
    way: Literal["both", "up", "down"] = "both"


@dataclass(frozen=True)
class LinkConfig:
    """What a link does to what passes. ``up`` is from whoever dials to where the link leads.

    Attributes:
        delay_ms: one way; a round trip takes twice that.
        jitter_ms: up to so much more, drawn anew for each read; order is kept.
        up_mbit_s, down_mbit_s: shared by all connections; 0 does not limit.
        loss: share of packets that are lost, each a stall of its connection for `stall_ms`.
        resets_per_min: connections that break, on average, at random times.
        breaks: of the first connections, one each, in order.
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
                raise ValueError(f"link: {name} must not be negative")
        if not 0 <= self.loss < 1:
            raise ValueError("link: loss is a share of packets, from 0 to below 1")


def make_link_config(settings: Mapping[str, Any]) -> LinkConfig:
    """The configuration with plain `settings`; raises ValueError for a key or value that it has not."""
    config = msgspec.convert(settings, LinkConfig)
    parts: list[tuple[Mapping[str, Any], type]] = [(settings, LinkConfig)]
    for key, part in (("events", LinkEvent), ("breaks", LinkBreak)):
        parts += [(given, part) for given in settings.get(key, ())]
    for given, kind in parts:
        if unknown := given.keys() - {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(f"{kind.__name__} has no {min(unknown)!r}")
    return config


PACKET_BYTES = 1460  # what a TCP segment carries over Ethernet
MAX_READ_BYTES = 64 << 10
MAX_READ_S = 1e-3  # a read takes no more than this on the line, so that connections take turns
WINDOW_BYTES = 4 << 20  # of one connection and direction on the way at once, as a TCP window bounds it
MAX_QUEUE_S = 0.02  # what waits for the line at most before senders are held back, as in a router's queue


class LinkBroken(ConnectionResetError):
    """A connection has met its `LinkBreak`."""

    def __init__(self, cause: LinkBreak) -> None:
        super().__init__(f"broken at byte {cause.at_byte} {cause.way}")
        self.how = cause.how


class LinkDirection:
    """One direction of a link: a line of some bandwidth on which bytes queue, and a delay after it.

    Attributes:
        is_open: cleared while a partition lasts; what is on the way then waits.
        delivered_bytes: delivered so far.
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
        self._free_s = 0.0
        at_once = int(self._bytes_s * MAX_READ_S) or MAX_READ_BYTES
        self.read_bytes = min(MAX_READ_BYTES, max(PACKET_BYTES, at_once))

    async def wait_for_room(self) -> None:
        """Returns when the link is whole and the line's queue has room."""
        while True:
            await self.is_open.wait()
            over_s = self._free_s - MAX_QUEUE_S - _now()
            if over_s <= 0:
                return
            await asyncio.sleep(over_s)

    def schedule_arrival(self, size: int) -> float:
        """Takes the line for `size` bytes, behind what waits already; when they arrive, on the loop's clock."""
        self._free_s = max(self._free_s, _now()) + (size / self._bytes_s if self._bytes_s else 0.0)
        packets = -(-size // PACKET_BYTES)
        lost = self._loss > 0 and self._random.random() < 1 - (1 - self._loss) ** packets
        late_s = self._jitter_s * self._random.random() + self._stall_s * lost
        return self._free_s + self.delay_s + late_s

    async def sleep_until(self, due_s: float) -> None:
        """Returns at `due_s`, or when the partition that lasts then is over."""
        if (wait_s := due_s - _now()) > 0:
            await asyncio.sleep(wait_s)
        await self.is_open.wait()


class StreamForwarder:
    """One direction of one connection: reads from `source`, delivers to `sink` in order, unchanged, and in time.

    Run `read` and `write` side by side. Either raises ConnectionResetError, once the other end may know, when an end
    has reset the connection, and `write` raises `LinkBroken` at `broken`. Both return after the end of the stream.
    """

    def __init__(
        self,
        way: LinkDirection,
        back: LinkDirection,
        source: socket.socket,
        sink: socket.socket,
        broken: LinkBreak | None,
    ) -> None:
        self._way, self._back, self._source, self._sink, self._broken = way, back, source, sink, broken
        self._queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._held_bytes = 0
        self._left_bytes = broken.at_byte if broken else 0
        self._due_s = 0.0

    def raise_if_broken(self) -> None:
        """Raises `LinkBroken` when as many bytes have passed as may, unless the connection only falls mute."""
        if self._broken is not None and self._left_bytes == 0 and self._broken.how != "mute":
            raise LinkBroken(self._broken)

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        received: bytes | None = b"-"
        while received:
            await self._way.wait_for_room()
            await self._room.wait()
            try:
                received = await loop.sock_recv(self._source, self._way.read_bytes)
            except OSError:
                received = None  # a reset travels like bytes
            self._held_bytes += len(received or b"")
            if self._held_bytes >= WINDOW_BYTES:
                self._room.clear()
            self._due_s = max(self._due_s, self._way.schedule_arrival(len(received or b"")))
            self._queue.put_nowait((self._due_s, received))

    async def write(self) -> None:
        while True:
            self.raise_if_broken()
            due_s, content = await self._queue.get()
            await self._way.sleep_until(due_s)
            if content is None:
                raise ConnectionResetError
            if not content:
                self._sink.shutdown(socket.SHUT_WR)
                return
            await self._deliver(content)
            self._held_bytes -= len(content)
            self._room.set()

    async def _deliver(self, content: bytes) -> None:
        passing = content
        if self._broken is not None:
            passing = content[: self._left_bytes]
            self._left_bytes -= len(passing)
        try:
            await asyncio.get_running_loop().sock_sendall(self._sink, passing)
        except OSError:  # the receiver has gone: the sender hears of it as late as it would over this link
            await self._back.sleep_until(_now() + self._back.delay_s)
            raise ConnectionResetError from None
        self._way.delivered_bytes += len(passing)


def _now() -> float:
    return asyncio.get_running_loop().time()


logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Open at once; further ones wait. The loop uses select(), for its microseconds, which ends at 1,024 descriptors."""
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
COUNTS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class LinkTraffic:
    """What has passed so far, in bytes, how many connections were accepted, and how many of them this link broke."""

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


class EmulatedLink:
    """A link from `listen` to `target`, from `start` to `close`. Any thread may call it.

    Both are ``HOST:PORT``; an IPv6 address stands in brackets.

    Attributes:
        address: where it listens, with the port that was chosen where `listen` asks for port 0.
    """

    def __init__(self, target: str, config: LinkConfig | None = None, listen: str = "127.0.0.1:0") -> None:
        """Raises OSError when `listen` cannot be listened on."""
        self.config = config or LinkConfig()
        self._target = _split_host_port(target)
        place = _split_host_port(listen)
        self._listener = socket.create_server(place, family=_family(place), backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._random = random.Random(self.config.seed)
        self._breaks = deque(self.config.breaks)
        self._connections: dict[asyncio.Task[None], _EmulatedConnection] = {}
        self._accepted = self._broken = 0
        self._resetting = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(CALL_TIMEOUT_S):
            raise TimeoutError("the link's thread did not start")

    def close(self) -> None:
        """Breaks all connections and stops listening. Calling it twice is harmless."""
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
        """`address` as ZeroMQ writes it."""
        return f"tcp://{self.address}"

    @property
    def traffic(self) -> LinkTraffic:
        return LinkTraffic(
            self._ways["up"].delivered_bytes, self._ways["down"].delivered_bytes, self._accepted, self._broken
        )

    def partition(self, direction: Literal["both", "up", "down"] = "both") -> None:
        """Lets nothing pass in the direction `way` until `restore`."""
        self._call(lambda: self._partition(direction, whole=False))

    def restore(self) -> None:
        """Ends cuts and `half_open`; what waited goes on its way."""
        self._call(self._heal)

    def reset(self) -> None:
        """Breaks every connection that is open."""
        self._call(lambda: self._end_all("reset"))

    def half_open(self) -> None:
        """Breaks the gateway's side of every connection without telling the other; answers no new one until
        `restore`.
        """
        self._call(self._go_half_open)

    def schedule_breaks(self, *breaks: LinkBreak) -> None:
        """The next connections, one each, meet `breaks`."""
        self._call(lambda: self._breaks.extend(breaks))

    # The loop's thread

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
        self._loop, self._stop, self._answering = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._answering.set()
        self._few = asyncio.Semaphore(MAX_CONNECTIONS)
        self._ways: dict[LinkDirectionName, LinkDirection] = {
            "up": self._way(self.config.up_mbit_s),
            "down": self._way(self.config.down_mbit_s),
        }
        accepting = asyncio.create_task(self._accept())
        self._ready.set()
        await self._stop.wait()
        for task in (accepting, *self._connections):
            task.cancel()
        await asyncio.gather(accepting, *self._connections, return_exceptions=True)

    def _way(self, mbit_s: float) -> LinkDirection:
        c = self.config
        rng = random.Random(self._random.random())
        return LinkDirection(mbit_s, c.delay_ms / 1e3, c.jitter_ms / 1e3, c.loss, c.stall_ms / 1e3, rng)

    async def _accept(self) -> None:
        script: list[asyncio.Task[None]] = []
        try:
            while True:
                await self._few.acquire()
                client, _ = await self._loop.sock_accept(self._listener)
                self._accepted += 1
                if not script:
                    script = [asyncio.create_task(self._play(event)) for event in self.config.events]
                    script += [asyncio.create_task(self._reset_at_random())] if self.config.resets_per_min else []
                connection = _EmulatedConnection(client)
                task = asyncio.create_task(self._carry(connection))
                self._connections[task] = connection
                task.add_done_callback(self._forget)
        finally:
            for playing in script:
                playing.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        self._few.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("link.failed %s", error, exc_info=error)

    async def _carry(self, connection: _EmulatedConnection) -> None:
        """One connection from its acceptance to its end."""
        gateway, harmed = socket.socket(_family(self._target)), True
        try:
            await self._greet(connection, gateway)
            harmed = await self._exchange(connection, gateway)
        except OSError as error:
            logger.debug("link.unreachable %s:%d %s", *self._target, error)
        finally:
            self._broken += harmed
            _close(connection.client, abruptly=harmed)
            _close(gateway, abruptly=harmed)

    async def _greet(self, connection: _EmulatedConnection, gateway: socket.socket) -> None:
        """The way to the gateway; raises OSError when it does not listen."""
        connection.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.client.setblocking(False)
        gateway.setblocking(False)
        for way in self._ways.values():
            await asyncio.sleep(way.delay_s)
            await way.is_open.wait()
        if self._resetting or not self._answering.is_set():
            await self._answering.wait()
            raise ConnectionResetError("the link answers nobody")
        if _is_closed_by_peer(connection.client):
            raise ConnectionAbortedError("the client left while it waited")
        await asyncio.wait_for(self._loop.sock_connect(gateway, self._target), CONNECT_TIMEOUT_S)
        gateway.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _exchange(self, connection: _EmulatedConnection, gateway: socket.socket) -> bool:
        """Bytes in both directions; True where the link or an end broke the connection, and False where both left."""
        client, broken = connection.client, self._breaks.popleft() if self._breaks else None
        up, down = self._ways["up"], self._ways["down"]
        pumping = asyncio.create_task(
            _run_forwarders(
                StreamForwarder(up, down, client, gateway, broken if broken and broken.way == "up" else None),
                StreamForwarder(down, up, gateway, client, broken if broken and broken.way == "down" else None),
            )
        )
        try:
            either: tuple[asyncio.Future[Any], ...] = (pumping, connection.fate)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:  # sockets may be closed only when nobody waits for them any more
            pumping.cancel()
            (outcome,) = await asyncio.gather(pumping, return_exceptions=True)
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

    # What happens to a link

    async def _play(self, event: LinkEvent) -> None:
        await asyncio.sleep(event.at_s)
        logger.info("link.event what=%s way=%s for_s=%g", event.what, event.way, event.for_s)
        match event.what:
            case "cut":
                self._partition(event.way, whole=False)
            case "reset":
                self._end_all("reset")
                self._resetting = True
            case "half-open":
                self._go_half_open()
        await asyncio.sleep(event.for_s)
        match event.what:
            case "cut":
                self._partition(event.way, whole=True)
            case "reset":
                self._resetting = False
            case "half-open":
                self._answering.set()
        logger.info("link.event_over what=%s way=%s", event.what, event.way)

    async def _reset_at_random(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(self.config.resets_per_min / 60))
            if self._connections:
                self._random.choice(list(self._connections.values())).end("reset")

    def _partition(self, way: Literal["both", "up", "down"], *, whole: bool) -> None:
        for name, line in self._ways.items():
            if way in ("both", name):
                line.is_open.set() if whole else line.is_open.clear()

    def _heal(self) -> None:
        self._partition("both", whole=True)
        self._answering.set()

    def _go_half_open(self) -> None:
        self._answering.clear()
        self._end_all("half-open")

    def _end_all(self, fate: Literal["reset", "half-open"]) -> None:
        for connection in self._connections.values():
            connection.end(fate)


async def _run_forwarders(*pipes: StreamForwarder) -> None:
    """Runs pipes until all have ended; raises what the first that fails raises, after the others have stopped."""
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
    """Answers nothing until the other end has gone."""
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
    """A loop whose timers are exact to microseconds; epoll's are rounded up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _family(place: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in place[0] else socket.AF_INET


def _split_host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise ValueError(f"{address!r} is not an address; write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.network_emulator", description="An emulated network: a TCP proxy."
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="listen and target (HOST:PORT), and those of LinkConfig, as YAML",
    )
    parser.add_argument("--config", type=Path, help="a YAML file of such settings")
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
