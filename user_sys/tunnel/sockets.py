"""Non-blocking, bounded ZeroMQ sockets, the kernel's state of their TCP connections, and settings of their threads."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import MAX_PARTS, Channel, Payload

ZmqSocket: TypeAlias = "zmq.Socket[bytes]"

ZAP_DOMAIN = b"user-sys"
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

MMAP_THRESHOLD_BYTES = 32 << 20  # glibc raises its threshold to this after the first freed block of that size
TRIM_THRESHOLD_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

CLOSED_SOCKET_ERRNOS = (errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.ENOTCONN, errno.EINVAL)
"""Errors of a descriptor that libzmq has closed, or that is not a TCP connection."""
_TCP_INFO_BYTES = 136  # struct tcp_info, linux/tcp.h, since Linux 4.1
_LAST_RECEIVED = struct.Struct("<I")  # tcpi_last_data_recv
_LAST_RECEIVED_AT = 52
_BYTES_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received
_BYTES_RECEIVED_AT = 128


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


def retain_freed_memory() -> bool:
    """Lets each heap of the process retain up to `TRIM_THRESHOLD_BYTES` of freed memory; the default is about 100 kB.

    libzmq's thread allocates bulk messages and the reading thread frees them. By default their memory returns to the
    kernel several times in each push of weights, which costs a tenth of the decryption time. Only glibc has this
    setting. Returns whether it was applied.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))


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


def read_tcp_state(connection: socket.socket) -> TcpState | None:
    """The state of a TCP connection; None for another socket or a closed one."""
    unread = array.array("i", [0])
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


def duplicate_socket(descriptor: int) -> socket.socket | None:
    """The socket of `descriptor` under a new descriptor; None if it is closed.

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
        if error.errno in CLOSED_SOCKET_ERRNOS:
            return None
        raise


@contextmanager
def open_tcp_state(descriptor: int) -> Iterator[tuple[socket.socket, TcpState] | None]:
    """Yields libzmq's TCP connection `descriptor` and its state; None for anything else."""
    connection = duplicate_socket(descriptor)
    if connection is None:
        yield None
        return
    with connection:
        state = read_tcp_state(connection)
        yield None if state is None else (connection, state)


def silence_s(descriptor: int) -> float:
    """Seconds since the last bytes, of complete messages or not, on libzmq's connection `descriptor`.

    Zero for a Unix socket, which loses no bytes, and for a closed connection, which libzmq reports.
    """
    with open_tcp_state(descriptor) as found:
        return 0.0 if found is None else found[1].silent_s


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
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._writer.send(b"\0")
            except BlockingIOError:  # the pair is full of wake-ups, so the thread will wake
                return

    def clear(self) -> None:
        try:
            while len(self._reader.recv(4096)) == 4096:
                pass
        except BlockingIOError:  # empty: the poll returned for another reason
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
