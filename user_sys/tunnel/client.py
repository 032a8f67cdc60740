"""A peer's end of the tunnel: dials out, comes back by itself, and loses no experience.

One thread owns the sockets; the public methods queue, take, or wait with a deadline, and may be called from any thread.

States::

    CONNECTING --Welcome on all channels--> OPEN --silence or a broken connection--> LOST --backoff--> CONNECTING
    CONNECTING --no answer--> LOST
    CONNECTING or OPEN --Refusal, or a key that is not allowed--> REFUSED
    any --close--> CLOSED

What survives a lost connection: chunks (resent from the outbox after the last acknowledgement), the newest weights that
the gateway has not confirmed, and queued messages, except those in `wire.PERISHABLE`, which would be dangerous or
worthless later.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self, TypeAlias

import zmq

from user_sys.errors import LinkDown, Refused, TunnelError, WireError
from user_sys.messages import (
    ChunkAck,
    ChunkRefusal,
    ControlMessage,
    Heartbeat,
    Hello,
    Preview,
    PreviewAck,
    Refusal,
    WeightsApplied,
    WeightsManifest,
    WeightsReceived,
    Welcome,
)
from user_sys.tunnel.clock import ClockEstimate, ClockEstimator
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.link import IO_THREADS, Link
from user_sys.tunnel.mailbox import Mailbox
from user_sys.tunnel.uplink import ChunkSource, ChunkUplink
from user_sys.tunnel.wire import (
    PERISHABLE,
    Channel,
    Envelope,
    TunnelLimits,
    Wakeup,
    channel_of,
    coalescing_key,
)

logger = logging.getLogger(__name__)

Received: TypeAlias = ControlMessage | WeightsApplied
CLOSE_TIMEOUT_S = 5.0
FAREWELL_MS = 500
RECEIVE_BURST = 64
BLOCKED_RETRY_S = 0.002


class TunnelState(enum.Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    LOST = "lost"
    REFUSED = "refused"
    CLOSED = "closed"


_NEXT: dict[TunnelState, frozenset[TunnelState]] = {
    TunnelState.CONNECTING: frozenset({TunnelState.OPEN, TunnelState.LOST, TunnelState.REFUSED, TunnelState.CLOSED}),
    TunnelState.OPEN: frozenset({TunnelState.LOST, TunnelState.REFUSED, TunnelState.CLOSED}),
    TunnelState.LOST: frozenset({TunnelState.CONNECTING, TunnelState.CLOSED}),
    TunnelState.REFUSED: frozenset({TunnelState.CLOSED}),
    TunnelState.CLOSED: frozenset(),
}


class TunnelClient:
    """One session after another with the gateway at `endpoint`, from `start` to `close`.

    Args:
        keys, server_public_key: who we are, and whom alone we talk to.
        hello: what we claim; the gateway checks it against our key.
        outbox: where a robot's chunks come from; None where there are none.
    """

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair,
        server_public_key: str,
        hello: Hello,
        *,
        outbox: ChunkSource | None = None,
        limits: TunnelLimits | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.hello = hello
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._server_key = server_public_key
        self._limits = limits or TunnelLimits()
        self._uplink = None if outbox is None else ChunkUplink(outbox, self._limits)
        self._outgoing: dict[Channel, Mailbox[Envelope]] = {c: Mailbox(self._limits.queue_messages) for c in Channel}
        self._inbox: Mailbox[Received] = Mailbox(self._limits.queue_messages)
        self._previews: Mailbox[Envelope] = Mailbox(self._limits.queue_messages)
        self._weights: Mailbox[Envelope] = Mailbox(1)
        self._publication = _Publication()
        self._shown: set[tuple[str, str]] = set()  # cameras whose last preview the gateway has not acknowledged
        self._clock = ClockEstimator()
        self._condition = threading.Condition()
        self._state = TunnelState.CONNECTING
        self._reason = "not started"
        self._stopping = threading.Event()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None

    # Life cycle

    def start(self) -> None:
        """Begins to connect and returns at once."""
        if self._thread is not None or self._state is TunnelState.CLOSED:
            raise TunnelError("this client was started or closed before")
        self._thread = threading.Thread(target=self._run, name=f"tunnel-{self.hello.name}", daemon=True)
        self._thread.start()
        if self._uplink is not None:
            self._uplink.source.listen(self._wakeup.set)

    def close(self) -> None:
        """Sends the control messages that wait, if that can be done at once, and closes the connections.

        What is in the outbox stays. Blocks for `CLOSE_TIMEOUT_S` at most; calling it twice is harmless.
        """
        self._stopping.set()
        if self._state is TunnelState.CLOSED:
            return
        if self._thread is not None:
            self._join(self._thread)
        self._enter(TunnelState.CLOSED, "closed here")
        self._wakeup.close()

    def _join(self, thread: threading.Thread) -> None:
        if self._uplink is not None:
            self._uplink.source.listen(None)
        self._wakeup.set()
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            raise TunnelError(f"the tunnel's thread did not end within {CLOSE_TIMEOUT_S} s")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def state(self) -> TunnelState:
        return self._state

    @property
    def reason(self) -> str:
        """Why the tunnel is not open, in a sentence; empty while it is."""
        return self._reason

    @property
    def clock(self) -> ClockEstimate | None:
        """Round trip and offset to the gateway's clock; None before the first heartbeat came back."""
        return self._clock.estimate

    @property
    def chunks_pending(self) -> int:
        """Chunks in the outbox that the gateway has not acknowledged."""
        return 0 if self._uplink is None else len(self._uplink.source)

    def drain(self, timeout_s: float) -> int:
        """Blocks until the gateway has every chunk, or `timeout_s` is over; returns how many it has not."""
        with self._condition:
            over = (TunnelState.REFUSED, TunnelState.CLOSED)
            self._condition.wait_for(lambda: not self.chunks_pending or self._state in over, timeout_s)
            return self.chunks_pending

    def wait_open(self, timeout_s: float) -> None:
        """Blocks until the tunnel is open.

        Raises:
            Refused: the gateway refuses us for good, or the client was closed.
            LinkDown: not open within `timeout_s`; the client goes on trying.
        """
        over = (TunnelState.OPEN, TunnelState.REFUSED, TunnelState.CLOSED)
        with self._condition:
            self._condition.wait_for(lambda: self._state in over, timeout_s)
            if self._state is TunnelState.OPEN:
                return
            if self._state in over:
                raise Refused(self._reason)
            raise LinkDown(f"no tunnel to {self.endpoint} after {timeout_s:g} s: {self._reason}")

    # Messages

    def send(self, message: ControlMessage | WeightsApplied) -> bool:
        """Queues a message; never blocks. Newest wins for states (`wire.coalescing_key`).

        False when the queue is full, or when the message would be worthless late and the tunnel is not open.
        """
        if isinstance(message, PERISHABLE) and self._state is not TunnelState.OPEN:
            return False
        return self._queue(Envelope(message))

    def receive(self, timeout_s: float) -> Received | None:
        """The next message from the gateway, or None after `timeout_s`."""
        return self._inbox.wait(timeout_s)

    def publish_weights(self, manifest: WeightsManifest, payload: bytes) -> None:
        """Offers a version; replaces one that is still waiting. Kept until the gateway has it on disk."""
        self._publication.offer(Envelope(manifest, payload))
        self._wakeup.set()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all messages are on their way and the gateway has the newest weights; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._publication.settled and not any(map(len, self._outgoing.values())):
                return True
            self._stopping.wait(BLOCKED_RETRY_S)
        return False

    def take_weights(self) -> tuple[WeightsManifest, bytes | memoryview] | None:
        """The newest version that has arrived since the last call, or None. Taking it lets the next one come.

        Size and digest are the caller's to verify.
        """
        envelope = self._weights.take()
        if envelope is None or not isinstance(envelope.message, WeightsManifest) or envelope.payload is None:
            return None
        self._queue(Envelope(WeightsReceived(version=envelope.message.version)))
        return envelope.message, envelope.payload

    def offer_preview(self, preview: Preview, jpeg: bytes) -> bool:
        """Sends a picture; drops it and says False while the camera's last one is under way or the tunnel is down."""
        camera = (preview.robot, preview.camera)
        with self._condition:
            if self._state is not TunnelState.OPEN or camera in self._shown:
                return False
            self._shown.add(camera)
        return self._queue(Envelope(preview, jpeg))

    def take_preview(self, timeout_s: float) -> tuple[Preview, bytes | memoryview] | None:
        """A console's next picture, or None after `timeout_s`. Taking it lets the camera's next one come."""
        envelope = self._previews.wait(timeout_s)
        if envelope is None or not isinstance(envelope.message, Preview) or envelope.payload is None:
            return None
        self._queue(Envelope(PreviewAck(robot=envelope.message.robot, camera=envelope.message.camera)))
        return envelope.message, envelope.payload

    def _queue(self, envelope: Envelope) -> bool:
        queue = self._outgoing[channel_of(envelope.message)]
        if not queue.put(envelope, coalescing_key(envelope.message)):
            self.counters["queue_full"] += 1
            if self.counters["queue_full"] == 1:
                logger.warning("tunnel.queue_full capacity=%d state=%s", queue.capacity, self._state.value)
            return False
        self._wakeup.set()
        return True

    # The thread

    def _enter(self, state: TunnelState, reason: str = "") -> None:
        with self._condition:
            if state not in _NEXT[self._state]:
                raise TunnelError(f"a tunnel cannot go from {self._state.value} to {state.value}")
            self._state, self._reason = state, reason
            self._condition.notify_all()
        logger.info("tunnel.%s peer=%s endpoint=%s reason=%s", state.value, self.hello.name, self.endpoint, reason)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        backoff_s = self._limits.backoff_min_s
        try:
            while not self._stopping.is_set():
                try:
                    self._session(context)
                    return
                except Refused as error:
                    self._enter(TunnelState.REFUSED, str(error))
                    return
                except (LinkDown, WireError) as error:
                    if self._state is TunnelState.OPEN:
                        backoff_s = self._limits.backoff_min_s
                    self._lose(str(error))
                except Exception as error:
                    logger.exception("tunnel.failed peer=%s", self.hello.name)
                    self._enter(TunnelState.REFUSED, f"the tunnel broke down: {error}")
                    return
                self._stopping.wait(backoff_s * random.uniform(0.5, 1.5))
                backoff_s = min(2 * backoff_s, self._limits.backoff_max_s)
                if not self._stopping.is_set():
                    self._enter(TunnelState.CONNECTING, self._reason)
        finally:
            context.term()

    def _lose(self, reason: str) -> None:
        self._enter(TunnelState.LOST, reason)
        self.counters["lost"] += 1
        for queue in self._outgoing.values():
            queue.drop(lambda envelope: isinstance(envelope.message, (*PERISHABLE, PreviewAck, WeightsReceived)))
        self._shown.clear()
        self._publication.rewind()
        if self._uplink is not None:
            self._uplink.rewind()

    def _session(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """One session from dialling to its end. Returns when the client is closed; raises how it ended otherwise."""
        link = Link(context, self.endpoint, self._keys, self._server_key, self._limits, self._wakeup)
        try:
            self._handshake(link)
            self._enter(TunnelState.OPEN)
            self._converse(link)
        finally:
            link.close(FAREWELL_MS if self._stopping.is_set() else 0)

    def _handshake(self, link: Link) -> None:
        deadline = time.monotonic() + self._limits.handshake_s
        for channel in Channel:
            link.send(channel, Envelope(self.hello))
            while not self._stopping.is_set() and not self._welcomed(link, channel):
                if time.monotonic() > deadline:
                    raise LinkDown(f"{self.endpoint} did not answer within {self._limits.handshake_s:g} s")
                link.wait(deadline - time.monotonic())

    def _welcomed(self, link: Link, channel: Channel) -> bool:
        envelope = link.receive(channel)
        if envelope is not None and isinstance(envelope.message, Welcome):
            return True
        if envelope is None and channel is not Channel.CONTROL:
            envelope = link.receive(Channel.CONTROL)  # a Refusal, or what the gateway sends as soon as all are open
        if envelope is not None:
            self._take_in(envelope)
        return False

    def _converse(self, link: Link) -> None:
        heard_s, next_heartbeat_s = time.monotonic(), 0.0
        ready: frozenset[Channel] = frozenset(Channel)
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= next_heartbeat_s:
                self._queue(Envelope(Heartbeat(t_client_ns=time.monotonic_ns())))
                next_heartbeat_s = now + self._limits.heartbeat_s
            for channel in Channel:
                if channel in ready and self._receive(link, channel) and channel is Channel.CONTROL:
                    heard_s = now
            if now - heard_s > self._limits.dead_after_s:
                raise LinkDown(f"{self.endpoint} was silent for {now - heard_s:.1f} s")
            blocked = self._send(link)
            ready = link.wait(BLOCKED_RETRY_S if blocked else next_heartbeat_s - time.monotonic())
        self._drain(link, Channel.CONTROL)  # a release of the lease, for instance

    def _receive(self, link: Link, channel: Channel) -> bool:
        """Takes in what has arrived on a channel; True where that was anything."""
        for count in range(RECEIVE_BURST):
            envelope = link.receive(channel)
            if envelope is None:
                return count > 0
            self._take_in(envelope)
        return True

    def _take_in(self, envelope: Envelope) -> None:
        match envelope.message:
            case Refusal() as refusal:
                raise Refused(f"{self.endpoint} refused us: {refusal.reason}")
            case Heartbeat() as echo:
                self._clock.add(echo, time.monotonic_ns())
            case ChunkAck() | ChunkRefusal() as answer if self._uplink is not None:
                self._uplink.settle(answer)
                if not self.chunks_pending:
                    with self._condition:
                        self._condition.notify_all()
            case PreviewAck() as ack:
                self._shown.discard((ack.robot, ack.camera))
            case Preview():
                self._previews.put(envelope, coalescing_key(envelope.message))
            case WeightsManifest():
                self._weights.put(envelope, WeightsManifest)
            case WeightsReceived() as received:
                self._publication.confirm(received.version)
            case Hello() | Welcome() | ChunkAck() | ChunkRefusal():
                raise WireError(f"{self.endpoint} sent {type(envelope.message).__name__} out of turn")
            case other if not self._inbox.put(other, coalescing_key(other)):  # type: ignore[arg-type]
                self.counters["inbox_full"] += 1

    def _send(self, link: Link) -> bool:
        """Sends what waits: control, then weights, then experience; True when a pipe is full."""
        if self._drain(link, Channel.CONTROL):
            return True
        publication = self._publication.due()
        if publication is not None and link.send(Channel.WEIGHTS, publication):
            self._publication.sent(publication)
        blocked = self._drain(link, Channel.WEIGHTS) | self._drain(link, Channel.EXPERIENCE)
        if self._uplink is None:
            return blocked
        return blocked | self._uplink.pump(lambda envelope: link.send(Channel.EXPERIENCE, envelope))

    def _drain(self, link: Link, channel: Channel) -> bool:
        queue = self._outgoing[channel]
        while (envelope := queue.peek()) is not None:
            if not link.send(channel, envelope):
                return True
            queue.discard(envelope)
        return False


class _Publication:
    """The newest weights that the gateway does not have yet: one version under way, at most one waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Envelope | None = None
        self._under_way: Envelope | None = None

    def offer(self, envelope: Envelope) -> None:
        with self._lock:
            self._newest = envelope

    def due(self) -> Envelope | None:
        """What to send now: nothing while a version is under way."""
        with self._lock:
            return self._newest if self._under_way is None else None

    def sent(self, envelope: Envelope) -> None:
        with self._lock:
            self._under_way = envelope

    def confirm(self, version: int) -> None:
        with self._lock:
            if self._under_way is not None and _version(self._under_way) == version:
                if self._newest is self._under_way:
                    self._newest = None
                self._under_way = None

    @property
    def settled(self) -> bool:
        """The gateway has all that was offered."""
        with self._lock:
            return self._newest is None and self._under_way is None

    def rewind(self) -> None:
        """The connection is gone, and with it what was under way."""
        with self._lock:
            self._under_way = None


def _version(envelope: Envelope) -> int:
    return envelope.message.version if isinstance(envelope.message, WeightsManifest) else -1
