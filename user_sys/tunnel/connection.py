"""Pauses between attempts, spread so that many clients of a gateway that starts again do not come at once.

One attempt at a connection: three sockets to one port that live and die together.

Lets the thread that waits for a message read the connection itself: two thread switches fewer on the way.

Experience on its way up: chunks from a durable source, sent in order while there is credit, kept until settled.
"""

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


class Backoff:
    """Exponential with full jitter: a pause is drawn evenly from zero to a bound that doubles with each failure.

    Of many clients that lost the same gateway at the same moment, each instant of a round then sees an equal share
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    """

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._min_s, self._max_s = min_s, max_s
        self._rng = rng or random.Random()
        self.bound_s = min_s

    def next_s(self) -> float:
        """The next pause; its successor's bound is twice as large."""
        pause_s = self._rng.uniform(0.0, self.bound_s)
        self.bound_s = min(2 * self.bound_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        """A connection has proved itself: the next failure is a first one."""
        self.bound_s = self._min_s


ZAP_DENIED = 400
_DISCONNECT_REASONS = {
    int(zmq.EVENT_CLOSED): "nothing listens there",
    int(zmq.EVENT_DISCONNECTED): "the gateway closed the connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: is the gateway's public key right?",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: no gateway of ours listens there",
}
_MONITORED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | sum(_DISCONNECT_REASONS)


class ZmqContexts:
    """libzmq's threads: one for control and e-stops, since encrypting a megabyte takes a millisecond; one for bulk.

    The bulk thread is a batch job to the kernel: when it becomes ready it does not displace a thread that runs.
    """

    def __init__(self) -> None:
        self._control: zmq.Context[ZmqSocket] = zmq.Context(1)
        self._bulk: zmq.Context[ZmqSocket] = zmq.Context(1)
        if hasattr(os, "SCHED_BATCH"):
            self._bulk.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)

    def for_channel(self, channel: Channel) -> zmq.Context[ZmqSocket]:
        return self._control if channel in (Channel.CONTROL, Channel.STOP) else self._bulk

    def close(self) -> None:
        """All sockets must be closed before."""
        self._control.term()
        self._bulk.term()


