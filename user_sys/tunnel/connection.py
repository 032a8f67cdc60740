"""ZeroMQ sockets that never block, the kernel's state of their connections, and the client's four of one session."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import math
import os
import platform
import resource
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from user_sys.errors import LinkDown, SessionRefused
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.tunnel.flow_control import SendFrames, SendQueue
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import MAX_PARTS, Channel, Envelope, Payload, new_session_id

ZmqSocket: TypeAlias = "zmq.Socket[bytes]"

RECEIVE_BURST = 64  # messages of one connection in a row
ZERO_COPY_BYTES = 64 << 10  # a copy of a smaller frame costs less than a reference to it
TRAFFIC_CLASS = {  # DSCP EF, EF, AF11, CS1
    Channel.CONTROL: 0xB8,
    Channel.STOP: 0xB8,
    Channel.WEIGHTS: 0x28,
    Channel.EXPERIENCE: 0x20,
}
_POLLIN, _MORE = int(zmq.POLLIN), zmq.DONTWAIT | zmq.SNDMORE  # enum arithmetic takes longer than a socket call

TIME_SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr, version 0: size, policy, flags, nice, priority, runtime, deadline, period
_SCHED_ATTR = struct.Struct("IIQiIQQQ")

CLOSED_SOCKET_ERRNOS = (errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.ENOTCONN, errno.EINVAL)
"""Errors of a descriptor that libzmq has closed, or that is not a TCP connection."""
MAX_DESCRIPTORS = 65536
_TCP_INFO_BYTES = 136  # struct tcp_info, linux/tcp.h, since Linux 4.1
_LAST_RECEIVED = struct.Struct("<I")  # tcpi_last_data_recv
_LAST_RECEIVED_AT = 52
_BYTES_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received
_BYTES_RECEIVED_AT = 128

ZAP_DENIED = 400
ACK_TIMES = 512  # the newest times that count in the metrics
IN_FLIGHT_S, IN_FLIGHT_ROUND_TRIPS = 1.0, 2.5  # of chunks: the longer of both, at the rate of acknowledgements
FASTEST_ACK_VALID_S = 30.0
INITIAL_WINDOW_BYTES = 256 << 10  # before the first acknowledgement
MIN_ACK_S = 1e-3
_DISCONNECT_REASONS = {
    int(zmq.EVENT_CLOSED): "no gateway listens there",
    int(zmq.EVENT_DISCONNECTED): "the gateway closed the connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: check the gateway's public key, or the delay",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: another program listens there",
}
_MONITORED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | sum(_DISCONNECT_REASONS)
_CONTROL_THREAD, _BULK_THREAD = 1, 2  # bit masks of libzmq's I/O threads


def request_short_time_slice() -> bool:
    """Requests a short time slice for the calling thread, so that it runs soon after it wakes on a busy machine.

    Its share of the processor does not change. Linux honours the request from 6.12 on (EEVDF's custom slices); other
    systems ignore it. Returns whether the system call succeeded.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return False
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, 0, 0, 0, 0, TIME_SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, threading.get_native_id(), attributes, 0) == 0)


@dataclass(frozen=True)
class TcpState:
    """State of a TCP connection.

    Attributes:
        unread_bytes: the part of `received_bytes` that this process has not read yet.
        silent_s: time since the last received bytes, or since the connection was made.
    """

    received_bytes: int
    unread_bytes: int
    silent_s: float


