"""One attempt at a connection: three sockets to one port that live and die together."""

from __future__ import annotations

import math

import zmq
from zmq.utils.monitor import recv_monitor_message

from user_sys.errors import LinkDown, Refused
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.wire import (
    Channel,
    Envelope,
    Socket,
    TunnelLimits,
    Wakeup,
    configure,
    decode,
    encode,
    new_session,
    receive_frames,
    send_frames,
)

ZAP_DENIED = 400
IO_THREADS = 2  # the first for control alone: encrypting a megabyte takes a millisecond
_ENDS = {
    int(zmq.EVENT_CLOSED): "nothing listens there",
    int(zmq.EVENT_DISCONNECTED): "the gateway closed the connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: is the gateway's public key right?",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: no gateway of ours listens there",
}


class Link:
    """Three CURVE connections under one fresh session. One thread calls it.

    libzmq's own reconnecting is off: a link that has lost one connection is closed, and the client opens another, so
    that nothing sent under one session is ever delivered under the next.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        endpoint: str,
        keys: KeyPair,
        server_key: str,
        limits: TunnelLimits,
        wakeup: Wakeup,
    ) -> None:
        self._limits = limits
        self._endpoint = endpoint
        self._sockets: dict[Channel, Socket] = {}
        self._monitors: dict[Channel, Socket] = {}
        self._wakeup = wakeup
        self._poller = zmq.Poller()
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        session = new_session()
        for channel in Channel:
            socket = context.socket(zmq.DEALER)
            configure(socket, limits)
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server_key.encode()
            socket.setsockopt(zmq.ROUTING_ID, channel.value + session)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.AFFINITY, 1 if channel is Channel.CONTROL else 2)
            events = zmq.EVENT_HANDSHAKE_FAILED_AUTH
            for event in _ENDS:
                events |= event
            self._sockets[channel] = socket
            self._monitors[channel] = socket.get_monitor_socket(events)
            self._poller.register(socket, zmq.POLLIN)
            self._poller.register(self._monitors[channel], zmq.POLLIN)
            socket.connect(endpoint)

    def wait(self, timeout_s: float) -> frozenset[Channel]:
        """Blocks until something arrives, the wake-up is set, or the timeout is over; says where messages are.

        Raises:
            Refused: the gateway does not know our key.
            LinkDown: a connection has ended.
        """
        ready = {item for item, _ in self._poller.poll(math.ceil(1e3 * max(0.0, timeout_s)))}
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        for monitor in self._monitors.values():
            if monitor in ready:
                self._raise_end(monitor)
        return frozenset(channel for channel, socket in self._sockets.items() if socket in ready)

    def send(self, channel: Channel, envelope: Envelope) -> bool:
        """Hands a message to libzmq without waiting; False when the connection's pipe is full."""
        return send_frames(self._sockets[channel], encode(envelope))

    def receive(self, channel: Channel) -> Envelope | None:
        """The next message without waiting, or None. Raises WireError."""
        frames = receive_frames(self._sockets[channel])
        return None if frames is None else decode(channel, [frame.buffer for frame in frames], self._limits)

    def _raise_end(self, monitor: Socket) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and event["value"] == ZAP_DENIED:
            raise Refused(f"{self._endpoint} does not allow this key; run `user-sys keys allow` there")
        raise LinkDown(f"{self._endpoint}: {_ENDS.get(int(event['event']), 'the handshake failed')}")

    def close(self, farewell_ms: int = 0) -> None:
        """Drops the connections and what is in their pipes; the control channel has `farewell_ms` to empty its own."""
        for channel, socket in self._sockets.items():
            self._poller.unregister(socket)
            socket.disable_monitor()
            self._monitors[channel].close(0)
            socket.close(farewell_ms if channel is Channel.CONTROL else 0)
