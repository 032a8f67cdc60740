"""Emulate the network between two machines: a TCP proxy that delays, limits, stalls and cuts connections, without root.

A run's configuration starts it (``link:`` of a robot), or a command::

    python -m sim.network_emulator listen=127.0.0.1:6000 target=10.0.0.7:5555 delay_ms=50

The proxy ends TCP on both sides, so it emulates packets by effects on the stream. A lost packet stalls the connection
until TCP would have sent it again. A cut holds all bytes and connection ends until it is over; meanwhile this machine's
kernel accepts new connections, which wait. A new connection costs one round trip, as TCP's handshake does.

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hal.context import StartedAtEntry
from hal.errors import SpecError
from hal.settings import Amount, read_settings
from hal.signals import stop_on_signals

logger = logging.getLogger(__name__)

LinkDirectionName = Literal["up", "down"]
PACKET_BYTES = 1460  # payload of a TCP segment over Ethernet
MAX_READ_BYTES = 64 << 10
MAX_READ_S = 1e-3  # transmission time of one read at most, so that connections alternate
WINDOW_BYTES = 4 << 20  # of one connection and direction in transit, like a TCP window
MAX_QUEUE_S = 0.02  # queued data at most before senders are held back, like a router's queue
MAX_CONNECTIONS = 256  # waiting for acceptance
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
COUNTS_INTERVAL_S = 0.5


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
    """A cut of the whole link in direction `way`, from `at_s` after its first connection, for `for_s`."""

    at_s: float
    for_s: float = 0.0
    way: Literal["both", "up", "down"] = "both"


@dataclass(frozen=True)
class LinkConfig:
    """The properties of a link. ``up`` is from the connecting side to the target.

    Attributes:
        delay_ms: one way; a round trip takes twice that.
        jitter_ms: greatest additional delay, drawn for each read; order is kept.
        up_mbit_s, down_mbit_s: shared by all connections; 0 for no limit.
        loss: share of lost packets; each stalls its connection for `stall_ms`.
        breaks: for the first connections, one each, in order.
    """

    delay_ms: Amount = 0.0
    jitter_ms: Amount = 0.0
    up_mbit_s: Amount = 0.0
    down_mbit_s: Amount = 0.0
    loss: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    stall_ms: Amount = 200.0
    seed: int = 0
    events: tuple[LinkEvent, ...] = ()
    breaks: tuple[LinkBreak, ...] = ()


class LinkBroken(ConnectionResetError):
    """A connection has met its `LinkBreak`."""


class _Direction:
    """One direction of a link: a queue at some bandwidth, then a delay.

    Attributes:
        is_open: cleared during a cut; bytes in transit then wait.
        delivered_bytes: so far.
    """

    def __init__(self, config: LinkConfig, mbit_s: float, seed: float) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.delivered_bytes = 0
        self.delay_s = config.delay_ms / 1e3
        self._jitter_s, self._loss, self._stall_s = config.jitter_ms / 1e3, config.loss, config.stall_ms / 1e3
        self._bytes_s, self._random = mbit_s * 1e6 / 8, random.Random(seed)
        self._transmitted_s = 0.0
        at_once = int(self._bytes_s * MAX_READ_S) or MAX_READ_BYTES
        self.read_bytes = min(MAX_READ_BYTES, max(PACKET_BYTES, at_once))

    async def wait_for_room(self) -> None:
        """Block until the link is open and the queue has room."""
        await self.is_open.wait()
        while (over_s := self._transmitted_s - MAX_QUEUE_S - _now()) > 0:
            await asyncio.sleep(over_s)
            await self.is_open.wait()

    def schedule_arrival(self, size: int) -> float:
        """Queue `size` bytes for transmission; returns their arrival time on the loop's clock."""
        self._transmitted_s = max(self._transmitted_s, _now()) + (size / self._bytes_s if self._bytes_s else 0.0)
        packets = -(-size // PACKET_BYTES)
        lost = self._loss > 0 and self._random.random() < 1 - (1 - self._loss) ** packets
        return self._transmitted_s + self.delay_s + self._jitter_s * self._random.random() + self._stall_s * lost

    async def sleep_until(self, due_s: float) -> None:
        """Return at `due_s`, or at the end of a cut that lasts then."""
        if (wait_s := due_s - _now()) > 0:
            await asyncio.sleep(wait_s)
        await self.is_open.wait()


async def _forward(way: _Direction, source: socket.socket, sink: socket.socket, broken: LinkBreak | None) -> None:
    """Delivers the bytes of one connection and direction, in order and in time, until the end of the stream.

    Raises:
        LinkBroken: at `broken`, except for ``mute``.
        ConnectionResetError: an end has reset the connection.
    """
    loop, queue, room = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes | None]](), asyncio.Event()
    in_transit = 0

    async def read() -> None:
        nonlocal in_transit
        due_s, received = 0.0, b"-"
        while received:
            await way.wait_for_room()
            room.set() if in_transit < WINDOW_BYTES else room.clear()
            await room.wait()
            try:
                received = await loop.sock_recv(source, way.read_bytes)
            except OSError:  # a reset travels like bytes
                queue.put_nowait((max(due_s, way.schedule_arrival(0)), None))
                return
            in_transit += len(received)
            due_s = max(due_s, way.schedule_arrival(len(received)))
            queue.put_nowait((due_s, received))

    async def write() -> None:
        nonlocal in_transit
        left = broken.at_byte if broken is not None else 0
        while True:
            if broken is not None and left == 0 and broken.how != "mute":
                raise LinkBroken(broken.how)
            due_s, content = await queue.get()
            await way.sleep_until(due_s)
            if content is None:
                raise ConnectionResetError
            if not content:
                sink.shutdown(socket.SHUT_WR)
                return
            passing = content if broken is None else content[:left]
            left -= len(passing)
            await loop.sock_sendall(sink, passing)
            way.delivered_bytes += len(passing)
            in_transit -= len(content)
            room.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        group.create_task(write())


