"""How bytes travel over an emulated link: one direction that all connections share, and one connection's part of it.

Everything here runs on one asyncio loop, that of `sim.link`.
"""

from __future__ import annotations

import asyncio
import random
import socket

from sim.link_config import LinkBreak

PACKET_BYTES = 1460  # what a TCP segment carries over Ethernet
MAX_READ_BYTES = 64 << 10
READ_S = 1e-3  # a read takes no more than this on the line, so that connections take turns
WINDOW_BYTES = 4 << 20  # of one connection and direction on the way at once, as a TCP window bounds it
QUEUE_S = 0.02  # what waits for the line at most before senders are held back, as in a router's queue


class Broken(ConnectionResetError):
    """A connection has met its `LinkBreak`."""

    def __init__(self, cause: LinkBreak) -> None:
        super().__init__(f"broken at byte {cause.at_byte} {cause.way}")
        self.how = cause.how


class Way:
    """One direction of a link: a line of some bandwidth on which bytes queue, and a delay after it.

    Attributes:
        open: cleared while a partition lasts; what is on the way then waits.
        carried_bytes: delivered so far.
    """

    def __init__(
        self, mbit_s: float, delay_s: float, jitter_s: float, loss: float, stall_s: float, rng: random.Random
    ) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.carried_bytes = 0
        self.delay_s = delay_s
        self._bytes_s = mbit_s * 1e6 / 8
        self._jitter_s, self._loss, self._stall_s, self._random = jitter_s, loss, stall_s, rng
        self._free_s = 0.0
        at_once = int(self._bytes_s * READ_S) or MAX_READ_BYTES
        self.read_bytes = min(MAX_READ_BYTES, max(PACKET_BYTES, at_once))

    async def admit(self) -> None:
        """Returns when the link is whole and the line's queue has room."""
        while True:
            await self.open.wait()
            over_s = self._free_s - QUEUE_S - _now()
            if over_s <= 0:
                return
            await asyncio.sleep(over_s)

    def arrival(self, size: int) -> float:
        """Takes the line for `size` bytes, behind what waits already; when they arrive, on the loop's clock."""
        self._free_s = max(self._free_s, _now()) + (size / self._bytes_s if self._bytes_s else 0.0)
        packets = -(-size // PACKET_BYTES)
        lost = self._loss > 0 and self._random.random() < 1 - (1 - self._loss) ** packets
        late_s = self._jitter_s * self._random.random() + self._stall_s * lost
        return self._free_s + self.delay_s + late_s

    async def until(self, due_s: float) -> None:
        """Returns at `due_s`, or when the partition that lasts then is over."""
        if (wait_s := due_s - _now()) > 0:
            await asyncio.sleep(wait_s)
        await self.open.wait()


class Pipe:
    """One direction of one connection: reads from `source`, delivers to `sink` in order, unchanged, and in time.

    Run `read` and `write` side by side. Either raises ConnectionResetError, once the other end may know, when an end
    has reset the connection, and `write` raises `Broken` at `broken`. Both return after the end of the stream.
    """

    def __init__(
        self, way: Way, back: Way, source: socket.socket, sink: socket.socket, broken: LinkBreak | None
    ) -> None:
        self._way, self._back, self._source, self._sink, self._broken = way, back, source, sink, broken
        self._queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._held_bytes = 0
        self._left_bytes = broken.at_byte if broken else 0
        self._due_s = 0.0

    def meet_break(self) -> None:
        """Raises `Broken` when as many bytes have passed as may, unless the connection only falls mute."""
        if self._broken is not None and self._left_bytes == 0 and self._broken.how != "mute":
            raise Broken(self._broken)

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        received: bytes | None = b"-"
        while received:
            await self._way.admit()
            await self._room.wait()
            try:
                received = await loop.sock_recv(self._source, self._way.read_bytes)
            except OSError:
                received = None  # a reset travels like bytes
            self._held_bytes += len(received or b"")
            if self._held_bytes >= WINDOW_BYTES:
                self._room.clear()
            self._due_s = max(self._due_s, self._way.arrival(len(received or b"")))
            self._queue.put_nowait((self._due_s, received))

    async def write(self) -> None:
        while True:
            self.meet_break()
            due_s, content = await self._queue.get()
            await self._way.until(due_s)
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
            await self._back.until(_now() + self._back.delay_s)
            raise ConnectionResetError from None
        self._way.carried_bytes += len(passing)


def _now() -> float:
    return asyncio.get_running_loop().time()
