"""A peer's end of the tunnel: it connects to the gateway, reconnects after a loss, and loses no experience.

One thread connects, sends bulk and keeps the session alive. Any thread may call the public methods. A thread that sends
or receives control, weights or an e-stop uses the socket of that channel itself. docs/tunnel.md describes the protocol.

A lost connection keeps chunks (resent after the last acknowledgement), the newest weights that the gateway has not
confirmed (continued at the first missing byte), and queued messages. It drops the messages in
`protocol.DROPPED_ON_DISCONNECT`, which are useless or dangerous when late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Self, TypeAlias

from msgspec.structs import replace

from user_sys.errors import LinkDown, SessionRefused, TunnelError, WireError
from user_sys.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    ChunkAck,
    ChunkRefusal,
    ControlMessage,
    CreditGrant,
    Heartbeat,
    Hello,
    OperatorCommand,
    OperatorReply,
    Preview,
    PreviewAck,
    Refusal,
    WeightsApplied,
    WeightsMessage,
    WeightsReceived,
    Welcome,
)
from user_sys.tunnel.clock import ClockEstimate, ClockEstimator
from user_sys.tunnel.connection import (
    Backoff,
    ChannelReader,
    ChannelSocket,
    ChunkSender,
    ChunkSource,
    Connection,
    ReceivedMessage,
    ZmqContexts,
)
from user_sys.tunnel.endpoint import prefer_unix_socket
from user_sys.tunnel.flow_control import CoalescingQueue, SendQueue
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    DROPPED_ON_DISCONNECT,
    TUNNEL_TRANSITIONS,
    WEIGHTS_TRANSFER,
    AnyMessage,
    Channel,
    Envelope,
    StateMachine,
    TunnelState,
    channel_of,
    coalescing_key,
)
from user_sys.tunnel.session import channel_limits
from user_sys.tunnel.sockets import Wakeup, request_short_time_slice, retain_freed_memory

__all__ = ["TunnelClient", "TunnelState"]

logger = logging.getLogger(__name__)

Received: TypeAlias = ControlMessage | WeightsApplied
CLOSE_TIMEOUT_S = 5.0
CLOSE_LINGER_MS = 500
RECEIVE_BURST = 64
BLOCKED_RETRY_S = 0.002
READER_CHECK_INTERVAL_S = 0.1
FLUSH_POLL_S = 0.002
_NOT_RESENT = (*DROPPED_ON_DISCONNECT, *WEIGHTS_TRANSFER, PreviewAck, WeightsReceived)


class TunnelStatus:
    """State of a client's tunnel, and the reason for it. Any thread may call it.

    Attributes:
        reason: why the tunnel is not open; empty while it is open.
        changed: notified after each transition, and after the outbox is drained.
    """

    def __init__(self, name: str, endpoint: str) -> None:
        self.reason = "not started"
        self.changed = threading.Condition()
        self._name, self._endpoint = name, endpoint
        self._machine = StateMachine(f"the tunnel of {name}", TunnelState.IDLE, TUNNEL_TRANSITIONS)

    @property
    def state(self) -> TunnelState:
        return self._machine.state

    def transition_to(self, state: TunnelState, reason: str = "") -> None:
        """Raises TunnelError if the transition is illegal."""
        with self.changed:
            self._machine.transition_to(state)
            self.reason = reason
            self.changed.notify_all()
        logger.info("tunnel.%s peer=%s endpoint=%s reason=%s", state.value, self._name, self._endpoint, reason)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """Blocks until `predicate` is true or the timeout ends."""
        with self.changed:
            self.changed.wait_for(predicate, timeout_s)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


class ClientChannels:
    """The send queues and inboxes of a client, which outlive its connections. Any thread may call it.

    Args:
        read_available: reads a socket empty into the inboxes; see `ChannelReader`.
    """

    def __init__(
        self, limits: TunnelLimits, status: TunnelStatus, read_available: Callable[[ChannelSocket], None]
    ) -> None:
        bounds = channel_limits(limits)
        self.send_queues = {channel: SendQueue(each) for channel, each in bounds.items()}
        self.readers: dict[Channel, ChannelReader] = {
            channel: ChannelReader(each.window_messages + each.queue_messages, read_available)
            for channel, each in bounds.items()
            if channel is not Channel.EXPERIENCE
        }
        self.counters: Counter[str] = Counter()
        self.wakeup = Wakeup()
        self.previews: CoalescingQueue[Envelope] = CoalescingQueue(limits.experience.queue_messages)
        self._status = status
        self._previews_in_flight: set[tuple[str, str]] = set()  # cameras whose last preview is not acknowledged
        self._open_sockets: Mapping[Channel, ChannelSocket] = {}  # for other threads, while the tunnel is open

    def send(self, envelope: Envelope) -> bool:
        """Sends a message now, or queues it. Returns False if it can do neither."""
        socket = self._open_sockets.get(channel_of(envelope.message))
        if socket is None or not socket.try_send_now(envelope):
            return self.queue(envelope)
        self.read_if_available(socket)
        return True

    def queue(self, envelope: Envelope) -> bool:
        """Queues a message. Returns False if the queue is full.

        Also returns False for a message that is not resent, unless the tunnel is open: a loss drops these messages.
        """
        with self._status.changed:
            if isinstance(envelope.message, _NOT_RESENT) and self._status.state is not TunnelState.OPEN:
                return False
            queued = self.send_queues[channel_of(envelope.message)].put(envelope)
        if not queued:
            self.counters["queue_full"] += 1
            if self.counters["queue_full"] == 1:
                logger.warning("tunnel.queue_full message=%s state=%s", envelope.message, self._status.state.value)
            return False
        self.wakeup.set()
        return True

    def receive(self, channel: Channel, timeout_s: float) -> AnyMessage | None:
        """The next message of control or stop, or None after `timeout_s`."""
        received = self.readers[channel].get(timeout_s)
        if received is None:
            return None
        if received.socket.release(received.charge):
            self.wakeup.set()  # a grant is due
        return received.envelope.message

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """The next message of the weights channel, or None after `timeout_s`."""
        received = self.readers[Channel.WEIGHTS].get(timeout_s)
        if received is None:
            return None
        socket = received.socket
        if socket.release(received.charge):  # sends the due grant and the queued messages
            if socket.flush():
                self.wakeup.set()
            self.read_if_available(socket)
        return received.envelope

    def put_received(self, message: ReceivedMessage, inbox: Channel) -> int:
        """Queues a received message for the application. Returns the part of its charge to release now."""
        return self.readers[inbox].put(message.envelope, message.socket, message.charge)

    def read_if_available(self, socket: ChannelSocket) -> None:
        """Reads messages whose event a use of the socket may have cleared; see `ChannelSocket`."""
        if socket.has_message:
            self.readers[socket.channel].drain(socket)

    def send_preview(self, preview: Preview, jpeg: bytes) -> bool:
        """Queues a picture. Returns False if the camera's last one is not acknowledged or the tunnel is not open."""
        camera = (preview.robot, preview.camera)
        with self._status.changed:
            if camera in self._previews_in_flight:
                return False
            self._previews_in_flight.add(camera)  # before the gateway can acknowledge it
            if not self.queue(Envelope(preview, jpeg)):
                self._previews_in_flight.discard(camera)
                return False
            return True

    def on_preview_ack(self, ack: PreviewAck) -> None:
        self._previews_in_flight.discard((ack.robot, ack.camera))

    @property
    def previews_in_flight(self) -> int:
        """Cameras whose last preview the gateway has not acknowledged."""
        return len(self._previews_in_flight)

    @property
    def is_flushed(self) -> bool:
        return not any(map(len, self.send_queues.values()))

    def reading_channels(self) -> list[Channel]:
        """The channels that other threads read now."""
        return [channel for channel, reader in self.readers.items() if reader.is_reading]

    def attach(self, sockets: Mapping[Channel, ChannelSocket]) -> None:
        """Lets other threads use the sockets of an open session."""
        self._open_sockets = {channel: sockets[channel] for channel in self.readers}
        for channel, reader in self.readers.items():
            reader.attach(sockets[channel])

    def detach(self) -> None:
        """Ends the use of the sockets by other threads."""
        self._open_sockets = {}
        for reader in self.readers.values():
            reader.detach()

    def wait_idle(self) -> None:
        """Blocks until other threads have processed the messages that they read before `detach`."""
        for reader in self.readers.values():
            reader.wait_idle()

    def reset_credit(self) -> None:
        for send_queue in self.send_queues.values():
            send_queue.reset_credit()

    def drop_unsent(self) -> None:
        """Drops the queued messages that a later session must not send."""
        for send_queue in self.send_queues.values():
            send_queue.remove_matching(lambda envelope: isinstance(envelope.message, _NOT_RESENT))
        self._previews_in_flight.clear()

    def scalars(self) -> dict[str, float]:
        scalars = {"inbox_full": float(sum(reader.inbox.rejected for reader in self.readers.values()))}
        for channel, send_queue in self.send_queues.items():
            scalars |= send_queue.metrics.scalars(channel.name.lower())
        return scalars

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.wakeup.close()


