"""The client's side of a session: four sockets to one port, their readers, and the sender of chunks."""

from __future__ import annotations

import math
import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from user_sys.errors import LinkDown, SessionRefused
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal, CreditGrant, Heartbeat
from user_sys.tunnel.endpoint import enlarge_send_buffer
from user_sys.tunnel.flow_control import CoalescingQueue, LatencyHistogram, ReceiveWindow, SendQueue
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import (
    CREDIT_EXEMPT,
    Channel,
    Envelope,
    Payload,
    coalescing_key,
    credit_cost_bytes,
    decode_envelope,
    encode_envelope,
    new_session_id,
)
from user_sys.tunnel.session import channel_limits
from user_sys.tunnel.sockets import (
    Wakeup,
    ZmqSocket,
    configure_socket,
    enable_ipv6,
    has_message,
    receive_frames,
    send_frames,
    silence_s,
)

ZAP_DENIED = 400
READER_GRACE_S = 0.1  # a thread that has received once is expected to return within this time
READER_POLL_S = 0.25
_DISCONNECT_REASONS = {
    int(zmq.EVENT_CLOSED): "no gateway listens there",
    int(zmq.EVENT_DISCONNECTED): "the gateway closed the connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: check the gateway's public key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: another program listens there",
}
_MONITORED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | sum(_DISCONNECT_REASONS)


class Backoff:
    """Exponential backoff with full jitter: a pause is uniform between zero and a bound that doubles with each failure.

    The reconnects of many clients that lost one gateway at the same time are thus spread evenly
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    """

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._min_s, self._max_s = min_s, max_s
        self._rng = rng or random.Random()
        self.bound_s = min_s

    def next_s(self) -> float:
        """The next pause. Doubles the bound of the one after it."""
        pause_s = self._rng.uniform(0.0, self.bound_s)
        self.bound_s = min(2 * self.bound_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        """Resets the bound after a session that lasted."""
        self.bound_s = self._min_s


class ZmqContexts:
    """libzmq's I/O threads: one for control and e-stops, one for bulk, whose encryption takes 1 ms for a megabyte.

    The bulk thread uses SCHED_BATCH, so that it does not preempt a running thread when it wakes.
    """

    def __init__(self) -> None:
        self._control: zmq.Context[ZmqSocket] = zmq.Context(1)
        self._bulk: zmq.Context[ZmqSocket] = zmq.Context(1)
        if hasattr(os, "SCHED_BATCH"):
            self._bulk.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)

    def for_channel(self, channel: Channel) -> zmq.Context[ZmqSocket]:
        return self._control if channel in (Channel.CONTROL, Channel.STOP) else self._bulk

    def close(self) -> None:
        """Ends the threads. All sockets must be closed."""
        self._control.term()
        self._bulk.term()