def duplicate_socket(descriptor: int) -> socket.socket | None:
    """The socket of `descriptor` under a new descriptor; None if it is closed, or if too many files are open.

    libzmq may close its descriptor at any time, and another file may then reuse the number. If that file is not a
    socket, the copy is closed again, so that locks and pipes of the file are not kept open.
    """
    copy = -1
    try:
        copy = os.dup(descriptor)
        return socket.socket(fileno=copy)
    except OSError as error:
        if copy >= 0:
            os.close(copy)
        if error.errno in (*CLOSED_SOCKET_ERRNOS, errno.EMFILE, errno.ENFILE):
            return None
        raise


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open files to `MAX_DESCRIPTORS` if the system allows it. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def read_tcp_state(descriptor: int) -> TcpState | None:
    """The state of libzmq's TCP connection `descriptor`; None for a closed connection."""
    connection = duplicate_socket(descriptor)
    if connection is None:
        return None
    unread = array.array("i", [0])
    with connection:
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            fcntl.ioctl(connection, termios.FIONREAD, unread)
        except OSError as error:
            if error.errno in CLOSED_SOCKET_ERRNOS:
                return None
            raise
    if len(info) != _TCP_INFO_BYTES:
        return None
    (received,) = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)
    (silent_ms,) = _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT)
    return TcpState(received, unread[0], silent_ms / 1e3)


def silence_s(descriptor: int) -> float:
    """Seconds since the last bytes, of complete messages or not, on libzmq's connection `descriptor`.

    Zero for a closed connection, which libzmq reports.
    """
    state = read_tcp_state(descriptor)
    return 0.0 if state is None else state.silent_s


def receive_frames(socket: ZmqSocket) -> list[zmq.Frame] | None:
    """The frames of the next message, or None; does not block. Drops frames beyond `MAX_PARTS` + 2."""
    if not has_message(socket):  # the check costs less than an exception
        return None
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        if len(frames) < MAX_PARTS + 2:
            frames.append(frame)
    return frames


def send_frames(socket: ZmqSocket, frames: list[Payload]) -> bool:
    """Passes a message to libzmq without blocking. Returns False if the peer is gone or its pipe is full."""
    *head, last = frames
    try:
        for frame in head:
            socket.send(frame, _MORE, copy=len(frame) < ZERO_COPY_BYTES)
        socket.send(last, zmq.DONTWAIT, copy=len(last) < ZERO_COPY_BYTES)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, errno.EPIPE):
            return False
        raise
    return True


def has_message(socket: ZmqSocket) -> bool:
    """Whether a message is available. Call it after any other call on the socket: its descriptor is edge-triggered."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def configure_socket(socket: ZmqSocket, limits: TunnelLimits, channel: Channel | None = None) -> None:
    """Sets the limits and timeouts that both ends share; a client passes its channel.

    The kernel detects a half-open TCP connection: within 30 s if it is idle, and within `stuck_after_s` if it has
    unacknowledged bytes. Routers and Wi-Fi that honour DSCP let control overtake bulk.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, limits.pipe_messages)
    socket.setsockopt(zmq.RCVHWM, limits.pipe_messages)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1e3))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, int(limits.stuck_after_s * 1e3))
    if channel is not None:
        socket.setsockopt(zmq.TOS, TRAFFIC_CLASS[channel])


def enable_ipv6(socket: ZmqSocket, endpoint: str) -> None:
    """Enables IPv6 if `endpoint` has an address in brackets.

    With IPv6 enabled, libzmq would resolve names to IPv6 only and report IPv4 peers under mapped addresses.
    """
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))