class ChannelSocket:
    """One channel's connection. Any thread may call it: a lock sees to it that one at a time uses the socket.

    Whoever has used the socket must read it empty, or tell somebody who will (`has_message`): its file descriptor may
    then stay silent about a message that is there.
    """

    def __init__(
        self, socket: ZmqSocket, outlet: SendQueue, window: ChannelLimits, limits: TunnelLimits, channel: Channel
    ):
        self.socket, self.channel, self.send_queue = socket, channel, outlet
        self.receive_window = ReceiveWindow(window)
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._descriptor = -1  # of the connection itself, known with its first message
        self.fd = int(socket.getsockopt(zmq.FD))

    def send(self, envelope: Envelope) -> bool:
        """Past queue and credit, for what is free of it; False when libzmq is full."""
        with self._lock:
            return not self._closed and self._send_frames(encode_envelope(envelope))

    def try_send_now(self, envelope: Envelope) -> bool:
        """As `SendQueue.send_now`."""
        with self._lock:
            return not self._closed and self.send_queue.try_send_now(envelope, self._send_frames)

    def flush(self) -> bool:
        """Sends what is queued and may go, and a grant that is due; True when libzmq can take no more."""
        with self._lock:
            if self._closed:
                return False
            grant = self.receive_window.next_grant()
            if grant is not None and self._send_frames(encode_envelope(Envelope(grant))):
                self.receive_window.mark_granted(grant)
            return self.send_queue.flush(self._send_frames)

    def send_chunk(self, envelope: Envelope) -> bool:
        """Past the queue, for which the outlet's `may_send` has said yes; False when libzmq is full."""
        with self._lock:
            return not self._closed and self.send_queue.send(encode_envelope(envelope), self._send_frames)

    def receive(self) -> tuple[Envelope, int] | None:
        """The next message and what it was charged, without waiting, or None. Raises WireError.

        Who takes it in gives its charge back to the window; what is free of credit was charged nothing.
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
        size, gauges = credit_cost_bytes(parts), self.send_queue.metrics
        gauges.received += 1
        gauges.received_bytes += size
        if isinstance(envelope.message, CREDIT_EXEMPT):
            if isinstance(envelope.message, CreditGrant):
                self.send_queue.add_credit(envelope.message)
            return envelope, 0
        self.receive_window.charge(size)
        return envelope, size

    def release(self, charge: int) -> bool:
        """A message was taken in. Returns whether a grant is due, which goes with the next flush."""
        return charge > 0 and self.receive_window.release(1, charge)

    @property
    def silent_s(self) -> float:
        """Seconds since anything came on the connection, whole messages or not."""
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
    """Four CURVE connections under one fresh session. One thread calls it; its lines may be used by others.

    libzmq's own reconnecting is off: a link that has lost one connection is closed, and the client opens another, so
    that nothing sent under one session is ever delivered under the next.
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
        self._elsewhere: Collection[Channel] = ()
        session = new_session_id()
        for channel, window in channel_limits(limits).items():
            socket = contexts.for_channel(channel).socket(zmq.DEALER)
            configure_socket(socket, limits, channel)
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server_key.encode()
            socket.setsockopt(zmq.ROUTING_ID, channel.value + session)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._watch(socket.get_monitor_socket(_MONITORED_EVENTS))
            self.sockets[channel] = ChannelSocket(socket, send_queues[channel], window, limits, channel)
            self._poll.register(self.sockets[channel].fd, select.POLLIN)
            enable_ipv6(socket, endpoint)
            socket.connect(endpoint)

    def _watch(self, monitor: ZmqSocket) -> None:
        """From the first `readable` on its file descriptor tells of what comes."""
        has_message(monitor)
        descriptor = int(monitor.getsockopt(zmq.FD))
        self._monitors[descriptor] = monitor
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float, read_elsewhere: Collection[Channel] = ()) -> None:
        """Blocks until something may have arrived, the wake-up is set, or the timeout is over.

        Args:
            elsewhere: the channels whose lines other threads read: what comes there ends no wait here.

        Raises:
            Refused: the gateway does not know our key.
            LinkDown: a connection has ended.
        """
        self._leave_to_others(read_elsewhere)
        pending = any(line.has_message for channel, line in self.sockets.items() if channel not in read_elsewhere)
        timeout_s = 0.0 if pending else max(0.0, timeout_s)
        for descriptor, _ in self._poll.poll(math.ceil(1e3 * timeout_s)):
            if descriptor == self._wakeup.fileno():
                self._wakeup.clear()
            elif (monitor := self._monitors.get(descriptor)) is not None and has_message(monitor):
                self._raise_end(monitor)

    def _leave_to_others(self, elsewhere: Collection[Channel]) -> None:
        for channel, line in self.sockets.items():
            if channel in elsewhere and channel not in self._elsewhere:
                self._poll.unregister(line.fd)
            elif channel in self._elsewhere and channel not in elsewhere:
                self._poll.register(line.fd, select.POLLIN)
        self._elsewhere = elsewhere

    def flush(self) -> bool:
        """Sends what is queued on each channel, control first; True when libzmq can take no more."""
        return any([line.flush() for line in self.sockets.values()])

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Shows the gateway that each connection carries what we send.

        Raises:
            LinkDown: nothing has come on another than control for `stuck_after_s`; the client judges control.
        """
        for channel, line in self.sockets.items():
            line.send(Envelope(heartbeat))  # a full pipe is a beat of its own
            if channel is not Channel.CONTROL and (silent_s := line.silent_s) > self._stuck_after_s:
                raise LinkDown(
                    f"{self.endpoint}: the {channel.name.lower()} connection was silent for {silent_s:.1f} s"
                )

    def _raise_end(self, monitor: ZmqSocket) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == ZAP_DENIED:
            raise SessionRefused(f"{self.endpoint} does not allow this key; run `user-sys keys allow` there")
        raise LinkDown(f"{self.endpoint}: {_DISCONNECT_REASONS.get(int(event['event']), 'the handshake failed')}")

    def close(self, linger_ms: int = 0) -> None:
        """Drops the connections and what is in their pipes; the control channel has `farewell_ms` to empty its own."""
        for channel, line in self.sockets.items():
            line.close(linger_ms if channel is Channel.CONTROL else 0)
        for monitor in self._monitors.values():
            monitor.close(0)


READER_GRACE_S = 0.1  # a thread that has waited once is expected back for so long
READER_POLL_S = 0.25


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """A message in the inbox; taking it gives its charge back to the line that it came on."""

    envelope: Envelope
    socket: ChannelSocket
    charge: int


class ChannelReader:
    """An inbox whose waiting thread reads the line of one channel while one is attached.

    One thread at a time waits for the line; others that wait are served from what it reads. While nobody waits, and
    nobody has waited within `READER_GRACE_S`, whoever attached the line must read it (`drain`).

    Args:
        take_in: reads a line empty into the inbox; never raises.
    """

    def __init__(self, capacity: int, read_available: Callable[[ChannelSocket], None]) -> None:
        self.inbox: CoalescingQueue[ReceivedMessage] = CoalescingQueue(capacity)
        self._take_in = read_available
        self._draining = threading.Lock()  # whoever reads a message also takes it in, before the next is read
        self._line: ChannelSocket | None = None
        self._turn, self._polling = threading.Lock(), threading.Lock()
        self._attached = threading.Condition()
        self._ident = 0
        self._left_s = float("-inf")
        self._wakeup = Wakeup()
        self._poll: select.poll | None = None
        self._polled: ChannelSocket | None = None

    @property
    def is_reading(self) -> bool:
        """Whether a thread reads the line, or has done so just now."""
        return self._ident != 0 or time.monotonic() - self._left_s < READER_GRACE_S

    def attach(self, line: ChannelSocket) -> None:
        with self._attached:
            self._line = line
            self._attached.notify_all()

    def detach(self) -> None:
        """Nobody uses the line's file descriptor any more when this returns."""
        self._line = None
        self._wakeup.set()
        with self._polling:
            return

    def wait_idle(self) -> None:
        """What other threads have read of a line that was detached and closed is taken in when this returns."""
        with self._draining:
            return

    def drain(self, line: ChannelSocket) -> None:
        """Takes in what has arrived on `line`, in its order, whichever threads read it."""
        with self._draining:
            self._take_in(line)

    def put(self, envelope: Envelope, line: ChannelSocket, charge: int) -> int:
        """Keeps a message until it is taken; returns what of its charge is to be given back at once.

        A state may be replaced by its successor before anybody takes it: only other messages wait at their own charge.
        """
        key = coalescing_key(envelope.message)
        kept = ReceivedMessage(envelope, line, charge if key is None else 0)
        if not self.inbox.put(kept, key):
            return charge
        if self._ident not in (0, threading.get_ident()):
            self._wakeup.set()
        return charge - kept.charge

    def get(self, timeout_s: float) -> ReceivedMessage | None:
        """The oldest message, or None after `timeout_s`."""
        if timeout_s <= 0:
            if self._line is not None and not len(self.inbox):
                self.drain(self._line)
            return self.inbox.get_nowait()
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(blocking=False):
            return self.inbox.get(timeout_s)
        try:
            self._ident = threading.get_ident()
            return self._read(deadline)
        finally:
            self._left_s = time.monotonic()
            self._ident = 0
            self._turn.release()

    def _read(self, deadline: float) -> ReceivedMessage | None:
        while (item := self.inbox.get_nowait()) is None:
            line = self._line
            if line is not None:
                self.drain(line)
                if len(self.inbox):
                    continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            self._wait(line, min(remaining_s, READER_POLL_S))
        return item

    def _wait(self, line: ChannelSocket | None, timeout_s: float) -> None:
        """Until something may have come, or the line has changed. Without a line no file descriptor is touched."""
        if line is None:
            with self._attached:
                if self._line is None:
                    self._attached.wait(timeout_s)
            return
        with self._polling:
            if self._line is not line:
                return  # detached: its file descriptor may be another's by now
            if self._polled is not line or self._poll is None:
                self._poll, self._polled = select.poll(), line
                self._poll.register(self._wakeup.fileno(), select.POLLIN)
                self._poll.register(line.fd, select.POLLIN)
            if self._wakeup.fileno() in dict(self._poll.poll(1e3 * timeout_s)):
                self._wakeup.clear()

    def close(self) -> None:
        """A thread that waits goes on waiting, for what will not come, until its time is over."""
        self.detach()
        self._wakeup.close()


