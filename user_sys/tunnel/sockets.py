"""What a thread may ask of the scheduler without any permission.

What the C library does with memory that was freed.

What the kernel knows of a TCP connection: what has come, and how long ago.

libzmq's sockets as the tunnel uses them: never waiting, bounded, and woken from other threads.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import socket
import socket as sockets
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

TIME_SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct(
    "IIQiIQQQ"
)  # struct sched_attr, version 0: size, policy, flags, nice, priority, runtime, ...


def request_short_time_slice() -> bool:
    """Asks for a short time slice for the calling thread, so that it runs soon after it wakes beside busy ones.

    Its share of the processor stays what it is. Linux honours it from 6.12 on (EEVDF's custom slices); elsewhere this
    does nothing. Returns whether the request was made.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return False
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, 0, 0, 0, 0, TIME_SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, threading.get_native_id(), attributes, 0) == 0)


MMAP_THRESHOLD_BYTES = 32 << 20  # glibc comes to this by itself, with the first block of as much that is freed
TRIM_THRESHOLD_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def retain_freed_memory() -> bool:
    """Has the process keep up to `TRIM_THRESHOLD_BYTES` of freed memory for each of its heaps, instead of some 100 kB.

    Messages of bulk are allocated by libzmq's thread and freed by whoever reads them. Otherwise their memory goes back
    to the kernel several times in each push of weights, and to be given it anew takes a tenth of the time that
    decrypting does. Only glibc can be asked; elsewhere this does nothing. Returns whether it was asked.
    """
    ask = getattr(ctypes.CDLL(None), "mallopt", None)
    if ask is None:
        return False
    return bool(ask(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and ask(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))


CLOSED_SOCKET_ERRNOS = (errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.ENOTCONN, errno.EINVAL)
"""How a descriptor of libzmq's fails that was closed meanwhile, or that is no TCP connection."""
_TCP_INFO_BYTES = 136  # struct tcp_info, linux/tcp.h, since Linux 4.1
_LAST_RECEIVED = struct.Struct("<I")  # tcpi_last_data_recv
_LAST_RECEIVED_AT = 52
_BYTES_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received
_BYTES_RECEIVED_AT = 128


@dataclass(frozen=True)
class TcpState:
    """`silent_s` counts from the last bytes that came, or from the connection's beginning.

    Of `received_bytes`, this process has still to read `unread_bytes`.
    """

    received_bytes: int
    unread_bytes: int
    silent_s: float


def read_tcp_state(connection: socket.socket) -> TcpState | None:
    """None for what is no TCP connection, or none any more."""
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
    """The connection under a descriptor of ours, since libzmq may close its own at any moment; None when it has.

    By then the number may be that of another file: nothing of it is kept, or a lock would stay and a pipe not end.
    """
    own = -1
    try:
        own = os.dup(descriptor)
        return socket.socket(fileno=own)
    except OSError as error:
        if own >= 0:
            os.close(own)
        if error.errno in CLOSED_SOCKET_ERRNOS:
            return None
        raise


@contextmanager
def open_tcp_state(descriptor: int) -> Iterator[tuple[socket.socket, TcpState] | None]:
    """libzmq's TCP connection `descriptor` and its state, while the block lasts; None for anything else."""
    connection = duplicate_socket(descriptor)
    if connection is None:
        yield None
        return
    with connection:
        state = read_tcp_state(connection)
        yield None if state is None else (connection, state)


def silence_s(descriptor: int) -> float:
    """Seconds since anything came on libzmq's connection `descriptor`, whole messages or not.

    Zero for a Unix socket, between whose ends nothing can be lost, and for what is closed, which libzmq notices.
    """
    with open_tcp_state(descriptor) as found:
        return 0.0 if found is None else found[1].silent_s


ZmqSocket: TypeAlias = "zmq.Socket[bytes]"

ZAP_DOMAIN = b"user-sys"
ZERO_COPY_BYTES = 64 << 10  # handing over a smaller frame costs more than copying it
_POLLIN, _MORE = int(zmq.POLLIN), zmq.DONTWAIT | zmq.SNDMORE  # computing with flags takes longer than a call
TRAFFIC_CLASS = {  # DSCP EF, EF, AF11, CS1
    Channel.CONTROL: 0xB8,
    Channel.STOP: 0xB8,
    Channel.WEIGHTS: 0x28,
    Channel.EXPERIENCE: 0x20,
}


def receive_frames(socket: ZmqSocket) -> list[zmq.Frame] | None:
    """The next message's frames without waiting, or None. Frames beyond `MAX_PARTS` + 2 are dropped as they come."""
    if not has_message(socket):  # asking costs less than an exception
        return None
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        if len(frames) < MAX_PARTS + 2:
            frames.append(frame)
    return frames


def send_frames(socket: ZmqSocket, frames: list[Payload]) -> bool:
    """Hands a message to libzmq without waiting; False when the peer is gone or its pipe is full."""
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
    """Whether a message waits. Asked after any other call on the socket, whose file descriptor tells each news once."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def configure_socket(socket: ZmqSocket, limits: TunnelLimits, channel: Channel | None = None) -> None:
    """Bounds and liveness that both ends share; a client says which channel it is for.

    A half-open TCP connection is found by the kernel: an idle one within 30 s, one with unacknowledged bytes within
    `stuck_after_s`. Routers and Wi-Fi that honour DSCP let control overtake bulk.
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
    """Lets `socket` dial or listen on IPv6 where `endpoint` says so, by an address in brackets.

    Not always: libzmq would then look for no other address of a name, and call IPv4 peers by mapped addresses.
    """
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))


class Wakeup:
    """Interrupts another thread's poll: `set` from any thread, poll `fileno` for reading, then `clear`.

    After `close`, `set` does nothing.
    """

    def __init__(self) -> None:
        self._reader, self._writer = sockets.socketpair()
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
            except BlockingIOError:  # full of wake-ups already: the thread will wake
                return

    def clear(self) -> None:
        try:
            while len(self._reader.recv(4096)) == 4096:
                pass
        except BlockingIOError:  # nobody called: a poll may wake for another reason
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