class SessionLoop:
    """Runs one session after another until the client stops. One thread calls `run`.

    Args:
        keys, server_key: our key pair, and the gateway's public key.
        hello: the name and role that we claim.
        outbox: the source of chunks, or None.
    """

    def __init__(
        self,
        status: TunnelStatus,
        endpoint: str,
        keys: KeyPair,
        server_key: str,
        hello: Hello,
        limits: TunnelLimits,
        outbox: ChunkSource | None,
    ) -> None:
        self.channels = ClientChannels(limits, status, self._read_available)
        self.clock = ClockEstimator()
        self.chunks: ChunkSender | None = None
        if outbox is not None:
            ack_latency = self.channels.send_queues[Channel.EXPERIENCE].metrics.ack_latency
            self.chunks = ChunkSender(outbox, ack_latency)
        self.stopping = threading.Event()
        self._status, self._endpoint, self._hello, self._limits = status, endpoint, hello, limits
        self._keys, self._server_key = keys, server_key
        self._read_error: SessionRefused | WireError | None = None  # of any thread that reads a socket
        self._last_control_s = 0.0

    def run(self) -> None:
        """Blocks until the client stops or the gateway refuses it."""
        request_short_time_slice()
        retain_freed_memory()
        contexts = ZmqContexts()
        backoff = Backoff(self._limits.backoff_min_s, self._limits.backoff_max_s)
        try:
            while not self.stopping.is_set():
                try:
                    self._run_session(contexts, backoff)
                    return
                except SessionRefused as error:
                    self._status.transition_to(TunnelState.REFUSED, str(error))
                    return
                except (LinkDown, WireError) as error:
                    self._on_lost(str(error))
                except Exception as error:
                    logger.exception("tunnel.failed peer=%s", self._hello.name)
                    self._status.transition_to(TunnelState.REFUSED, f"the tunnel failed: {error}")
                    return
                self.stopping.wait(backoff.next_s())
                if not self.stopping.is_set():
                    self._status.transition_to(TunnelState.CONNECTING, self._status.reason)
        finally:
            contexts.close()

    @property
    def chunks_pending(self) -> int:
        return 0 if self.chunks is None else len(self.chunks.source)

    def fail(self, error: SessionRefused | WireError) -> None:
        """Ends the session with `error`. Any thread may call it."""
        self._read_error = error
        self.channels.wakeup.set()

    def _on_lost(self, reason: str) -> None:
        self._status.transition_to(TunnelState.LOST, reason)
        self.channels.counters["lost"] += 1
        self.channels.drop_unsent()

    def _run_session(self, contexts: ZmqContexts, backoff: Backoff) -> None:
        """Runs one session. Returns when the client stops; otherwise raises the reason for its end."""
        channels = self.channels
        channels.reset_credit()
        self._read_error = None
        endpoint = prefer_unix_socket(self._endpoint, self._server_key)
        connection = Connection(
            contexts, endpoint, self._keys, self._server_key, self._limits, channels.send_queues, channels.wakeup
        )
        opened_s = time.monotonic()
        try:
            self._handshake(connection)
            opened_s = time.monotonic()
            channels.attach(connection.sockets)
            self._status.transition_to(TunnelState.OPEN)
            self._exchange_messages(connection)
        finally:
            if time.monotonic() - opened_s > self._limits.dead_after_s:
                backoff.reset()
            channels.detach()
            connection.close(CLOSE_LINGER_MS if self.stopping.is_set() else 0)
            channels.wait_idle()  # before the next session begins

    def _handshake(self, connection: Connection) -> None:
        deadline = time.monotonic() + self._limits.handshake_s
        for channel, socket in connection.sockets.items():
            socket.send(Envelope(self._hello))
            while not self.stopping.is_set() and not self._is_welcomed(connection, socket):
                if time.monotonic() > deadline:
                    raise LinkDown(f"{connection.endpoint} did not answer within {self._limits.handshake_s:g} s")
                connection.wait(deadline - time.monotonic())
            if channel is Channel.CONTROL:
                socket.flush()  # our grant: the gateway may send before all channels are open

    def _is_welcomed(self, connection: Connection, socket: ChannelSocket) -> bool:
        received = socket.receive()
        if received is not None and isinstance(received[0].message, Welcome):
            self._on_welcome(socket, received[0].message)
            return True
        if received is None and socket.channel is not Channel.CONTROL:
            socket = connection.sockets[Channel.CONTROL]  # a Refusal, or messages that follow the opening
            received = socket.receive()
        if received is not None:
            self._on_message(socket, *received)
        return False

    def _on_welcome(self, socket: ChannelSocket, welcome: Welcome) -> None:
        oldest, newest = self._hello.oldest, self._hello.protocol
        if not oldest <= welcome.protocol <= newest:
            raise SessionRefused(
                f"{self._endpoint} uses protocol version {welcome.protocol}, we support {oldest} to {newest}; install "
                "the same release"
            )
        if socket.channel is Channel.EXPERIENCE and self.chunks is not None:
            self.chunks.resume(welcome.resume_after)
            self._notify_if_drained()

    def _exchange_messages(self, connection: Connection) -> None:
        channels, limits = self.channels, self._limits
        self._last_control_s, next_heartbeat_s = time.monotonic(), 0.0
        while not self.stopping.is_set():
            now = time.monotonic()
            if now >= next_heartbeat_s:
                connection.send_heartbeat(Heartbeat(t_client_ns=time.monotonic_ns()))
                next_heartbeat_s = now + limits.heartbeat_s
            read_elsewhere = channels.reading_channels()
            self._receive(connection, read_elsewhere)
            if self._read_error is not None:
                raise self._read_error
            if now - self._last_control_s > limits.dead_after_s:
                raise LinkDown(f"{connection.endpoint} was silent for {now - self._last_control_s:.1f} s")
            timeout_s = min(self._send(connection), next_heartbeat_s - now)
            for channel in read_elsewhere:
                channels.read_if_available(connection.sockets[channel])
            connection.wait(min(timeout_s, READER_CHECK_INTERVAL_S) if read_elsewhere else timeout_s, read_elsewhere)
        connection.sockets[Channel.CONTROL].flush()  # for example a lease release

    def _receive(self, connection: Connection, read_elsewhere: Collection[Channel]) -> None:
        for channel, socket in connection.sockets.items():
            if channel in read_elsewhere:
                continue
            if channel in self.channels.readers:
                self.channels.readers[channel].drain(socket)
            else:
                self._receive_burst(socket)

    def _receive_burst(self, socket: ChannelSocket) -> None:
        for _ in range(RECEIVE_BURST):
            received = socket.receive()
            if received is None:
                return
            self._on_message(socket, *received)

    def _read_available(self, socket: ChannelSocket) -> None:
        """Reads a socket empty. Any thread calls it; an error ends the session in the client's thread."""
        try:
            while (received := socket.receive()) is not None:
                if socket.channel is Channel.CONTROL:
                    self._last_control_s = time.monotonic()
                self._on_message(socket, *received)
        except (SessionRefused, WireError) as error:
            self.fail(error)

    def _on_message(self, socket: ChannelSocket, envelope: Envelope, charge: int) -> None:
        """Raises SessionRefused for a refusal, and WireError for a message that is not valid now."""
        match envelope.message:
            case CreditGrant():
                self.channels.wakeup.set()
            case Refusal() as refusal:
                raise SessionRefused(f"{self._endpoint} refused us: {refusal.reason}")
            case Heartbeat() as echo:
                if socket.channel is Channel.CONTROL:
                    self.clock.add(echo, time.monotonic_ns())
            case ChunkAck() | ChunkRefusal() as reply if self.chunks is not None:
                self.chunks.on_reply(reply)
                self._notify_if_drained()
            case PreviewAck() as ack:
                self.channels.on_preview_ack(ack)
            case Preview():
                self.channels.previews.put(envelope, coalescing_key(envelope.message))
            case Hello() | Welcome() | ChunkAck() | ChunkRefusal():
                raise WireError(f"{self._endpoint} sent an unexpected {type(envelope.message).__name__}")
            case message:
                inbox = Channel.CONTROL if isinstance(message, WeightsApplied) else socket.channel
                charge = self.channels.put_received(ReceivedMessage(envelope, socket, charge), inbox)
        socket.release(charge)

    def _notify_if_drained(self) -> None:
        if not self.chunks_pending:
            self._status.notify()

    def _send(self, connection: Connection) -> float:
        """Sends queued messages: control, then weights, then experience. Returns the seconds until the next attempt."""
        experience = connection.sockets[Channel.EXPERIENCE]
        blocked = connection.flush()
        if self.chunks is not None and not len(experience.send_queue):
            blocked |= self.chunks.send_pending(experience)
        if blocked:
            return BLOCKED_RETRY_S
        return min(send_queue.bandwidth_wait_s() for send_queue in self.channels.send_queues.values())