@dataclass(frozen=True)
class LinkTraffic:
    """Totals so far: bytes, accepted connections, and connections that this link broke."""

    up_bytes: int
    down_bytes: int
    connections: int
    broken: int


class EmulatedLink(StartedAtEntry):
    """A link from `listen` to `target`, from `start` to `close`. Any thread may call its public methods.

    Both are ``HOST:PORT``; an IPv6 address is in brackets.

    Attributes:
        address: the listening address, with the actual port if `listen` has port 0.
    """

    def __init__(self, target: str, config: LinkConfig | None = None, listen: str = "127.0.0.1:0") -> None:
        """Raises OSError if `listen` is not available."""
        self.config = config or LinkConfig()
        self._target, place = _split_host_port(target), _split_host_port(listen)
        self._listener = socket.create_server(place, family=_family(place), backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._breaks = deque(self.config.breaks)  # for the next connections, one each
        self._connections: set[asyncio.Task[None]] = set()
        self._accepted = self._broken = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(CALL_TIMEOUT_S):
            raise TimeoutError("the link's thread did not start")

    def close(self) -> None:
        """Break all connections and stop listening. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(CALL_TIMEOUT_S)
        self._listener.close()

    @property
    def endpoint(self) -> str:
        """`address` in ZeroMQ's format."""
        return f"tcp://{self.address}"

    @property
    def traffic(self) -> LinkTraffic:
        up, down = self._ways["up"].delivered_bytes, self._ways["down"].delivered_bytes
        return LinkTraffic(up, down, self._accepted, self._broken)

    def partition(self, direction: Literal["both", "up", "down"] = "both") -> None:
        """Stop all transfer in a direction until `restore`."""
        self._call(lambda: self._set_open(direction, False))

    def restore(self) -> None:
        """End partitions; waiting bytes continue."""
        self._call(lambda: self._set_open("both", True))

    def reset(self) -> None:
        """Break every open connection."""
        self._call(lambda: [connection.cancel() for connection in self._connections])

    def schedule_breaks(self, *breaks: LinkBreak) -> None:
        """Apply `breaks` to the next connections, one each."""
        self._call(lambda: self._breaks.extend(breaks))

    def _call(self, change: Callable[[], object]) -> None:
        async def apply() -> None:
            change()

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(CALL_TIMEOUT_S)

    # The link's thread

    def _run(self) -> None:
        # A select loop has timers exact to microseconds; epoll rounds up to milliseconds.
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        config, self._loop = self.config, asyncio.get_running_loop()
        self._ways: dict[LinkDirectionName, _Direction] = {
            "up": _Direction(config, config.up_mbit_s, config.seed),
            "down": _Direction(config, config.down_mbit_s, config.seed + 1),
        }
        self._serving = asyncio.create_task(self._accept())
        self._ready.set()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _accept(self) -> None:
        """Accept connections until cancelled; then close all of them."""
        events: list[asyncio.Task[None]] = []
        try:
            while True:
                client, _ = await self._loop.sock_accept(self._listener)
                self._accepted += 1
                if not events:
                    events = [asyncio.create_task(self._cut(event)) for event in self.config.events]
                task = asyncio.create_task(self._handle_connection(client))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            for each in (*events, *self._connections):
                each.cancel()
            await asyncio.gather(*events, *self._connections, return_exceptions=True)

    async def _handle_connection(self, client: socket.socket) -> None:
        """One connection from accept to close; cancelled to reset it."""
        gateway, was_broken = socket.socket(_family(self._target)), True
        try:
            await self._connect(client, gateway)
            await self._transfer(client, gateway)
            was_broken = False
        except* LinkBroken as errors:
            if "silence" in str(errors.exceptions):
                await _discard_until_closed(client)
        except* OSError as errors:
            logger.debug("link.lost %s:%d %r", *self._target, errors.exceptions)
        finally:
            self._broken += was_broken
            for end in (client, gateway):
                if was_broken:  # SO_LINGER of 0: the other end sees a reset
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()

    async def _connect(self, client: socket.socket, gateway: socket.socket) -> None:
        """Connect to the gateway after a round trip; raises OSError if it does not listen or the client has left."""
        for end in (client, gateway):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        for way in self._ways.values():
            await asyncio.sleep(way.delay_s)
            await way.is_open.wait()
        if _is_closed_by_peer(client):
            raise ConnectionAbortedError("the client left while it waited")
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self._loop.sock_connect(gateway, self._target)

    async def _transfer(self, client: socket.socket, gateway: socket.socket) -> None:
        broken = self._breaks.popleft() if self._breaks else None
        upward, downward = (broken if broken and broken.way == name else None for name in self._ways)
        async with asyncio.TaskGroup() as group:
            group.create_task(_forward(self._ways["up"], client, gateway, upward))
            group.create_task(_forward(self._ways["down"], gateway, client, downward))

    async def _cut(self, event: LinkEvent) -> None:
        await asyncio.sleep(event.at_s)
        logger.info("link.cut way=%s for_s=%g", event.way, event.for_s)
        self._set_open(event.way, False)
        await asyncio.sleep(event.for_s)
        self._set_open(event.way, True)
        logger.info("link.restored way=%s", event.way)

    def _set_open(self, direction: Literal["both", "up", "down"], is_open: bool) -> None:
        for name, way in self._ways.items():
            if direction in ("both", name):
                way.is_open.set() if is_open else way.is_open.clear()


async def _discard_until_closed(end: socket.socket) -> None:
    """Read without answering until the other end closes."""
    try:
        while await asyncio.get_running_loop().sock_recv(end, MAX_READ_BYTES):
            pass
    except OSError:
        return


def _is_closed_by_peer(end: socket.socket) -> bool:
    try:
        return end.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def _now() -> float:
    return asyncio.get_running_loop().time()


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
    settings_help = "listen and target (HOST:PORT), and the fields of LinkConfig, as YAML"
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=settings_help)
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
        link = EmulatedLink(target, read_settings(LinkConfig, settings), listen)
    except (OSError, ValueError, SpecError) as error:
        logger.error("link.failed %s", " ".join(str(error).split()))
        return 2
    with link:
        logger.info("link.listening %s to %s: %s", link.address, target, link.config)
        while not stop.wait(COUNTS_INTERVAL_S):
            if args.counts:
                line = {"time_unix_s": time.time(), **dataclasses.asdict(link.traffic)}
                with args.counts.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