class Wakeup:
    """Interrupts the poll of another thread: any thread calls `set`; the polling thread polls `fileno` and `clear`s it.

    After `close`, `set` has no effect.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is not set
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


def new_context() -> zmq.Context[ZmqSocket]:
    """A context with an I/O thread for control and e-stops, and one for bulk: 1 MB takes 1 ms to encrypt."""
    return zmq.Context(2)


class Connection:
    """The four CURVE sockets of one session. One thread calls it.

    libzmq does not reconnect. If one socket fails, the client closes all four and opens a new session, so that no
    message of a session is delivered under the next one.
    """

    def __init__(
        self,
        context: zmq.Context[ZmqSocket],
        endpoint: str,
        keys: KeyPair,
        server_key: str,
        limits: TunnelLimits,
        wakeup: Wakeup,
    ) -> None:
        self.endpoint = endpoint
        self._wakeup = wakeup
        self._sockets: dict[Channel, ZmqSocket] = {}
        self._descriptors: dict[Channel, int] = {}  # of the connections themselves; the first message shows each
        self._monitors: dict[int, ZmqSocket] = {}
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)
        session = new_session_id()
        for channel in Channel:
            self._sockets[channel] = socket = context.socket(zmq.DEALER)
            configure_socket(socket, limits, channel)
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server_key.encode()
            socket.setsockopt(zmq.ROUTING_ID, channel.value + session)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            is_urgent = channel in (Channel.CONTROL, Channel.STOP)
            socket.setsockopt(zmq.AFFINITY, _CONTROL_THREAD if is_urgent else _BULK_THREAD)
            self._watch(socket.get_monitor_socket(_MONITORED_EVENTS))
            self._poll.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
            enable_ipv6(socket, endpoint)
            socket.connect(endpoint)

    def _watch(self, monitor: ZmqSocket) -> None:
        has_message(monitor)  # arms the descriptor, which is edge-triggered
        descriptor = int(monitor.getsockopt(zmq.FD))
        self._monitors[descriptor] = monitor
        self._poll.register(descriptor, select.POLLIN)

    def send(self, channel: Channel, frames: list[Payload]) -> bool:
        """Passes a message to libzmq without blocking. Returns False if it accepts no more."""
        return send_frames(self._sockets[channel], frames)

    def receive(self, channel: Channel) -> list[Payload] | None:
        """The frames of the next message, or None; does not block."""
        frames = receive_frames(self._sockets[channel])
        if frames is None:
            return None
        if channel not in self._descriptors:
            self._descriptors[channel] = int(frames[0].get(zmq.SRCFD))
        return [frame.buffer for frame in frames]

    def silence_s(self, channel: Channel) -> float:
        """Seconds since the last received bytes, of complete messages or not."""
        return silence_s(self._descriptors.get(channel, -1))

    def wait(self, timeout_s: float) -> None:
        """Blocks until a message may have arrived, the wake-up is set, or the timeout ends.

        Raises:
            SessionRefused: the gateway does not allow our key.
            LinkDown: a connection has ended.
        """
        is_readable = any([has_message(socket) for socket in self._sockets.values()])
        timeout_s = 0.0 if is_readable else max(0.0, timeout_s)
        for descriptor, _ in self._poll.poll(math.ceil(1e3 * timeout_s)):
            if descriptor == self._wakeup.fileno():
                self._wakeup.clear()
            elif (monitor := self._monitors.get(descriptor)) is not None and has_message(monitor):
                self._raise_disconnected(monitor)

    def _raise_disconnected(self, monitor: ZmqSocket) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == ZAP_DENIED:
            raise SessionRefused(f"{self.endpoint} does not allow this key; run `user-sys keys allow` there")
        raise LinkDown(f"{self.endpoint}: {_DISCONNECT_REASONS.get(int(event['event']), 'the handshake failed')}")

    def close(self, linger_ms: int = 0) -> None:
        """Closes the sockets and drops their unsent messages; only control gets `linger_ms` to send its own."""
        for channel, each in self._sockets.items():
            each.disable_monitor()
            each.close(linger_ms if channel is Channel.CONTROL else 0)
        for monitor in self._monitors.values():
            monitor.close(0)


class PendingChunk(NamedTuple):
    """A chunk that is not acknowledged yet."""

    sequence: int
    packet: Payload


class _SentChunk(NamedTuple):
    """A chunk in flight.

    Attributes:
        done_bytes: of the chunks of its session that were done when it was sent.
        is_alone: no other chunk was in flight when it was sent.
    """

    size_bytes: int
    sent_s: float
    done_bytes: int
    is_alone: bool


class ChunkSource(Protocol):
    """A source of durable chunks. The tunnel's thread calls it."""

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
    """Sends the chunks of a source. One thread calls it; any thread may call `scalars`.

    Chunks in flight delay all that shares the uplink: pictures, statuses and heartbeats. So these are as many bytes as
    the gateway acknowledges within `IN_FLIGHT_S`, and at least one chunk. A link with a longer round trip has more in
    flight: the gateway syncs chunks in groups, so an acknowledgement may take twice as long as the fastest.

    Chunks in flight delay each other. So the fastest acknowledgement rises only with that of a chunk that was alone
    in flight. After `FASTEST_ACK_VALID_S` without one, the chunks in flight drain, and the next is sent alone
    (as ProbeRTT of BBR, https://doi.org/10.1145/3009824).
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._ack_times_s: deque[float] = deque(maxlen=ACK_TIMES)
        self._in_flight: dict[int, _SentChunk] = {}  # by sequence
        self.restart()

    def restart(self) -> None:
        """Starts a new session: all chunks that are not acknowledged are sent again."""
        self._in_flight.clear()
        self._sent = -1
        self._sent_bytes = self._done_bytes = 0
        self._window_bytes, self._fastest_ack_s = INITIAL_WINDOW_BYTES, math.inf
        self._fastest_at_s = time.monotonic()

    def send_pending(self, send_queue: SendQueue, send: SendFrames) -> bool:
        """Sends chunks while window, credit and bandwidth allow. Returns True if libzmq accepts no more."""
        if not self._can_send(send_queue):
            return False
        for chunk in self.source.pending(self._sent):
            if not send_queue.send(Envelope(ChunkOffer(sequence=chunk.sequence), chunk.packet), send):
                return True
            self._sent = chunk.sequence
            is_alone = self._sent_bytes == self._done_bytes
            self._in_flight[chunk.sequence] = _SentChunk(
                len(chunk.packet), time.monotonic(), self._done_bytes, is_alone
            )
            self._sent_bytes += len(chunk.packet)
            if not self._can_send(send_queue):
                return False
        return False

    def _can_send(self, send_queue: SendQueue) -> bool:
        window_bytes = 1 if self._is_probe_due(time.monotonic()) else self._window_bytes
        return self._sent_bytes - self._done_bytes < window_bytes and send_queue.can_send()

    def _is_probe_due(self, now: float) -> bool:
        return now - self._fastest_at_s > FASTEST_ACK_VALID_S

    def on_reply(self, reply: ChunkAck | ChunkRefusal) -> None:
        """Handles the gateway's reply. A refused chunk is set aside; the next acknowledgement covers it."""
        if isinstance(reply, ChunkRefusal):
            if (refused := self._in_flight.pop(reply.sequence, None)) is not None:
                self._done_bytes += refused.size_bytes
            self.source.set_aside(reply.sequence, reply.reason)
            return
        now = time.monotonic()
        for sequence in [each for each in self._in_flight if each <= reply.sequence]:
            self._on_acknowledged(self._in_flight.pop(sequence), now)
        self.source.acknowledge(min(reply.sequence, self._sent))

    def _on_acknowledged(self, chunk: _SentChunk, now: float) -> None:
        """Measures the rate of acknowledgements since the chunk was sent, which sets the window."""
        ack_s = max(now - chunk.sent_s, MIN_ACK_S)
        self._ack_times_s.append(ack_s)
        self._done_bytes += chunk.size_bytes
        is_probe = chunk.is_alone and self._is_probe_due(now)
        if chunk.is_alone or ack_s <= self._fastest_ack_s:
            self._fastest_ack_s, self._fastest_at_s = ack_s, now
        if is_probe:
            return  # the rate of one chunk does not show that of the link
        bytes_per_s = (self._done_bytes - chunk.done_bytes) / ack_s
        long_bytes = bytes_per_s * IN_FLIGHT_ROUND_TRIPS * self._fastest_ack_s - chunk.size_bytes
        self._window_bytes = 1 + int(max(bytes_per_s * IN_FLIGHT_S, long_bytes))  # the last chunk exceeds it

    def scalars(self) -> dict[str, float]:
        """The time from sending a chunk to its durable acknowledgement; empty before the first."""
        times_s = sorted(self._ack_times_s)
        if not times_s:
            return {}
        # The control loop calls this, and the first np.quantile of a process takes 40 ms.
        p50, p99 = (times_s[round(share * (len(times_s) - 1))] for share in (0.5, 0.99))
        return {"experience/ack_p50_ms": 1e3 * p50, "experience/ack_p99_ms": 1e3 * p99}
