"""A peer's end of the tunnel: it connects to the gateway, reconnects after a loss, and loses no experience.

One thread owns the sockets: it connects, sends, receives and keeps the session alive. Any thread may call the public
methods, which use queues. docs/tunnel.md describes the protocol.

A lost connection keeps chunks (resent after the last acknowledgement) and queued messages. It drops the messages in
`protocol.DROPPED_ON_DISCONNECT`, which are useless or dangerous when late, and the transfer of weights, which starts
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from hal.context import StartedAtEntry
from hal.pacing import Backoff
from user_sys.errors import LinkDown, SessionRefused, TunnelError, WireError
from user_sys.messages import (
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
from user_sys.tunnel.connection import (
    RECEIVE_BURST,
    ChunkSender,
    ChunkSource,
    Connection,
    Wakeup,
    ZmqSocket,
    new_context,
    request_short_time_slice,
)
from user_sys.tunnel.flow_control import ChannelFlow, CoalescingQueue, ReceiveWindow, SendFrames, SendQueue
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import (
    CREDIT_EXEMPT,
    DROPPED_ON_DISCONNECT,
    WEIGHTS_TRANSFER,
    AnyMessage,
    Channel,
    Envelope,
    TunnelState,
    channel_limits,
    channel_of,
    coalescing_key,
    credit_cost_bytes,
    decode_envelope,
    encode_envelope,
)

__all__ = ["TunnelClient", "TunnelState"]

logger = logging.getLogger(__name__)

Received: TypeAlias = ControlMessage | WeightsApplied
REFUSED_PAUSE_S = 10.0  # a relay or policy server then connects again: a person may have allowed its key meanwhile
CLOSE_TIMEOUT_S = 5.0
CLOSE_LINGER_MS = 500
FINISH_S = 2.0  # for the gateway's last reply, on a slow link or from a busy computer
BLOCKED_RETRY_S = 0.002
FLUSH_POLL_S = 0.002
CLOCK_SAMPLES = 16
_NOT_RESENT = (*DROPPED_ON_DISCONNECT, *WEIGHTS_TRANSFER, PreviewAck, WeightsReceived)


@dataclass(frozen=True, order=True)
class ClockEstimate:
    """Gateway's Unix time = our monotonic time + `offset_ns`, with an error of at most half of `rtt_ns`."""

    rtt_ns: int
    offset_ns: int

    def gateway_unix_ns(self, t_monotonic_ns: int) -> int:
        return t_monotonic_ns + self.offset_ns


