"""The connections to the console's port: bounded against strangers, and dropped when the server ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

MAX_CONNECTIONS = 256
MAX_PER_ADDRESS = 24  # without WebSockets; a browser opens 6, and closes them when they are idle
REQUEST_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 5.0  # of TLS; until then no connection is counted
UNBOUNDED = ("127.", "::1")  # this computer, and a reverse proxy on it

_open: Counter[str] = Counter()  # HTTP connections by address; the server's event loop alone uses it


class _Abortable(asyncio.Protocol):
    """A connection that can be dropped though uvicorn has closed its transport twice: Python 3.11's TLS then cannot."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        tls = getattr(transport, "_ssl_protocol", None)
        self._connection: asyncio.Transport = tls._transport if tls else transport

    def abort(self) -> None:
        self._connection.abort()


class BoundedHttpProtocol(_Abortable, H11Protocol):
    """An HTTP connection that must send a request in time. An address beyond loopback may have `MAX_PER_ADDRESS`.

    A connection that becomes a WebSocket is no longer counted: its request was admitted.
    """

    _counted = ""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not address.startswith(UNBOUNDED):
            self._counted = address
            _open[address] += 1
        if _open[address] > MAX_PER_ADDRESS:
            transport.close()
            return
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._forget()
        super().handle_websocket_upgrade(event)

    def _close_if_idle(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._counted:
            _open[self._counted] -= 1
            if not _open[self._counted]:
                del _open[self._counted]
            self._counted = ""


class WebSocketProtocol(_Abortable, WebSocketsSansIOProtocol):
    """The WebSocket of a page."""
