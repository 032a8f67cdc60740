"""Who is let in: answers libzmq's questions about keys, counts failed handshakes, and logs sparingly."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hal.audit import Audit
from user_sys.tunnel.floods import FloodGuard
from user_sys.tunnel.keys import Keyring, fingerprint
from user_sys.tunnel.local import LOOPBACK
from user_sys.tunnel.sockets import ZAP_DOMAIN, Socket

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
MAX_TOPICS = 1024
NO_HANDSHAKE = "it completed no handshake: no key, not this protocol, for another gateway's key, or silent"
_CONNECTIONS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class SparingLog:
    """Warnings about what strangers do: at most one each `LOG_EVERY_S` and topic, with the number held back."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, topic: str, text: str) -> None:
        last, held_back = self._last.get(topic, (-LOG_EVERY_S, 0))
        now = time.monotonic()
        if now - last < LOG_EVERY_S:
            self._last[topic] = (last, held_back + 1)
            return
        if len(self._last) > MAX_TOPICS:
            self._last.clear()
        self._last[topic] = (now, 0)
        logger.warning("%s%s", text, f" (and {held_back} more like it)" if held_back else "")


class Gatekeeper:
    """Answers for a ROUTER whether a key may connect (ZAP, https://rfc.zeromq.org/spec/27/).

    Must exist before the port opens: without it libzmq lets any key in. One thread calls it, when `zap` or `monitor`
    have something to be read.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        router: Socket,
        ring: Keyring,
        counters: Counter[str],
        log: SparingLog,
        audit: Audit,
        floods: FloodGuard,
    ) -> None:
        self._told: dict[int, Callable[[int], None]] = {
            zmq.EVENT_LISTENING: floods.listening,
            zmq.EVENT_ACCEPTED: floods.accepted,
        }
        self._ring, self._counters, self._log, self._router, self._audit = ring, counters, log, router, audit
        self._floods = floods
        self._by_key = Counter[str]()  # connections by address that are about to end, since their key was refused
        self.zap: Socket = context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind("inproc://zeromq.zap.01")
        self.monitor: Socket = router.get_monitor_socket(_FAILED_HANDSHAKES | _CONNECTIONS)

    def authenticate(self) -> None:
        """Answers what libzmq asks. A connection is known to the guard against floods before it is let in."""
        self.watch()
        while self.zap.poll(0):
            version, request, domain, address, _, mechanism, *credentials = self.zap.recv_multipart()
            public = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
            self._ring.refresh()
            known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and self._ring.find(public) is not None
            if not known:
                self._counters["keys_refused"] += 1
                where, why = address.decode(errors="replace"), "this key is not allowed"
                self._keys_refused_at(where)
                self._audit("refused", key=fingerprint(public) if public else "", address=where, reason=why)
                self._log.warn(f"key:{public}", f"tunnel.refused key={public or 'none'} address={where} reason={why}")
            status = (b"200", b"OK") if known else (b"400", b"this key is not allowed")
            self.zap.send_multipart([version, request, *status, public.encode(), b""])

    def watch(self) -> None:
        """Takes note of connections that come and go, and counts those that ended before they showed a key: not our
        protocol, or meant for another gateway.
        """
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            what, descriptor = int(event["event"]), int(event["value"])
            if what == zmq.EVENT_DISCONNECTED:
                self._left(descriptor, urlsplit(bytes(event["endpoint"]).decode()))
                continue
            if (tell := self._told.get(what)) is not None:
                tell(descriptor)
                continue
            self._counters["handshakes_failed"] += 1
            self._log.warn("handshake", "tunnel.handshake_failed: not this protocol, or for another gateway's key")

    def check_floods(self, quiet: Callable[[], bool]) -> None:
        """See `FloodGuard.check`."""
        if broken := self._floods.check(quiet):
            self._counters["floods"] += len(broken)
            self._log.warn("flood", "tunnel.flood: a connection sent more than a message may have; it was broken")
            for address in broken:
                self._audit("refused", address=address, reason="it sent more than a message may have")

    def _left(self, descriptor: int, here: SplitResult) -> None:
        """A connection is over. One that never completed its handshake is audited, unless its key was.

        libzmq may close what is no handshake before its address could be asked for: from a loopback port it is known.
        """
        address = self._floods.gone(descriptor)
        if address is None or here.scheme != "tcp":  # Unix sockets lie in a folder of this user
            return
        address = address or (here.hostname if here.hostname in LOOPBACK else None) or "unknown"
        if address not in self._by_key:
            self._audit("refused", address=address, reason=NO_HANDSHAKE)
        elif self._by_key[address] > 1:
            self._by_key[address] -= 1
        else:
            del self._by_key[address]

    def _keys_refused_at(self, address: str) -> None:
        if address not in self._by_key and len(self._by_key) >= MAX_TOPICS:
            self._by_key.clear()
        self._by_key[address] += 1

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(0)
        self.zap.close(0)
