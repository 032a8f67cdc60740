"""libzmq's sockets as the tunnel uses them: never waiting, bounded, and woken from other threads."""

from __future__ import annotations

import errno
import socket as sockets
import threading
from typing import TypeAlias

import zmq

from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.wire import MAX_PARTS, Channel, Payload

Socket: TypeAlias = "zmq.Socket[bytes]"

ZAP_DOMAIN = b"user-sys"
ZERO_COPY_BYTES = 64 << 10  # handing over a smaller frame costs more than copying it
_POLLIN, _MORE = int(zmq.POLLIN), zmq.DONTWAIT | zmq.SNDMORE  # computing with flags takes longer than a call
TRAFFIC_CLASS = {  # DSCP EF, EF, AF11, CS1
    Channel.CONTROL: 0xB8,
    Channel.STOP: 0xB8,
    Channel.WEIGHTS: 0x28,
    Channel.EXPERIENCE: 0x20,
}


def receive_frames(socket: Socket) -> list[zmq.Frame] | None:
    """The next message's frames without waiting, or None. Frames beyond `MAX_PARTS` + 2 are dropped as they come."""
    if not readable(socket):  # asking costs less than an exception
        return None
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        if len(frames) < MAX_PARTS + 2:
            frames.append(frame)
    return frames


def send_frames(socket: Socket, frames: list[Payload]) -> bool:
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


def readable(socket: Socket) -> bool:
    """Whether a message waits. Asked after any other call on the socket, whose file descriptor tells each news once."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def configure(socket: Socket, limits: TunnelLimits, channel: Channel | None = None) -> None:
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


def admit_ipv6(socket: Socket, endpoint: str) -> None:
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