@dataclass(frozen=True)
class PendingChunk:
    """A chunk that no acknowledgement has covered yet."""

    sequence: int
    episode: str
    index: int
    packet: bytes | memoryview


class ChunkSource(Protocol):
    """Where chunks wait. Called from the tunnel's thread.

    Attributes:
        stream: names this source for good; within a stream no sequence number is ever given twice.
    """

    stream: str

    def __len__(self) -> int:
        """Durable chunks that are not acknowledged. Any thread may ask."""

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        """Durable chunks with a greater sequence, in order."""

    def acknowledge(self, sequence: int) -> None:
        """All chunks up to and including `sequence` are durable at the gateway, or set aside."""

    def set_aside(self, sequence: int, reason: str) -> None:
        """The gateway will never take this chunk: keep it where a person finds it."""

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        """Calls `appended` from any thread whenever a chunk has become durable; None ends that."""


class ChunkSender:
    """Sends a source's chunks. One thread calls it.

    Args:
        on_reply: takes the time from sending a chunk to its durable acknowledgement.
    """

    def __init__(self, source: ChunkSource, settle: LatencyHistogram) -> None:
        self.source = source
        self._settle = settle
        self._under_way: deque[tuple[int, float]] = deque()
        self._sent = -1

    def resume(self, resume_after: int) -> None:
        """A new session: chunks up to `resume_after` are durable there, everything else is sent again."""
        self._under_way.clear()
        self._sent = -1
        if resume_after >= 0:
            self.source.acknowledge(resume_after)

    def send_pending(self, line: ChannelSocket) -> bool:
        """Sends what credit and bandwidth allow; True when libzmq can take no more."""
        if not line.send_queue.can_send():
            return False
        for chunk in self.source.pending(self._sent):
            offer = ChunkOffer(sequence=chunk.sequence, episode=chunk.episode, index=chunk.index)
            if not line.send_chunk(Envelope(offer, chunk.packet)):
                return True
            self._sent = chunk.sequence
            self._under_way.append((chunk.sequence, time.monotonic()))
            if not line.send_queue.can_send():
                return False
        return False

    def on_reply(self, answer: ChunkAck | ChunkRefusal) -> None:
        """Takes the gateway's answer. A refused chunk is set aside, and goes with the next acknowledgement."""
        if isinstance(answer, ChunkRefusal):
            self.source.set_aside(answer.sequence, answer.reason)
            return
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= answer.sequence:
            self._settle.add(now - self._under_way.popleft()[1])
        self.source.acknowledge(min(answer.sequence, self._sent))