class TunnelClient:
    """Keeps a session with the gateway at `endpoint` from `start` to `close`.

    Args:
        keys, server_public_key: our key pair, and the only gateway key that we accept.
        hello: the name and role that we claim; the gateway checks them against our key.
        outbox: the source of a robot's chunks, or None.
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
        oldest = hello.oldest or (OLDEST_PROTOCOL if hello.protocol == PROTOCOL_VERSION else hello.protocol)
        self.hello = replace(hello, oldest=oldest, stream="" if outbox is None else outbox.stream)
        self.status = TunnelStatus(hello.name, endpoint)
        self.loop = SessionLoop(
            self.status, endpoint, keys, server_public_key, self.hello, limits or TunnelLimits(), outbox
        )
        self.channels = self.loop.channels
        self.counters = self.channels.counters
        self._outbox = outbox
        self._thread: threading.Thread | None = None

    # Life cycle

    def start(self) -> None:
        """Begins to connect; does not block."""
        if self._thread is not None or self.state is TunnelState.CLOSED:
            raise TunnelError("this client was started or closed before; create a new one")
        self.status.transition_to(TunnelState.CONNECTING, "connecting")
        if self._outbox is not None:
            self._outbox.set_on_append(self.channels.wakeup.set)
        self._thread = threading.Thread(target=self.loop.run, name=f"tunnel-{self.hello.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends queued control messages that libzmq accepts at once, and closes the connections.

        The outbox keeps its chunks. Blocks for at most `CLOSE_TIMEOUT_S`; repeated calls have no effect.
        """
        self.loop.stopping.set()
        if self.state is TunnelState.CLOSED:
            return
        if self._thread is not None:
            self._join(self._thread)
        self.status.transition_to(TunnelState.CLOSED, "closed here")
        self.channels.close()

    def _join(self, thread: threading.Thread) -> None:
        if self._outbox is not None:
            self._outbox.set_on_append(None)
        self.channels.wakeup.set()
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
        return self.status.state

    @property
    def reason(self) -> str:
        """Why the tunnel is not open, in a sentence; empty while it is open."""
        return self.status.reason

    @property
    def clock(self) -> ClockEstimate | None:
        """Round trip and offset to the gateway's clock now; None before the first heartbeat echo."""
        return self.loop.clock.estimate(time.monotonic_ns())

    def scalars(self) -> dict[str, float]:
        """Metrics: counters and latencies of each channel, the clock, and the number of lost sessions."""
        scalars = {"lost": float(self.counters["lost"]), "open": float(self.state is TunnelState.OPEN)}
        scalars |= self.channels.scalars()
        clock = self.clock
        if clock is not None:
            scalars |= {"round_trip_ms": clock.rtt_ns / 1e6, "clock_drift_ppm": clock.drift_ppm}
        return scalars

    @property
    def chunks_pending(self) -> int:
        """Chunks in the outbox that the gateway has not acknowledged."""
        return self.loop.chunks_pending

    def drain(self, timeout_s: float) -> int:
        """Blocks until the gateway has every chunk or `timeout_s` ends. Returns the number of chunks that it lacks."""
        final = (TunnelState.REFUSED, TunnelState.CLOSED)
        self.status.wait_for(lambda: not self.chunks_pending or self.state in final, timeout_s)
        return self.chunks_pending

    def wait_open(self, timeout_s: float) -> None:
        """Blocks until the tunnel is open.

        Raises:
            SessionRefused: the gateway refuses us for good, or the client was closed.
            LinkDown: not open within `timeout_s`; the client keeps trying.
        """
        final = (TunnelState.OPEN, TunnelState.REFUSED, TunnelState.CLOSED)
        with self.status.changed:
            self.status.wait_for(lambda: self.state in final, timeout_s)
            if self.state is TunnelState.OPEN:
                return
            if self.state in final:
                raise SessionRefused(self.reason)
            raise LinkDown(f"no tunnel to {self.endpoint} after {timeout_s:g} s: {self.reason}")

    # Messages

    def send(self, message: ControlMessage | WeightsApplied) -> bool:
        """Sends a message now, or queues it; never blocks.

        A state message replaces its queued predecessor (`protocol.coalescing_key`). Returns False if the queue is full,
        or if the tunnel is not open and the message would be useless when late.
        """
        envelope = Envelope(message)
        if channel_of(message) is Channel.WEIGHTS:  # queued, so that a control loop never reads weights here
            return self.channels.queue(envelope)
        return self.channels.send(envelope)

    def receive(self, timeout_s: float) -> Received | None:
        """The next message from the gateway, or None after `timeout_s`."""
        return self.channels.receive(Channel.CONTROL, timeout_s)  # type: ignore[return-value]

    def receive_stop(self, timeout_s: float) -> OperatorCommand | OperatorReply | None:
        """The next e-stop at a robot, or its confirmation at a console; None after `timeout_s`."""
        return self.channels.receive(Channel.STOP, timeout_s)  # type: ignore[return-value]

    def send_weights(self, message: WeightsMessage, payload: bytes | memoryview | None = None) -> bool:
        """Sends a message of the weights channel now, or queues it; never blocks.

        Returns False if the queue is full or the tunnel is not open.
        """
        return self.channels.send(Envelope(message, payload))

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """The next message of the weights channel, or None after `timeout_s`."""
        return self.channels.receive_weights(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Blocks until libzmq has all queued messages. Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.channels.is_flushed:
                return True
            self.loop.stopping.wait(FLUSH_POLL_S)
        return False

    def send_preview(self, preview: Preview, jpeg: bytes) -> bool:
        """Sends a picture. Returns False if the camera's last one is not acknowledged or the tunnel is not open."""
        return self.channels.send_preview(preview, jpeg)

    def receive_preview(self, timeout_s: float) -> tuple[Preview, bytes | memoryview] | None:
        """A console's next picture, or None after `timeout_s`. The camera's next one follows."""
        envelope = self.channels.previews.get(timeout_s)
        if envelope is None or not isinstance(envelope.message, Preview) or envelope.payload is None:
            return None
        self.channels.queue(Envelope(PreviewAck(robot=envelope.message.robot, camera=envelope.message.camera)))
        return envelope.message, envelope.payload