class ChannelSocket:
    """The connection of one channel. Any thread may call it; a lock serializes access to the socket.

    The socket's descriptor is edge-triggered. So a thread that has used the socket must check `has_message`, and then
    read the socket empty or wake the thread that reads it.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        send_queue: SendQueue,
        channel_limits: ChannelLimits,
        limits: TunnelLimits,
        channel: Channel,
    ) -> None:
        self.socket, self.channel, self.send_queue = socket, channel, send_queue
        self.receive_window = ReceiveWindow(channel_limits)
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._descriptor = -1  # of the connection itself; its first message shows it
        self.fd = int(socket.getsockopt(zmq.FD))

    def send(self, envelope: Envelope) -> bool:
        """Sends a message that needs no credit, past the queue. Returns False if libzmq is full."""
        with self._lock:
            return not self._closed and self._send_frames(encode_envelope(envelope))

    def try_send_now(self, envelope: Envelope) -> bool:
        """As `SendQueue.try_send_now`."""
        with self._lock:
            return not self._closed and self.send_queue.try_send_now(envelope, self._send_frames)

    def flush(self) -> bool:
        """Sends a due grant and the queued messages that may be sent. Returns True if libzmq accepts no more."""
        with self._lock:
            if self._closed:
                return False
            grant = self.receive_window.next_grant()
            if grant is not None and self._send_frames(encode_envelope(Envelope(grant))):
                self.receive_window.mark_granted(grant)
            return self.send_queue.flush(self._send_frames)

    def send_chunk(self, envelope: Envelope) -> bool:
        """Sends past the queue, after `send_queue.can_send` has returned True. Returns False if libzmq is full."""
        with self._lock:
            return not self._closed and self.send_queue.send(encode_envelope(envelope), self._send_frames)

    def receive(self) -> tuple[Envelope, int] | None:
        """The next message and its charge, or None; does not block. Raises WireError.

        After processing the message, the caller returns the charge with `release`. Messages without credit have none.
        """
        with self._lock:
            frames = None if self._closed else receive_frames(self.socket)
        if frames is None:
            return None
        if self._descriptor < 0:
            self._descriptor = int(frames[0].get(zmq.SRCFD))
            if self.channel is not Channel.CONTROL:
                enlarge_send_buffer(self._descriptor)
        parts: list[Payload] = [frame.buffer for frame in frames]
        envelope = decode_envelope(self.channel, parts, self._limits)
        size, metrics = credit_cost_bytes(parts), self.send_queue.metrics
        metrics.received += 1
        metrics.received_bytes += size
        if isinstance(envelope.message, CREDIT_EXEMPT):
            if isinstance(envelope.message, CreditGrant):
                self.send_queue.add_credit(envelope.message)
            return envelope, 0
        self.receive_window.charge(size)
        return envelope, size

    def release(self, charge: int) -> bool:
        """Returns the charge of a processed message. Returns whether a grant is due, which the next flush sends."""
        return charge > 0 and self.receive_window.release(1, charge)

    @property
    def silent_s(self) -> float:
        """Seconds since the last received bytes, of complete messages or not."""
        return silence_s(self._descriptor)

    @property
    def has_message(self) -> bool:
        with self._lock:
            return not self._closed and has_message(self.socket)

    def close(self, linger_ms: int) -> None:
        with self._lock:
            self._closed = True
            self.socket.disable_monitor()
            self.socket.close(linger_ms)

    def _send_frames(self, frames: list[Payload]) -> bool:
        return send_frames(self.socket, frames)


class Connection:
    """The four CURVE sockets of one session. One thread calls it; other threads may use its channel sockets.

    libzmq does not reconnect. If one socket fails, the client closes all four and opens a new session, so that no
    message of a session is delivered under the next one.
    """

    def __init__(
        self,
        contexts: ZmqContexts,
        endpoint: str,
        keys: KeyPair,
        server_key: str,
        limits: TunnelLimits,
        send_queues: Mapping[Channel, SendQueue],
        wakeup: Wakeup,
    ) -> None:
        self.endpoint = endpoint
        self.sockets: dict[Channel, ChannelSocket] = {}
        self._monitors: dict[int, ZmqSocket] = {}
        self._wakeup = wakeup
        self._stuck_after_s = limits.stuck_after_s
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)
        self._read_elsewhere: Collection[Channel] = ()
        session = new_session_id()
        for channel, bounds in channel_limits(limits).items():
            socket = contexts.for_channel(channel).socket(zmq.DEALER)
            configure_socket(socket, limits, channel)
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server_key.encode()
            socket.setsockopt(zmq.ROUTING_ID, channel.value + session)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._watch(socket.get_monitor_socket(_MONITORED_EVENTS))
            self.sockets[channel] = ChannelSocket(socket, send_queues[channel], bounds, limits, channel)
            self._poll.register(self.sockets[channel].fd, select.POLLIN)
            enable_ipv6(socket, endpoint)
            socket.connect(endpoint)

    def _watch(self, monitor: ZmqSocket) -> None:
        has_message(monitor)  # arms the descriptor, which is edge-triggered
        descriptor = int(monitor.getsockopt(zmq.FD))
        self._monitors[descriptor] = monitor
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float, read_elsewhere: Collection[Channel] = ()) -> None:
        """Blocks until a message may have arrived, the wake-up is set, or the timeout ends.

        Args:
            read_elsewhere: channels that other threads read; their messages do not end this wait.

        Raises:
            SessionRefused: the gateway does not allow our key.
            LinkDown: a connection has ended.
        """
        self._poll_except(read_elsewhere)
        is_readable = any(s.has_message for channel, s in self.sockets.items() if channel not in read_elsewhere)
        timeout_s = 0.0 if is_readable else max(0.0, timeout_s)
        for descriptor, _ in self._poll.poll(math.ceil(1e3 * timeout_s)):
            if descriptor == self._wakeup.fileno():
                self._wakeup.clear()
            elif (monitor := self._monitors.get(descriptor)) is not None and has_message(monitor):
                self._raise_disconnected(monitor)

    def _poll_except(self, read_elsewhere: Collection[Channel]) -> None:
        for channel, socket in self.sockets.items():
            if channel in read_elsewhere and channel not in self._read_elsewhere:
                self._poll.unregister(socket.fd)
            elif channel in self._read_elsewhere and channel not in read_elsewhere:
                self._poll.register(socket.fd, select.POLLIN)
        self._read_elsewhere = read_elsewhere

    def flush(self) -> bool:
        """Sends the queues of all channels, control first. Returns True if libzmq accepts no more."""
        return any([socket.flush() for socket in self.sockets.values()])

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Sends a heartbeat on each channel.

        Raises:
            LinkDown: a channel other than control was silent for `stuck_after_s`; the client checks control.
        """
        for channel, socket in self.sockets.items():
            socket.send(Envelope(heartbeat))  # if the pipe is full, other bytes show that the channel is alive
            if channel is not Channel.CONTROL and (silent_s := socket.silent_s) > self._stuck_after_s:
                raise LinkDown(
                    f"{self.endpoint}: the {channel.name.lower()} connection was silent for {silent_s:.1f} s"
                )

    def _raise_disconnected(self, monitor: ZmqSocket) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == ZAP_DENIED:
            raise SessionRefused(f"{self.endpoint} does not allow this key; run `user-sys keys allow` there")
        raise LinkDown(f"{self.endpoint}: {_DISCONNECT_REASONS.get(int(event['event']), 'the handshake failed')}")

    def close(self, linger_ms: int = 0) -> None:
        """Closes the sockets and drops their unsent messages; only control gets `linger_ms` to send its own."""
        for channel, socket in self.sockets.items():
            socket.close(linger_ms if channel is Channel.CONTROL else 0)
        for monitor in self._monitors.values():
            monitor.close(0)


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """A message in the inbox. The thread that gets it releases its charge to the socket that received it."""

    envelope: Envelope
    socket: ChannelSocket
    charge: int


