"""Who may see the console: who has the address with its token, from a page of our own, on this machine.

The token comes in the address once; the browser then keeps a cookie. A request must name a loopback host, which defeats
DNS rebinding; a WebSocket must come from a page of the very same origin, which defeats a foreign page that uses the
cookie. The port is not compared, so that the console can be reached through an SSH tunnel.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from hal.audit import Audit, unaudited

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN_BYTES = 24
COOKIE = "user_sys_console"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_log = logging.getLogger(__name__)


class Gate:
    """Stands before the whole application: refuses, or lets through with strict headers and a cookie.

    Args:
        app: what is guarded.
        token: the secret in the address.
        port: where the server listens.
        audit: is told who is refused, and why.
    """

    def __init__(self, app: App, token: str, port: int, audit: Audit = unaudited) -> None:
        self._app = app
        self._audit = audit
        self._token = token
        # A browser shows a host's cookies to all its ports. So the name is of this port, lest consoles overwrite each
        # other's, and the cookie is another secret than the token, gone with this server.
        self._cookie_name = f"{COOKIE}_{port}"
        self._cookie = secrets.token_urlsafe(TOKEN_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, self._dressed(send))
            return
        status, reason = refusal
        client = scope.get("client") or ("?",)
        self._audit("refused", role="console", address=client[0], reason=reason)
        _log.warning("console.refused client=%s path=%r: %s", client[0], scope["path"][:80], reason)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})  # before accept: HTTP 403
        else:
            await _answer(self._dressed(send, cookie=False), status, reason)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = _headers(scope)
        host = headers.get("host", "")
        if not _LOOPBACK_HOST.fullmatch(host):
            return 403, "this console answers on this machine only; from elsewhere use an SSH tunnel to it"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return 403, "a page of another site may not use this console"
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            return 405, "this console is read by GET"
        by_token = self._has_token(scope)
        if not by_token and not self._has_cookie(headers):
            return 401, "open the address that the run printed in its terminal: it carries the key to this page"
        if scope["type"] == "websocket" and origin is None and not by_token:
            return 403, "a program that is no browser must show the token"
        return None

    def _has_token(self, scope: Scope) -> bool:
        try:
            shown = parse_qs(scope.get("query_string", b"").decode("ascii"), max_num_fields=8).get("token", [""])[0]
        except (UnicodeDecodeError, ValueError):
            return False
        return _equal(shown, self._token)

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        try:
            shown = SimpleCookie(headers.get("cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return shown is not None and _equal(shown.value, self._cookie)

    def _dressed(self, send: Send, cookie: bool = True) -> Send:
        async def dressed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = dict(SECURITY_HEADERS)
                if cookie:
                    extra["set-cookie"] = f"{self._cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
                added = [(name.encode(), value.encode()) for name, value in extra.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return dressed


async def _answer(send: Send, status: int, text: str) -> None:
    body = text.encode() + b"\n"
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _equal(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "replace"), secret.encode())
