"""One attempt at a connection: three sockets to one port that live and die together."""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Collection, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from user_sys.errors import LinkDown, Refused
from user_sys.messages import Grant, Heartbeat
from user_sys.tunnel.credit import Window
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.local import widen
from user_sys.tunnel.outlet import Outlet
from user_sys.tunnel.session import channel_limits
from user_sys.tunnel.sockets import Socket, Wakeup, admit_ipv6, configure, readable, receive_frames, send_frames
from user_sys.tunnel.tcp_state import silence_s
from user_sys.tunnel.wire import (
    FREE,
    Channel,
    Envelope,
    Payload,
    decode,
    encode,
    new_session,
    size_of,
)

ZAP_DENIED = 400
_ENDS = {
    int(zmq.EVENT_CLOSED): "nothing listens there",
    int(zmq.EVENT_DISCONNECTED): "the gateway closed the connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: is the gateway's public key right?",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: no gateway of ours listens there",
}
_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | sum(_ENDS)


class Contexts:
    """libzmq's threads: one for control and e-stops, since encrypting a megabyte takes a millisecond; one for bulk.

    The bulk thread is a batch job to the kernel: when it becomes ready it does not displace a thread that runs.
    """

    def __init__(self) -> None:
        self._control: zmq.Context[Socket] = zmq.Context(1)
        self._bulk: zmq.Context[Socket] = zmq.Context(1)
        if hasattr(os, "SCHED_BATCH"):
            self._bulk.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)

    def of(self, channel: Channel) -> zmq.Context[Socket]:
        return self._control if channel in (Channel.CONTROL, Channel.STOP) else self._bulk

    def close(self) -> None:
        """All sockets must be closed before."""
        self._control.term()
        self._bulk.term()


class Line:
    """One channel's connection. Any thread may call it: a lock sees to it that one at a time uses the socket.

    Whoever has used the socket must read it empty, or tell somebody who will (`pending`): its file descriptor may then
    stay silent about a message that is there.
    """

    def __init__(self, socket: Socket, outlet: Outlet, window: ChannelLimits, limits: TunnelLimits, channel: Channel):
        self.socket, self.channel, self.outlet = socket, channel, outlet
        self.window = Window(window)
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._descriptor = -1  # of the connection itself, known with its first message
        self.fd = int(socket.getsockopt(zmq.FD))

    def send(self, envelope: Envelope) -> bool:
        """Past queue and credit, for what is free of it; False when libzmq is full."""
        with self._lock:
            return not self._closed and self._send_frames(encode(envelope))

    def send_now(self, envelope: Envelope) -> bool:
        """As `Outlet.send_now`."""
        with self._lock:
            return not self._closed and self.outlet.send_now(envelope, self._send_frames)

    def flush(self) -> bool:
        """Sends what is queued and may go, and a grant that is due; True when libzmq can take no more."""
        with self._lock:
            if self._closed:
                return False
            grant = self.window.due()
            if grant is not None and self._send_frames(encode(Envelope(grant))):
                self.window.granted(grant)
            return self.outlet.flush(self._send_frames)

    def send_chunk(self, envelope: Envelope) -> bool:
        """Past the queue, for which the outlet's `may_send` has said yes; False when libzmq is full."""
        with self._lock:
            return not self._closed and self.outlet.send(encode(envelope), self._send_frames)

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
                widen(self._descriptor)
        parts: list[Payload] = [frame.buffer for frame in frames]
        envelope = decode(self.channel, parts, self._limits)
        size, gauges = size_of(parts), self.outlet.gauges
        gauges.received += 1
        gauges.received_bytes += size
        if isinstance(envelope.message, FREE):
            if isinstance(envelope.message, Grant):
                self.outlet.grant(envelope.message)
            return envelope, 0
        self.window.charge(size)
        return envelope, size

    def release(self, charge: int) -> bool:
        """A message was taken in. Returns whether a grant is due, which goes with the next flush."""
        return charge > 0 and self.window.release(1, charge)

    @property
    def silent_s(self) -> float:
        """Seconds since anything came on the connection, whole messages or not."""
        return silence_s(self._descriptor)

    @property
    def pending(self) -> bool:
        with self._lock:
            return not self._closed and readable(self.socket)

    def close(self, farewell_ms: int) -> None:
        with self._lock:
            self._closed = True
            self.socket.disable_monitor()
            self.socket.close(farewell_ms)

    def _send_frames(self, frames: list[Payload]) -> bool:
        return send_frames(self.socket, frames)