class ChannelReader:
    """The inbox of one channel. A thread that waits for a message reads the attached socket itself.

    This saves two thread switches for each message. One thread at a time polls the socket; other waiting threads get
    their messages from the inbox. If no thread polls, and none did within `READER_GRACE_S`, the thread that attached
    the socket must read it with `drain`.

    Args:
        read_available: reads a socket empty and puts its messages into this inbox; must not raise.
    """

    def __init__(self, capacity: int, read_available: Callable[[ChannelSocket], None]) -> None:
        self.inbox: CoalescingQueue[ReceivedMessage] = CoalescingQueue(capacity)
        self._read_available = read_available
        self._draining = threading.Lock()  # keeps messages in order: one thread reads and queues at a time
        self._socket: ChannelSocket | None = None
        self._reading, self._polling = threading.Lock(), threading.Lock()
        self._attached = threading.Condition()
        self._reader_ident = 0
        self._last_read_s = float("-inf")
        self._wakeup = Wakeup()
        self._poll: select.poll | None = None
        self._polled: ChannelSocket | None = None

    @property
    def is_reading(self) -> bool:
        """Whether a thread reads the socket, or did so within `READER_GRACE_S`."""
        return self._reader_ident != 0 or time.monotonic() - self._last_read_s < READER_GRACE_S

    def attach(self, socket: ChannelSocket) -> None:
        with self._attached:
            self._socket = socket
            self._attached.notify_all()

    def detach(self) -> None:
        """Detaches the socket. After the return, no thread polls its descriptor."""
        self._socket = None
        self._wakeup.set()
        with self._polling:
            return

    def wait_idle(self) -> None:
        """Blocks until other threads have processed the messages that they read before the socket was closed."""
        with self._draining:
            return

    def drain(self, socket: ChannelSocket) -> None:
        """Reads and queues the messages that have arrived, in order."""
        with self._draining:
            self._read_available(socket)

    def put(self, envelope: Envelope, socket: ChannelSocket, charge: int) -> int:
        """Queues a message. Returns the part of its charge to release now.

        A state message is released now, because its successor may replace it in the queue.
        """
        key = coalescing_key(envelope.message)
        message = ReceivedMessage(envelope, socket, charge if key is None else 0)
        if not self.inbox.put(message, key):
            return charge
        if self._reader_ident not in (0, threading.get_ident()):
            self._wakeup.set()
        return charge - message.charge

    def get(self, timeout_s: float) -> ReceivedMessage | None:
        """The oldest message, or None after `timeout_s`."""
        if timeout_s <= 0:
            if self._socket is not None and not len(self.inbox):
                self.drain(self._socket)
            return self.inbox.get_nowait()
        deadline = time.monotonic() + timeout_s
        if not self._reading.acquire(blocking=False):
            return self.inbox.get(timeout_s)
        try:
            self._reader_ident = threading.get_ident()
            return self._read(deadline)
        finally:
            self._last_read_s = time.monotonic()
            self._reader_ident = 0
            self._reading.release()

    def _read(self, deadline: float) -> ReceivedMessage | None:
        while (item := self.inbox.get_nowait()) is None:
            socket = self._socket
            if socket is not None:
                self.drain(socket)
                if len(self.inbox):
                    continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            self._wait(socket, min(remaining_s, READER_POLL_S))
        return item

    def _wait(self, socket: ChannelSocket | None, timeout_s: float) -> None:
        """Blocks until a message may have arrived or the socket has changed. Without a socket it polls nothing."""
        if socket is None:
            with self._attached:
                if self._socket is None:
                    self._attached.wait(timeout_s)
            return
        with self._polling:
            if self._socket is not socket:
                return  # detached: another file may use its descriptor now
            if self._polled is not socket or self._poll is None:
                self._poll, self._polled = select.poll(), socket
                self._poll.register(self._wakeup.fileno(), select.POLLIN)
                self._poll.register(socket.fd, select.POLLIN)
            if self._wakeup.fileno() in dict(self._poll.poll(1e3 * timeout_s)):
                self._wakeup.clear()

    def close(self) -> None:
        """Detaches the socket. A waiting thread still waits for the rest of its timeout."""
        self.detach()
        self._wakeup.close()