class ClockEstimator:
    """Uses the fastest of the last `CLOCK_SAMPLES` heartbeats (NTP's clock filter, RFC 5905 §10).

    A heartbeat that contradicts an earlier one replaces it: the gateway's clock was set in between.
    """

    def __init__(self) -> None:
        self._samples: tuple[ClockEstimate, ...] = ()

    def add(self, echo: Heartbeat, now_ns: int) -> None:
        """Adds an echoed heartbeat that arrived at `now_ns` on our monotonic clock. Ignores one from the future."""
        rtt_ns = now_ns - echo.t_client_ns
        if rtt_ns >= 0:
            new = ClockEstimate(rtt_ns, echo.t_gateway_unix_ns - echo.t_client_ns - rtt_ns // 2)
            kept = (old for old in self._samples if abs(new.offset_ns - old.offset_ns) <= new.rtt_ns + old.rtt_ns)
            self._samples = (*kept, new)[-CLOCK_SAMPLES:]

    def estimate(self) -> ClockEstimate | None:
        """None before the first heartbeat. Any thread may call it."""
        return min(self._samples, default=None)


@dataclass(frozen=True, eq=False)
class _ReceivedMessage:
    """A message in an inbox. The thread that gets it releases its charge in the window of its session."""

    envelope: Envelope
    window: ReceiveWindow
    charge: int


class ClientQueues:
    """The state and the queues of a client, which outlive its connections. Any thread may call it.

    Attributes:
        reason: why the tunnel is not open; empty while it is open.
        changed: notified after each transition, and after the outbox is drained.
    """

    def __init__(self, name: str, limits: TunnelLimits) -> None:
        bounds = channel_limits(limits)
        self.send_queues = {channel: SendQueue(each) for channel, each in bounds.items()}
        self.inboxes: dict[Channel, CoalescingQueue[_ReceivedMessage]] = {
            channel: CoalescingQueue(each.window_messages + each.queue_messages) for channel, each in bounds.items()
        }
        self.counters: Counter[str] = Counter()
        self.wakeup = Wakeup()
        self.state, self.reason = TunnelState.IDLE, "not started"
        self.changed = threading.Condition()
        self._name = name
        self._previews_in_flight: set[tuple[str, str]] = set()  # cameras whose last preview is not acknowledged

    def transition_to(self, state: TunnelState, reason: str = "") -> None:
        """Sets the state. A loss drops the messages that are not sent again."""
        with self.changed:
            self.state, self.reason = state, reason
            if state is TunnelState.LOST:
                self.counters["lost"] += 1
                for send_queue in self.send_queues.values():
                    send_queue.remove_matching(lambda envelope: isinstance(envelope.message, _NOT_RESENT))
                self._previews_in_flight.clear()
            self.changed.notify_all()
        logger.info("tunnel.%s peer=%s reason=%s", state.value, self._name, reason)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def send(self, envelope: Envelope) -> bool:
        """Queues a message. Returns False if the queue is full.

        Also returns False for a message that is not sent again, unless the tunnel is open: a loss drops these messages.
        """
        with self.changed:
            if isinstance(envelope.message, _NOT_RESENT) and self.state is not TunnelState.OPEN:
                return False
            queued = self.send_queues[channel_of(envelope.message)].put(envelope)
        if not queued:
            self.counters["queue_full"] += 1
            if self.counters["queue_full"] == 1:
                logger.warning("tunnel.queue_full message=%s state=%s", envelope.message, self.state.value)
            return False
        self.wakeup.set()
        return True

    def send_preview(self, preview: Preview, jpeg: bytes) -> bool:
        """Queues a picture. Returns False if the camera's last one is not acknowledged or the tunnel is not open."""
        camera = (preview.robot, preview.camera)
        with self.changed:
            if camera in self._previews_in_flight or not self.send(Envelope(preview, jpeg)):
                return False
            self._previews_in_flight.add(camera)
            return True

    def on_preview_ack(self, ack: PreviewAck) -> None:
        with self.changed:
            self._previews_in_flight.discard((ack.robot, ack.camera))

    def put_received(self, envelope: Envelope, inbox: Channel, window: ReceiveWindow, charge: int) -> None:
        """Queues a message for the application, which releases its charge.

        The charge of a state message is released now, because its successor may replace it in the queue.
        """
        key = coalescing_key(envelope.message)
        queued = self.inboxes[inbox].put(_ReceivedMessage(envelope, window, charge if key is None else 0), key)
        if key is not None or not queued:
            window.release(1, charge)

    def receive(self, inbox: Channel, timeout_s: float) -> Envelope | None:
        """The next message of an inbox, or None after `timeout_s`."""
        received = self.inboxes[inbox].get(timeout_s)
        if received is None:
            return None
        if received.charge and received.window.release(1, received.charge):
            self.wakeup.set()  # a grant is due
        return received.envelope

    def scalars(self) -> dict[str, float]:
        scalars = {
            "lost": float(self.counters["lost"]),
            "open": float(self.state is TunnelState.OPEN),
            "inbox_full": float(sum(inbox.rejected for inbox in self.inboxes.values())),
        }
        for channel, send_queue in self.send_queues.items():
            scalars |= send_queue.metrics.scalars(channel.name.lower())
        return scalars


class ClientSession:
    """One session with the gateway, from Hello to its end. One thread calls it.

    Args:
        connection: new sockets.
        chunks: sends the outbox, or None.
    """

    def __init__(
        self,
        connection: Connection,
        hello: Hello,
        limits: TunnelLimits,
        queues: ClientQueues,
        chunks: ChunkSender | None,
        clock: ClockEstimator,
    ) -> None:
        self._connection, self._hello, self._limits, self._queues = connection, hello, limits, queues
        self._chunks, self._clock = chunks, clock
        bounds = channel_limits(limits)
        self._flows = {channel: ChannelFlow(bounds[channel], queues.send_queues[channel]) for channel in Channel}
        self._welcomed: set[Channel] = set()
        self._last_control_s = self._next_heartbeat_s = 0.0
        self._echoed_ns = 0  # the time of the newest heartbeat on control that the gateway has echoed

    def open(self, stopping: threading.Event) -> bool:
        """Blocks until the gateway has welcomed each channel, for `handshake_s` each at most. Raises as `exchange`.

        Returns False if `stopping` was set before that.
        """
        for channel in Channel:
            deadline = time.monotonic() + self._limits.handshake_s
            self._send(channel, self._hello)
            while channel not in self._welcomed and not stopping.is_set():
                if (remaining_s := deadline - time.monotonic()) < 0:
                    raise LinkDown(f"{self._connection.endpoint} did not answer within {self._limits.handshake_s:g} s")
                self._connection.wait(remaining_s)
                self._receive()
            self._flows[channel].send_grant(self._sender(channel))  # the gateway may send before all channels are open
        self._last_control_s = time.monotonic()
        return self._welcomed.issuperset(Channel)

    def exchange(self) -> None:
        """Sends and receives what there is, and waits for more.

        Raises:
            SessionRefused: the gateway refuses us for good.
            LinkDown: the connection ended, or the gateway is silent.
            WireError: a message that is not valid now.
        """
        now = time.monotonic()
        if now >= self._next_heartbeat_s:
            # A full pipe has room again soon, and messages that wait must not take all of it.
            self._next_heartbeat_s = now + (self._limits.heartbeat_s if self._send_heartbeats() else BLOCKED_RETRY_S)
        self._receive()
        if now - self._last_control_s > self._limits.dead_after_s:
            raise LinkDown(f"{self._connection.endpoint} was silent for {now - self._last_control_s:.1f} s")
        self._connection.wait(min(self.flush(), self._next_heartbeat_s - now))

    def flush(self) -> float:
        """Sends queued messages: control, then weights, then experience. Returns the seconds until the next attempt."""
        blocked = any([flow.flush(self._sender(channel)) for channel, flow in self._flows.items()])
        send_queue = self._flows[Channel.EXPERIENCE].send_queue
        if self._chunks is not None and not len(send_queue):
            blocked |= self._chunks.send_pending(send_queue, self._sender(Channel.EXPERIENCE))
        if blocked:
            return BLOCKED_RETRY_S
        return min(flow.send_queue.bandwidth_wait_s() for flow in self._flows.values())

    def finish(self) -> None:
        """Waits up to `FINISH_S` until the gateway has handled what was sent on control.

        A connection that is closed before it has read everything drops what it has sent.
        """
        last = Heartbeat(t_client_ns=time.monotonic_ns())
        deadline = time.monotonic() + FINISH_S
        if self._send(Channel.CONTROL, last):
            while self._echoed_ns < last.t_client_ns and (left_s := deadline - time.monotonic()) > 0:
                self._connection.wait(left_s)
                self._receive()

    def _sender(self, channel: Channel) -> SendFrames:
        return lambda frames: self._connection.send(channel, frames)

    def _send(self, channel: Channel, message: AnyMessage) -> bool:
        return self._connection.send(channel, encode_envelope(Envelope(message)))

    def _send_heartbeats(self) -> bool:
        """Returns False, and sends none, if libzmq accepts no more on control: only that heartbeat gets an echo.

        Raises LinkDown if a channel other than control was silent for `stuck_after_s`.
        """
        heartbeat = Heartbeat(t_client_ns=time.monotonic_ns())
        if not self._send(Channel.CONTROL, heartbeat):
            return False
        for channel in (Channel.STOP, Channel.WEIGHTS, Channel.EXPERIENCE):
            self._send(channel, heartbeat)  # if the pipe is full, other bytes show that the channel is alive
            silent_s = self._connection.silence_s(channel)
            if silent_s > self._limits.stuck_after_s:
                name = channel.name.lower()
                raise LinkDown(f"{self._connection.endpoint}: the {name} connection was silent for {silent_s:.1f} s")
        return True

    def _receive(self) -> None:
        for channel in Channel:
            for _ in range(RECEIVE_BURST):
                frames = self._connection.receive(channel)
                if frames is None:
                    break
                metrics, size = self._flows[channel].send_queue.metrics, credit_cost_bytes(frames)
                metrics.received += 1
                metrics.received_bytes += size
                if channel is Channel.CONTROL:
                    self._last_control_s = time.monotonic()
                self._on_message(channel, decode_envelope(channel, frames, self._limits), size)

    def _on_message(self, channel: Channel, envelope: Envelope, size: int) -> None:
        """Raises SessionRefused for a refusal, and WireError for a message that is not valid now."""
        window = self._flows[channel].window
        is_exempt = isinstance(envelope.message, CREDIT_EXEMPT)
        if not is_exempt:
            window.charge(size)
        match envelope.message:
            case Welcome():
                self._welcomed.add(channel)
                if channel is Channel.EXPERIENCE and self._chunks is not None:
                    self._chunks.restart()
            case CreditGrant() as grant:
                self._flows[channel].send_queue.add_credit(grant)
            case Refusal() as refusal:
                raise SessionRefused(f"{self._connection.endpoint} refused us: {refusal.reason}")
            case Heartbeat() as echo:
                if channel is Channel.CONTROL:
                    self._echoed_ns = echo.t_client_ns
                    self._clock.add(echo, time.monotonic_ns())
            case ChunkAck() | ChunkRefusal() as reply if self._chunks is not None:
                self._chunks.on_reply(reply)
                if not len(self._chunks.source):
                    self._queues.notify()
            case PreviewAck() as ack:
                self._queues.on_preview_ack(ack)
            case Hello() | ChunkAck() | ChunkRefusal() as message:
                raise WireError(f"{self._connection.endpoint} sent an unexpected {type(message).__name__}")
            case message:
                inbox = Channel.CONTROL if isinstance(message, WeightsApplied) else channel
                self._queues.put_received(envelope, inbox, window, size)
                return
        if not is_exempt:
            window.release(1, size)


class TunnelClient(StartedAtEntry):
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
        self.endpoint, self.hello = endpoint, hello
        self._keys, self._server_key, self._limits = keys, server_public_key, limits or TunnelLimits()
        self.queues = ClientQueues(hello.name, self._limits)
        self.counters = self.queues.counters
        self._clock = ClockEstimator()
        self._chunks = None if outbox is None else ChunkSender(outbox)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # Life cycle

    def start(self) -> None:
        """Begins to connect; does not block."""
        if self._thread is not None or self.state is TunnelState.CLOSED:
            raise TunnelError("this client was started or closed before; create a new one")
        self.queues.transition_to(TunnelState.CONNECTING, "connecting")
        if self._chunks is not None:
            self._chunks.source.set_on_append(self.queues.wakeup.set)
        self._thread = threading.Thread(target=self._run, name=f"tunnel-{self.hello.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends queued control messages that libzmq accepts at once, waits for the gateway, and closes the connections.

        The outbox keeps its chunks. Blocks for at most `CLOSE_TIMEOUT_S`; repeated calls have no effect.
        """
        self._stopping.set()
        if self.state is TunnelState.CLOSED:
            return
        if self._thread is not None:
            if self._chunks is not None:
                self._chunks.source.set_on_append(None)
            self.queues.wakeup.set()
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise TunnelError(f"the tunnel's thread did not end within {CLOSE_TIMEOUT_S} s")
        self.queues.transition_to(TunnelState.CLOSED, "closed here")
        self.queues.wakeup.close()

    @property
    def state(self) -> TunnelState:
        return self.queues.state

    @property
    def reason(self) -> str:
        """Why the tunnel is not open, in a sentence; empty while it is open."""
        return self.queues.reason

    @property
    def clock(self) -> ClockEstimate | None:
        """Round trip and offset to the gateway's clock; None before the first heartbeat echo."""
        return self._clock.estimate()

    def scalars(self) -> dict[str, float]:
        """Metrics: counters of each channel, lost sessions, the round trip, and the latency of acknowledgements."""
        scalars = self.queues.scalars() | ({} if self._chunks is None else self._chunks.scalars())
        clock = self.clock
        return scalars if clock is None else {**scalars, "round_trip_ms": clock.rtt_ns / 1e6}

    @property
    def chunks_pending(self) -> int:
        """Chunks in the outbox that the gateway has not acknowledged."""
        return 0 if self._chunks is None else len(self._chunks.source)

    def drain(self, timeout_s: float) -> int:
        """Blocks until the gateway has every chunk or `timeout_s` ends. Returns the number of chunks that it lacks."""
        final = (TunnelState.REFUSED, TunnelState.CLOSED)
        self._wait_for(lambda: not self.chunks_pending or self.state in final, timeout_s)
        return self.chunks_pending

    def wait_open(self, timeout_s: float) -> None:
        """Blocks until the tunnel is open.

        Raises:
            SessionRefused: the gateway refuses us for good, or the client was closed.
            LinkDown: not open within `timeout_s`; the client keeps trying.
        """
        final = (TunnelState.OPEN, TunnelState.REFUSED, TunnelState.CLOSED)
        with self.queues.changed:
            self._wait_for(lambda: self.state in final, timeout_s)
            if self.state is TunnelState.OPEN:
                return
            if self.state in final:
                raise SessionRefused(self.reason)
            raise LinkDown(f"no tunnel to {self.endpoint} after {timeout_s:g} s: {self.reason}")

    def _wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        with self.queues.changed:
            self.queues.changed.wait_for(predicate, timeout_s)

    # Messages

    def send(self, message: ControlMessage | WeightsApplied) -> bool:
        """Queues a message; never blocks.

        A state message replaces its queued predecessor (`protocol.coalescing_key`). Returns False if the queue is full,
        or if the tunnel is not open and the message would be useless when late.
        """
        return self.queues.send(Envelope(message))

    def receive(self, timeout_s: float) -> Received | None:
        """The next message from the gateway, or None after `timeout_s`."""
        envelope = self.queues.receive(Channel.CONTROL, timeout_s)
        return None if envelope is None else envelope.message  # type: ignore[return-value]

    def receive_stop(self, timeout_s: float) -> OperatorCommand | OperatorReply | None:
        """The next e-stop at a robot, or its confirmation at a console; None after `timeout_s`."""
        envelope = self.queues.receive(Channel.STOP, timeout_s)
        return None if envelope is None else envelope.message  # type: ignore[return-value]

    def send_weights(self, message: WeightsMessage, payload: bytes | memoryview | None = None) -> bool:
        """Queues a message of the weights channel; never blocks.

        Returns False if the queue is full or the tunnel is not open.
        """
        return self.queues.send(Envelope(message, payload))

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """The next message of the weights channel, or None after `timeout_s`."""
        return self.queues.receive(Channel.WEIGHTS, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Blocks until libzmq has all queued messages. Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while any(map(len, self.queues.send_queues.values())):
            if time.monotonic() > deadline:
                return False
            self._stopping.wait(FLUSH_POLL_S)
        return True

    def send_preview(self, preview: Preview, jpeg: bytes) -> bool:
        """Sends a picture. Returns False if the camera's last one is not acknowledged or the tunnel is not open."""
        return self.queues.send_preview(preview, jpeg)

    def receive_preview(self, timeout_s: float) -> tuple[Preview, bytes | memoryview] | None:
        """A console's next picture, or None after `timeout_s`. The camera's next one follows."""
        envelope = self.queues.receive(Channel.EXPERIENCE, timeout_s)
        if envelope is None or not isinstance(envelope.message, Preview) or envelope.payload is None:
            return None
        self.queues.send(Envelope(PreviewAck(robot=envelope.message.robot, camera=envelope.message.camera)))
        return envelope.message, envelope.payload

    # The tunnel's thread

    def _run(self) -> None:
        """Runs one session after another until the client stops or the gateway refuses it."""
        request_short_time_slice()
        context = new_context()
        backoff = Backoff(self._limits.backoff_min_s, self._limits.backoff_max_s)
        try:
            while True:
                try:
                    self._run_session(context, backoff)
                    return
                except SessionRefused as error:
                    self.queues.transition_to(TunnelState.REFUSED, str(error))
                    return
                except (LinkDown, WireError) as error:
                    self.queues.transition_to(TunnelState.LOST, str(error))
                if self._stopping.wait(backoff.next_s()):
                    return
                self.queues.transition_to(TunnelState.CONNECTING, self.reason)
        except Exception as error:
            logger.exception("tunnel.failed peer=%s", self.hello.name)
            self.queues.transition_to(TunnelState.REFUSED, f"the tunnel failed: {error}")
        finally:
            context.term()

    def _run_session(self, context: zmq.Context[ZmqSocket], backoff: Backoff) -> None:
        """Runs one session. Returns when the client stops; otherwise raises the reason for its end."""
        connection = Connection(context, self.endpoint, self._keys, self._server_key, self._limits, self.queues.wakeup)
        session = ClientSession(connection, self.hello, self._limits, self.queues, self._chunks, self._clock)
        opened_s = time.monotonic()
        try:
            if not session.open(self._stopping):
                return
            opened_s = time.monotonic()
            self.queues.transition_to(TunnelState.OPEN)
            while not self._stopping.is_set():
                session.exchange()
            session.flush()  # for example a lease release
            session.finish()
        finally:
            if time.monotonic() - opened_s > self._limits.dead_after_s:
                backoff.reset()
            connection.close(CLOSE_LINGER_MS if self._stopping.is_set() else 0)