class Link:
    """Four CURVE connections under one fresh session. One thread calls it; its lines may be used by others.

    libzmq's own reconnecting is off: a link that has lost one connection is closed, and the client opens another, so
    that nothing sent under one session is ever delivered under the next.
    """

    def __init__(
        self,
        contexts: Contexts,
        endpoint: str,
        keys: KeyPair,
        server_key: str,
        limits: TunnelLimits,
        outlets: Mapping[Channel, Outlet],
        wakeup: Wakeup,
    ) -> None:
        self.endpoint = endpoint
        self.lines: dict[Channel, Line] = {}
        self._monitors: dict[int, Socket] = {}
        self._wakeup = wakeup
        self._stuck_after_s = limits.stuck_after_s
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)
        self._elsewhere: Collection[Channel] = ()
        session = new_session()
        for channel, window in channel_limits(limits).items():
            socket = contexts.of(channel).socket(zmq.DEALER)
            configure(socket, limits, channel)
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server_key.encode()
            socket.setsockopt(zmq.ROUTING_ID, channel.value + session)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._watch(socket.get_monitor_socket(_EVENTS))
            self.lines[channel] = Line(socket, outlets[channel], window, limits, channel)
            self._poll.register(self.lines[channel].fd, select.POLLIN)
            admit_ipv6(socket, endpoint)
            socket.connect(endpoint)

    def _watch(self, monitor: Socket) -> None:
        """From the first `readable` on its file descriptor tells of what comes."""
        readable(monitor)
        descriptor = int(monitor.getsockopt(zmq.FD))
        self._monitors[descriptor] = monitor
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float, elsewhere: Collection[Channel] = ()) -> None:
        """Blocks until something may have arrived, the wake-up is set, or the timeout is over.

        Args:
            elsewhere: the channels whose lines other threads read: what comes there ends no wait here.

        Raises:
            Refused: the gateway does not know our key.
            LinkDown: a connection has ended.
        """
        self._leave_to_others(elsewhere)
        pending = any(line.pending for channel, line in self.lines.items() if channel not in elsewhere)
        timeout_s = 0.0 if pending else max(0.0, timeout_s)
        for descriptor, _ in self._poll.poll(math.ceil(1e3 * timeout_s)):
            if descriptor == self._wakeup.fileno():
                self._wakeup.clear()
            elif (monitor := self._monitors.get(descriptor)) is not None and readable(monitor):
                self._raise_end(monitor)

    def _leave_to_others(self, elsewhere: Collection[Channel]) -> None:
        for channel, line in self.lines.items():
            if channel in elsewhere and channel not in self._elsewhere:
                self._poll.unregister(line.fd)
            elif channel in self._elsewhere and channel not in elsewhere:
                self._poll.register(line.fd, select.POLLIN)
        self._elsewhere = elsewhere

    def flush(self) -> bool:
        """Sends what is queued on each channel, control first; True when libzmq can take no more."""
        return any([line.flush() for line in self.lines.values()])

    def beat(self, beat: Heartbeat) -> None:
        """Shows the gateway that each connection carries what we send.

        Raises:
            LinkDown: nothing has come on another than control for `stuck_after_s`; the client judges control.
        """
        for channel, line in self.lines.items():
            line.send(Envelope(beat))  # a full pipe is a beat of its own
            if channel is not Channel.CONTROL and (silent_s := line.silent_s) > self._stuck_after_s:
                raise LinkDown(
                    f"{self.endpoint}: the {channel.name.lower()} connection was silent for {silent_s:.1f} s"
                )

    def _raise_end(self, monitor: Socket) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == ZAP_DENIED:
            raise Refused(f"{self.endpoint} does not allow this key; run `user-sys keys allow` there")
        raise LinkDown(f"{self.endpoint}: {_ENDS.get(int(event['event']), 'the handshake failed')}")

    def close(self, farewell_ms: int = 0) -> None:
        """Drops the connections and what is in their pipes; the control channel has `farewell_ms` to empty its own."""
        for channel, line in self.lines.items():
            line.close(farewell_ms if channel is Channel.CONTROL else 0)
        for monitor in self._monitors.values():
            monitor.close(0)
