"""An emulated network between two machines: a TCP proxy that delays, narrows, loses and cuts, and needs no root.

Anyone rehearses two sites on one machine: from a run's configuration (``link:`` of a robot), or by hand::

    python -m sim.link listen=127.0.0.1:6000 target=10.0.0.7:5555 delay_ms=50 'events=[{at_s: 60, for_s: 120}]'

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from hal.signals import stop_on_signals
from sim.link_config import LinkBreak, LinkConfig, LinkEvent, WayName, link_config
from sim.link_way import Broken, Pipe, Way

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Open at once; further ones wait. The loop uses select(), for its microseconds, which ends at 1,024 descriptors."""
CALL_TIMEOUT_S = 60.0
DIAL_TIMEOUT_S = 30.0
COUNTS_EVERY_S = 0.5


@dataclass(frozen=True)
class Traffic:
    """What has passed so far, in bytes, how many connections were accepted, and how many of them this link broke."""

    up_bytes: int
    down_bytes: int
    connections: int
    broken: int


class _Connection:
    """One connection through the link; `fate` is set when the link ends it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.fate: asyncio.Future[Literal["reset", "half-open"]] = asyncio.get_running_loop().create_future()

    def end(self, fate: Literal["reset", "half-open"]) -> None:
        if not self.fate.done():
            self.fate.set_result(fate)


class Link:
    """A link from `listen` to `target`, from `start` to `close`. Any thread may call it.

    Both are ``HOST:PORT``; an IPv6 address stands in brackets.

    Attributes:
        address: where it listens, with the port that was chosen where `listen` asks for port 0.
    """

    def __init__(self, target: str, config: LinkConfig | None = None, listen: str = "127.0.0.1:0") -> None:
        """Raises OSError when `listen` cannot be listened on."""
        self.config = config or LinkConfig()
        self._target = _host_port(target)
        place = _host_port(listen)
        self._listener = socket.create_server(place, family=_family(place), backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._random = random.Random(self.config.seed)
        self._breaks = deque(self.config.breaks)
        self._connections: dict[asyncio.Task[None], _Connection] = {}
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
    def traffic(self) -> Traffic:
        return Traffic(self._ways["up"].carried_bytes, self._ways["down"].carried_bytes, self._accepted, self._broken)

    def cut(self, way: Literal["both", "up", "down"] = "both") -> None:
        """Lets nothing pass in the direction `way` until `heal`."""
        self._call(lambda: self._partition(way, whole=False))

    def heal(self) -> None:
        """Ends cuts and `half_open`; what waited goes on its way."""
        self._call(self._heal)

    def reset(self) -> None:
        """Breaks every connection that is open."""
        self._call(lambda: self._end_all("reset"))

    def half_open(self) -> None:
        """Breaks the gateway's side of every connection without telling the other; answers no new one until `heal`."""
        self._call(self._go_half_open)

    def arm(self, *breaks: LinkBreak) -> None:
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
        self._ways: dict[WayName, Way] = {
            "up": self._way(self.config.up_mbit_s),
            "down": self._way(self.config.down_mbit_s),
        }
        accepting = asyncio.create_task(self._accept())
        self._ready.set()
        await self._stop.wait()
        for task in (accepting, *self._connections):
            task.cancel()
        await asyncio.gather(accepting, *self._connections, return_exceptions=True)

    def _way(self, mbit_s: float) -> Way:
        c = self.config
        rng = random.Random(self._random.random())
        return Way(mbit_s, c.delay_ms / 1e3, c.jitter_ms / 1e3, c.loss, c.stall_ms / 1e3, rng)

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
                connection = _Connection(client)
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

    async def _carry(self, connection: _Connection) -> None:
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

    async def _greet(self, connection: _Connection, gateway: socket.socket) -> None:
        """The way to the gateway; raises OSError when it does not listen."""
        connection.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.client.setblocking(False)
        gateway.setblocking(False)
        for way in self._ways.values():
            await asyncio.sleep(way.delay_s)
            await way.open.wait()
        if self._resetting or not self._answering.is_set():
            await self._answering.wait()
            raise ConnectionResetError("the link answers nobody")
        if _has_left(connection.client):
            raise ConnectionAbortedError("the client left while it waited")
        await asyncio.wait_for(self._loop.sock_connect(gateway, self._target), DIAL_TIMEOUT_S)
        gateway.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _exchange(self, connection: _Connection, gateway: socket.socket) -> bool:
        """Bytes in both directions; True where the link or an end broke the connection, and False where both left."""
        client, broken = connection.client, self._breaks.popleft() if self._breaks else None
        up, down = self._ways["up"], self._ways["down"]
        pumping = asyncio.create_task(
            _pump(
                Pipe(up, down, client, gateway, broken if broken and broken.way == "up" else None),
                Pipe(down, up, gateway, client, broken if broken and broken.way == "down" else None),
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
            silent = isinstance(outcome, Broken) and outcome.how == "silence"
            if not isinstance(outcome, ConnectionResetError):
                raise outcome
        if silent:
            await _swallow(client)
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
                line.open.set() if whole else line.open.clear()

    def _heal(self) -> None:
        self._partition("both", whole=True)
        self._answering.set()

    def _go_half_open(self) -> None:
        self._answering.clear()
        self._end_all("half-open")

    def _end_all(self, fate: Literal["reset", "half-open"]) -> None:
        for connection in self._connections.values():
            connection.end(fate)


async def _pump(*pipes: Pipe) -> None:
    """Runs pipes until all have ended; raises what the first that fails raises, after the others have stopped."""
    try:
        async with asyncio.TaskGroup() as group:
            for pipe in pipes:
                pipe.meet_break()
            for pipe in pipes:
                group.create_task(pipe.read())
                group.create_task(pipe.write())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _swallow(end: socket.socket) -> None:
    """Answers nothing until the other end has gone."""
    try:
        while await asyncio.get_running_loop().sock_recv(end, 64 << 10):
            pass
    except OSError:
        return


def _has_left(end: socket.socket) -> bool:
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


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise ValueError(f"{address!r} is not an address; write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m sim.link", description="An emulated network: a TCP proxy.")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="listen and target (HOST:PORT), and those of LinkConfig, as YAML",
    )
    parser.add_argument("--config", type=Path, help="a YAML file of such settings")
    parser.add_argument("--counts", type=Path, help=f"append the bytes so far as JSON, each {COUNTS_EVERY_S} s")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        settings = msgspec.yaml.decode(args.config.read_bytes(), type=dict[str, Any]) if args.config else {}
        settings |= {key: msgspec.yaml.decode(value) for key, _, value in (s.partition("=") for s in args.settings)}
        listen, target = (str(settings.pop(key, "")) for key in ("listen", "target"))
        link = Link(target, link_config(settings), listen)
    except (OSError, ValueError) as error:
        logger.error("link.failed %s", " ".join(str(error).split()))
        return 2
    with link:
        logger.info("link.listening %s to %s: %s", link.address, target, link.config)
        while not stop.wait(COUNTS_EVERY_S):
            if args.counts:
                _append_counts(args.counts, link.traffic)
    return 0


def _append_counts(path: Path, traffic: Traffic) -> None:
    line = {"time_unix_s": time.time(), **dataclasses.asdict(traffic)}
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
