"""One robot's way through a relay: a session of its own with the cloud, and the chunks that are on their way."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from user_sys.errors import TunnelError
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal, WeightsApplied
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.session import Peer
from user_sys.tunnel.uplink import PendingChunk
from user_sys.tunnel.wire import AnyMessage, Payload

logger = logging.getLogger(__name__)

LISTEN_S = 0.2


class Downward(Protocol):
    """The relay's own server, as far as a passage needs it. Any thread may call it."""

    def send(self, name: str, message: AnyMessage, payload: Payload | None = None) -> bool:
        """See `TunnelServer.send`."""

    def answer(self, peer: Peer, message: AnyMessage) -> bool:
        """See `TunnelServer.answer`."""

    def release(self, peer: Peer, chunks: int, size_bytes: int) -> None:
        """See `TunnelServer.release`."""


class Transit:
    """A `ChunkSource` in memory: what a robot has sent and the cloud has not acknowledged yet.

    It holds no more than the robot's window lets through, and nothing is lost with it: the robot keeps every chunk in
    its own outbox until the acknowledgement, which comes from the cloud's disk, has reached it. Any thread may call it.
    """

    def __init__(self, peer: Peer, stream: str, server: Downward) -> None:
        self.stream = stream
        self._peer, self._server = peer, server
        self._lock = threading.Lock()
        self._chunks: deque[PendingChunk] = deque()
        self._appended: Callable[[], None] | None = None

    def offer(self, offer: ChunkOffer, packet: Payload) -> None:
        """Takes a chunk over from the robot; never blocks."""
        with self._lock:
            self._chunks.append(PendingChunk(offer.sequence, offer.episode, offer.index, packet))
            appended = self._appended
        if appended is not None:
            appended()

    def __len__(self) -> int:
        return len(self._chunks)

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        while (chunk := self._next(after_sequence)) is not None:
            yield chunk
            after_sequence = chunk.sequence

    def _next(self, after_sequence: int) -> PendingChunk | None:
        with self._lock:
            return next((chunk for chunk in self._chunks if chunk.sequence > after_sequence), None)

    def acknowledge(self, sequence: int) -> None:
        """The cloud has them on its disk: the robot is told, and may send as much again."""
        with self._lock:
            done = [chunk for chunk in self._chunks if chunk.sequence <= sequence]
            for _ in done:
                self._chunks.popleft()
        if done:
            self._server.release(self._peer, len(done), sum(len(chunk.packet) for chunk in done))
            self._server.answer(self._peer, ChunkAck(sequence=done[-1].sequence))

    def set_aside(self, sequence: int, reason: str) -> None:
        self._server.answer(self._peer, ChunkRefusal(sequence=sequence, reason=reason))

    def listen(self, appended: Callable[[], None] | None) -> None:
        with self._lock:
            self._appended = appended


class Passage:
    """Speaks upstream for one robot from its session's start here to its end. Any thread may call it."""

    def __init__(self, client: TunnelClient, transit: Transit, server: Downward, before: Passage | None) -> None:
        """`before` is the robot's former passage: this one dials when that one has hung up."""
        self.client, self.transit = client, transit
        self._server, self._before = server, before
        self._acts: WeightsApplied | None = None
        self._over = threading.Event()
        name = client.hello.name
        self._thread = threading.Thread(target=self._run, name=f"passage-{name}", daemon=True)
        self._stops = threading.Thread(target=self._pass_stops, name=f"e-stop-{name}", daemon=True)

    @property
    def refused(self) -> str:
        """Why the cloud will not have this robot; empty while it may yet, or does."""
        return self.client.reason if self.client.state is TunnelState.REFUSED else ""

    def acts(self, message: WeightsApplied) -> None:
        """Passes on with which version the robot acts; again whenever the session upstream has begun anew."""
        self._acts = message
        self.client.send(message)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Has the session upstream end soon; does not wait for that."""
        self._over.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._before is not None:
                self._before.join(2 * LISTEN_S + 5.0)
                self._before = None
            lost = 0
            with self.client:
                self._stops.start()
                while not self._over.is_set():
                    message = self.client.receive(LISTEN_S)
                    if self.client.state is TunnelState.OPEN and self.client.counters["lost"] != lost:
                        lost = self.client.counters["lost"]
                        self._say_again()
                    if message is not None:
                        self._server.send(self.client.hello.name, message)
        except TunnelError as error:
            logger.error("passage.failed robot=%s: %s", self.client.hello.name, error)

    def _pass_stops(self) -> None:
        """E-stops wait for nothing else that comes down."""
        while not self._over.is_set():
            message = self.client.receive_stop(LISTEN_S)
            if message is not None:
                self._server.send(self.client.hello.name, message)

    def _say_again(self) -> None:
        if self._acts is not None:
            self.client.send(self._acts)
