"""A peer's end of the tunnel: dials out, comes back by itself, and loses no experience.

One thread dials, moves bulk and keeps the connections alive; the public methods may be called from any thread. A thread
that sends control, weights or an e-stop, or waits for one, uses its connection itself. docs/tunnel.md has the protocol.

What survives a lost connection: chunks (resent from the outbox after the last acknowledgement), the newest weights that
the gateway has not confirmed (from the byte on that it lacks), and queued messages, except those in `wire.PERISHABLE`,
which would be dangerous or worthless later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
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
        ours = hello.protocol == PROTOCOL_VERSION
        self.hello = replace(
            hello,
            oldest=hello.oldest or (OLDEST_PROTOCOL if ours else hello.protocol),
            stream="" if outbox is None else outbox.stream,
        )
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._server_key = server_public_key
        self._limits = limits = limits or TunnelLimits()
        bounds = channel_limits(limits)
        self._outlets = {channel: SendQueue(each) for channel, each in bounds.items()}
        self._uplink = (
            None if outbox is None else ChunkSender(outbox, self._outlets[Channel.EXPERIENCE].metrics.ack_latency)
        )
        self._readers: dict[Channel, ChannelReader] = {
            channel: ChannelReader(each.window_messages + each.queue_messages, self._take_in_all)
            for channel, each in bounds.items()
            if channel is not Channel.EXPERIENCE
        }
        self._previews: CoalescingQueue[Envelope] = CoalescingQueue(limits.experience.queue_messages)
        self._shown: set[tuple[str, str]] = set()  # cameras whose last preview the gateway has not acknowledged
        self._clock = ClockEstimator()
        self._condition = threading.Condition()
        self._machine = StateMachine(f"the tunnel of {hello.name}", TunnelState.IDLE, TUNNEL_TRANSITIONS)
        self._reason = "not started"
        self._verdict: SessionRefused | WireError | None = None  # found by whichever thread was reading
        self._lines: Mapping[Channel, ChannelSocket] = {}  # those that other threads may use, while the tunnel is open
        self._heard_s = 0.0
        self._stopping = threading.Event()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None

    # Life cycle

    def start(self) -> None:
        """Begins to connect and returns at once."""
        if self._thread is not None or self.state is TunnelState.CLOSED:
            raise TunnelError("this client was started or closed before")
        self._enter(TunnelState.CONNECTING, "connecting")
        if self._uplink is not None:
            self._uplink.source.set_on_append(self._wakeup.set)
        self._thread = threading.Thread(target=self._run, name=f"tunnel-{self.hello.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the control messages that wait, if that can be done at once, and closes the connections.

        What is in the outbox stays. Blocks for `CLOSE_TIMEOUT_S` at most; calling it twice is harmless.
        """
        self._stopping.set()
        if self.state is TunnelState.CLOSED:
            return
        if self._thread is not None:
            self._join(self._thread)
        self._enter(TunnelState.CLOSED, "closed here")
        for reader in self._readers.values():
            reader.close()
        self._wakeup.close()

    def _join(self, thread: threading.Thread) -> None:
        if self._uplink is not None:
            self._uplink.source.set_on_append(None)
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
        return self._machine.state

    @property
    def reason(self) -> str:
        """Why the tunnel is not open, in a sentence; empty while it is."""
        return self._reason

    @property
    def clock(self) -> ClockEstimate | None:
        """Round trip and offset to the gateway's clock now; None before the first heartbeat came back."""
        return self._clock.estimate(time.monotonic_ns())

    def scalars(self) -> dict[str, float]:
        """Counters and latencies of each channel, the clock, and how often the link was lost, for metrics."""
        found = {"lost": float(self.counters["lost"]), "open": float(self.state is TunnelState.OPEN)}
        found["inbox_full"] = float(sum(reader.inbox.rejected for reader in self._readers.values()))
        for channel, outlet in self._outlets.items():
            found |= outlet.metrics.scalars(channel.name.lower())
        clock = self.clock
        if clock is not None:
            found |= {"round_trip_ms": clock.rtt_ns / 1e6, "clock_drift_ppm": clock.drift_ppm}
        return found

    @property
    def chunks_pending(self) -> int:
        """Chunks in the outbox that the gateway has not acknowledged."""
        return 0 if self._uplink is None else len(self._uplink.source)

    def drain(self, timeout_s: float) -> int:
        """Blocks until the gateway has every chunk, or `timeout_s` is over; returns how many it has not."""
        with self._condition:
            over = (TunnelState.REFUSED, TunnelState.CLOSED)
            self._condition.wait_for(lambda: not self.chunks_pending or self.state in over, timeout_s)
            return self.chunks_pending

    def wait_open(self, timeout_s: float) -> None:
        """Blocks until the tunnel is open.

        Raises:
            Refused: the gateway refuses us for good, or the client was closed.
            LinkDown: not open within `timeout_s`; the client goes on trying.
        """
        over = (TunnelState.OPEN, TunnelState.REFUSED, TunnelState.CLOSED)
        with self._condition:
            self._condition.wait_for(lambda: self.state in over, timeout_s)
            if self.state is TunnelState.OPEN:
                return
            if self.state in over:
                raise SessionRefused(self._reason)
            raise LinkDown(f"no tunnel to {self.endpoint} after {timeout_s:g} s: {self._reason}")

    # Messages

    def send(self, message: ControlMessage | WeightsApplied) -> bool:
        """Sends a message now, or queues it; never blocks. Newest wins for states (`wire.coalescing_key`).

        False when the queue is full, or when the message would be worthless late and the tunnel is not open.
        """
        envelope = Envelope(message)
        if channel_of(message) is Channel.WEIGHTS:  # a control loop that tells its version is to read no weights
            return self._queue(envelope)
        return self._say(envelope)

    def receive(self, timeout_s: float) -> Received | None:
        """The next message from the gateway, or None after `timeout_s`."""
        return self._receive_from(Channel.CONTROL, timeout_s)  # type: ignore[return-value]

    def receive_stop(self, timeout_s: float) -> OperatorCommand | OperatorReply | None:
        """The next e-stop, at a robot, or confirmation of one, at a console; or None after `timeout_s`."""
        return self._receive_from(Channel.STOP, timeout_s)  # type: ignore[return-value]

    def _receive_from(self, channel: Channel, timeout_s: float) -> AnyMessage | None:
        incoming = self._readers[channel].get(timeout_s)
        if incoming is None:
            return None
        if incoming.socket.release(incoming.charge):
            self._wakeup.set()  # a grant is due
        return incoming.envelope.message

    def send_weights(self, message: WeightsMessage, payload: bytes | memoryview | None = None) -> bool:
        """Sends a message of the weights channel now, or queues it; never blocks.

        False when the queue is full or the tunnel is down.
        """
        return self._say(Envelope(message, payload))

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """The next message of the weights channel, or None after `timeout_s`."""
        incoming = self._readers[Channel.WEIGHTS].get(timeout_s)
        if incoming is None:
            return None
        line = incoming.socket
        if line.release(incoming.charge):  # a grant is due, and is sent with what is queued
            if line.flush():
                self._wakeup.set()
            self._read_if_pending(line)
        return incoming.envelope

    def _say(self, envelope: Envelope) -> bool:
        line = self._lines.get(channel_of(envelope.message))
        if line is None or not line.try_send_now(envelope):
            return self._queue(envelope)
        self._read_if_pending(line)
        return True

    def _read_if_pending(self, line: ChannelSocket) -> None:
        """After a line was used: that may have swallowed the news for which its reader waits."""
        if line.has_message:
            self._readers[line.channel].drain(line)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all messages are on their way and the gateway has the newest weights; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not any(map(len, self._outlets.values())):
                return True
            self._stopping.wait(FLUSH_POLL_S)
        return False

    def send_preview(self, preview: Preview, jpeg: bytes) -> bool:
        """Sends a picture; drops it and says False while the camera's last one is under way or the tunnel is down."""
        camera = (preview.robot, preview.camera)
        with self._condition:
            if camera in self._shown:
                return False
            self._shown.add(camera)  # before the gateway can answer
            if not self._queue(Envelope(preview, jpeg)):
                self._shown.discard(camera)
                return False
            return True

    def receive_preview(self, timeout_s: float) -> tuple[Preview, bytes | memoryview] | None:
        """A console's next picture, or None after `timeout_s`. Taking it lets the camera's next one come."""
        envelope = self._previews.get(timeout_s)
        if envelope is None or not isinstance(envelope.message, Preview) or envelope.payload is None:
            return None
        self._queue(Envelope(PreviewAck(robot=envelope.message.robot, camera=envelope.message.camera)))
        return envelope.message, envelope.payload

    def _queue(self, envelope: Envelope) -> bool:
        """What is not sent again is only queued while the tunnel is open: a loss drops all of it, or none gets in."""
        with self._condition:
            if isinstance(envelope.message, _NOT_RESENT) and self.state is not TunnelState.OPEN:
                return False
            queued = self._outlets[channel_of(envelope.message)].put(envelope)
        if not queued:
            self.counters["queue_full"] += 1
            if self.counters["queue_full"] == 1:
                logger.warning("tunnel.queue_full message=%s state=%s", envelope.message, self.state.value)
            return False
        self._wakeup.set()
        return True

    # The thread

    def _enter(self, state: TunnelState, reason: str = "") -> None:
        with self._condition:
            self._machine.transition_to(state)
            self._reason = reason
            self._condition.notify_all()
        logger.info("tunnel.%s peer=%s endpoint=%s reason=%s", state.value, self.hello.name, self.endpoint, reason)

    def _run(self) -> None:
        request_short_time_slice()
        retain_freed_memory()
        contexts = ZmqContexts()
        backoff = Backoff(self._limits.backoff_min_s, self._limits.backoff_max_s)
        try:
            while not self._stopping.is_set():
                try:
                    self._session(contexts, backoff)
                    return
                except SessionRefused as error:
                    self._enter(TunnelState.REFUSED, str(error))
                    return
                except (LinkDown, WireError) as error:
                    self._lose(str(error))
                except Exception as error:
                    logger.exception("tunnel.failed peer=%s", self.hello.name)
                    self._enter(TunnelState.REFUSED, f"the tunnel broke down: {error}")
                    return
                self._stopping.wait(backoff.next_s())
                if not self._stopping.is_set():
                    self._enter(TunnelState.CONNECTING, self._reason)
        finally:
            contexts.close()

    def _lose(self, reason: str) -> None:
        self._enter(TunnelState.LOST, reason)
        self.counters["lost"] += 1
        for outlet in self._outlets.values():
            outlet.remove_matching(lambda envelope: isinstance(envelope.message, _NOT_RESENT))
        self._shown.clear()

    def _session(self, contexts: ZmqContexts, backoff: Backoff) -> None:
        """One session from dialling to its end. Returns when the client is closed; raises how it ended otherwise."""
        for outlet in self._outlets.values():
            outlet.reset_credit()
        self._verdict = None
        endpoint = prefer_unix_socket(self.endpoint, self._server_key)
        link = Connection(contexts, endpoint, self._keys, self._server_key, self._limits, self._outlets, self._wakeup)
        opened_s = time.monotonic()
        try:
            self._handshake(link)
            opened_s = time.monotonic()
            self._lines = {channel: link.sockets[channel] for channel in self._readers}
            for channel, reader in self._readers.items():
                reader.attach(link.sockets[channel])
            self._enter(TunnelState.OPEN)
            self._converse(link)
        finally:
            if time.monotonic() - opened_s > self._limits.dead_after_s:
                backoff.reset()
            self._lines = {}
            for reader in self._readers.values():
                reader.detach()
            link.close(CLOSE_LINGER_MS if self._stopping.is_set() else 0)
            for reader in self._readers.values():  # before the next session begins
                reader.wait_idle()

    def _handshake(self, link: Connection) -> None:
        deadline = time.monotonic() + self._limits.handshake_s
        for channel, line in link.sockets.items():
            line.send(Envelope(self.hello))
            while not self._stopping.is_set() and not self._welcomed(link, line):
                if time.monotonic() > deadline:
                    raise LinkDown(f"{link.endpoint} did not answer within {self._limits.handshake_s:g} s")
                link.wait(deadline - time.monotonic())
            if channel is Channel.CONTROL:
                line.flush()  # our grant: the gateway may speak before all channels are open

    def _welcomed(self, link: Connection, line: ChannelSocket) -> bool:
        received = line.receive()
        if received is not None and isinstance(received[0].message, Welcome):
            self._take_welcome(line, received[0].message)
            return True
        if received is None and line.channel is not Channel.CONTROL:
            line = link.sockets[Channel.CONTROL]  # a Refusal, or what the gateway sends as soon as all are open
            received = line.receive()
        if received is not None:
            self._take_in(line, *received)
        return False

    def _take_welcome(self, line: ChannelSocket, welcome: Welcome) -> None:
        if not self.hello.oldest <= welcome.protocol <= self.hello.protocol:
            raise SessionRefused(
                f"{self.endpoint} speaks protocol version {welcome.protocol}, we speak {self.hello.oldest} to "
                f"{self.hello.protocol}; install the same release"
            )
        if line.channel is Channel.EXPERIENCE and self._uplink is not None:
            self._uplink.resume(welcome.resume_after)
            self._tell_drained()

    def _converse(self, link: Connection) -> None:
        self._heard_s, next_heartbeat_s = time.monotonic(), 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= next_heartbeat_s:
                link.send_heartbeat(Heartbeat(t_client_ns=time.monotonic_ns()))
                next_heartbeat_s = now + self._limits.heartbeat_s
            elsewhere = [channel for channel, reader in self._readers.items() if reader.is_reading]
            for channel, line in link.sockets.items():
                if channel not in elsewhere:
                    self._receive(line)
            if self._verdict is not None:
                raise self._verdict
            if now - self._heard_s > self._limits.dead_after_s:
                raise LinkDown(f"{link.endpoint} was silent for {now - self._heard_s:.1f} s")
            timeout_s = min(self._send(link), next_heartbeat_s - now)
            for channel in elsewhere:
                self._read_if_pending(link.sockets[channel])
            link.wait(min(timeout_s, READER_CHECK_INTERVAL_S) if elsewhere else timeout_s, elsewhere)
        link.sockets[Channel.CONTROL].flush()  # a release of the lease, for instance

    def _take_in_all(self, line: ChannelSocket) -> None:
        """Reads a line empty that several threads read. What must end the session waits for the client's own thread."""
        try:
            while (received := line.receive()) is not None:
                if line.channel is Channel.CONTROL:
                    self._heard_s = time.monotonic()
                self._take_in(line, *received)
        except (SessionRefused, WireError) as error:
            self._verdict = error
            self._wakeup.set()

    def _receive(self, line: ChannelSocket) -> None:
        if line.channel in self._readers:
            return self._readers[line.channel].drain(line)
        for _ in range(RECEIVE_BURST):
            received = line.receive()
            if received is None:
                return
            self._take_in(line, *received)

    def _take_in(self, line: ChannelSocket, envelope: Envelope, charge: int) -> None:
        """Raises Refused, or WireError for what has no place here."""
        match envelope.message:
            case CreditGrant():
                self._wakeup.set()
            case Refusal() as refusal:
                raise SessionRefused(f"{self.endpoint} refused us: {refusal.reason}")
            case Heartbeat() as echo:
                if line.channel is Channel.CONTROL:
                    self._clock.add(echo, time.monotonic_ns())
            case ChunkAck() | ChunkRefusal() as answer if self._uplink is not None:
                self._uplink.on_reply(answer)
                self._tell_drained()
            case PreviewAck() as ack:
                self._shown.discard((ack.robot, ack.camera))
            case Preview():
                self._previews.put(envelope, coalescing_key(envelope.message))
            case Hello() | Welcome() | ChunkAck() | ChunkRefusal():
                raise WireError(f"{self.endpoint} sent {type(envelope.message).__name__} out of turn")
            case message:
                inbox = Channel.CONTROL if isinstance(message, WeightsApplied) else line.channel
                charge = self._readers[inbox].put(envelope, line, charge)
        line.release(charge)

    def _tell_drained(self) -> None:
        if not self.chunks_pending:
            with self._condition:
                self._condition.notify_all()

    def _send(self, link: Connection) -> float:
        """Sends what waits: control, then weights, then experience. Returns when to try again, in seconds."""
        experience = link.sockets[Channel.EXPERIENCE]
        blocked = link.flush()
        if self._uplink is not None and not len(experience.send_queue):
            blocked |= self._uplink.send_pending(experience)
        if blocked:
            return BLOCKED_RETRY_S
        return min(outlet.bandwidth_wait_s() for outlet in self._outlets.values())