@dataclass(frozen=True)
class PendingChunk:
    """A chunk that is not acknowledged yet."""

    sequence: int
    episode: str
    index: int
    packet: bytes | memoryview


class ChunkSource(Protocol):
    """A source of durable chunks. The tunnel's thread calls it.

    Attributes:
        stream: a permanent name of this source. Sequence numbers are unique in a stream.
    """

    stream: str

    def __len__(self) -> int:
        """The number of durable chunks that are not acknowledged. Any thread may call it."""

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        """Durable chunks with a greater sequence, in order."""

    def acknowledge(self, sequence: int) -> None:
        """All chunks up to and including `sequence` are durable at the gateway, or set aside."""

    def set_aside(self, sequence: int, reason: str) -> None:
        """The gateway will never accept this chunk: store it in a place for a person to find."""

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        """Sets the callback that runs, in any thread, after a chunk has become durable; None removes it."""


class ChunkSender:
    """Sends the chunks of a source. One thread calls it.

    Args:
        ack_latency: records the time from sending a chunk to its durable acknowledgement.
    """

    def __init__(self, source: ChunkSource, ack_latency: LatencyHistogram) -> None:
        self.source = source
        self._ack_latency = ack_latency
        self._in_flight: deque[tuple[int, float]] = deque()  # sequence, time of sending
        self._sent = -1

    def resume(self, resume_after: int) -> None:
        """Starts a new session: chunks up to `resume_after` are durable, all later ones are sent again."""
        self._in_flight.clear()
        self._sent = -1
        if resume_after >= 0:
            self.source.acknowledge(resume_after)

    def send_pending(self, socket: ChannelSocket) -> bool:
        """Sends chunks while credit and bandwidth allow. Returns True if libzmq accepts no more."""
        if not socket.send_queue.can_send():
            return False
        for chunk in self.source.pending(self._sent):
            offer = ChunkOffer(sequence=chunk.sequence, episode=chunk.episode, index=chunk.index)
            if not socket.send_chunk(Envelope(offer, chunk.packet)):
                return True
            self._sent = chunk.sequence
            self._in_flight.append((chunk.sequence, time.monotonic()))
            if not socket.send_queue.can_send():
                return False
        return False

    def on_reply(self, reply: ChunkAck | ChunkRefusal) -> None:
        """Handles the gateway's reply. A refused chunk is set aside; the next acknowledgement covers it."""
        if isinstance(reply, ChunkRefusal):
            self.source.set_aside(reply.sequence, reply.reason)
            return
        now = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= reply.sequence:
            self._ack_latency.add(now - self._in_flight.popleft()[1])
        self.source.acknowledge(min(reply.sequence, self._sent))
