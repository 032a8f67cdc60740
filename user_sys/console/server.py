"""The console's web server: FastAPI and uvicorn in a thread of the launcher, on loopback only.

`AccessMiddleware` guards it. The first request carries the token in the address; the browser then keeps a cookie. A
request must name a loopback host, which defeats DNS rebinding. A WebSocket must come from a page of the same origin,
which defeats a foreign page that uses the cookie. The port is not compared, so that an SSH tunnel works.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from hal.audit import AuditEntry, AuditSink, discard_audit_event
from user_sys.console import protocol
from user_sys.console.hub import ConsoleHub, HubMessage, PreviewImage
from user_sys.console.page import EstopSocket, PageSocket
from user_sys.errors import ConfigError, RunError, UserSysError
from user_sys.messages import OperatorReply
from user_sys.tunnel.endpoint import LOOPBACK_HOSTS

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 1  # for open pages; without it uvicorn waits for them without a deadline
MAX_PAGES = 16
MAX_ESTOP_SOCKETS = 2 * MAX_PAGES  # a page opens a second one if the first does not respond
MAX_CONNECTIONS = 64
RECEIVE_BUFFER_BYTES = 8192  # bounds the time to decode one connection's data to a few milliseconds
MAX_REPLIES = 256
WATCH_RATE_HZ = 10.0
WATCH_PERIOD_S = 1.0
WATCH_TTL_S = 3.0
TRY_AGAIN_LATER = 1013
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

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]

_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_log = logging.getLogger(__name__)


class AccessMiddleware:
    """Guards an application: refuses a request, or passes it on with strict headers and a cookie.

    Args:
        app: the guarded application.
        token: the secret in the address.
        port: of the server.
        audit: receives each refusal and its reason.
    """

    def __init__(self, app: AsgiApp, token: str, port: int, audit: AuditSink = discard_audit_event) -> None:
        self._app = app
        self._audit = audit
        self._token = token
        # A browser sends a host's cookies to all of its ports. So the name contains the port, which keeps several
        # consoles' cookies apart, and the cookie is another secret than the token, valid for this server only.
        self._cookie_name = f"{COOKIE}_{port}"
        self._cookie = secrets.token_urlsafe(TOKEN_BYTES)

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, self._with_headers(send))
            return
        status, reason = refusal
        client = scope.get("client") or ("?",)
        self._audit(AuditEntry(event="refused", role="console", address=client[0], reason=reason))
        _log.warning("console.refused client=%s path=%r: %s", client[0], scope["path"][:80], reason)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})  # before accept: HTTP 403
        else:
            await _send_text(self._with_headers(send, cookie=False), status, reason)

    def _refusal(self, scope: AsgiScope) -> tuple[int, str] | None:
        headers = _headers(scope)
        host = headers.get("host", "")
        if not _LOOPBACK_HOST.fullmatch(host):
            return 403, "this console answers on this machine only; from another computer use an SSH tunnel to it"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return 403, "a page of another site may not use this console"
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            return 405, "this console answers GET requests only"
        by_token = self._has_token(scope)
        if not by_token and not self._has_cookie(headers):
            return 401, "open the address that the run printed in its terminal: it carries the key to this page"
        if scope["type"] == "websocket" and origin is None and not by_token:
            return 403, "a program that is not a browser must present the token"
        return None

    def _has_token(self, scope: AsgiScope) -> bool:
        try:
            shown = parse_qs(scope.get("query_string", b"").decode("ascii"), max_num_fields=8).get("token", [""])[0]
        except (UnicodeDecodeError, ValueError):
            return False
        return _secrets_match(shown, self._token)

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        try:
            shown = SimpleCookie(headers.get("cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return shown is not None and _secrets_match(shown.value, self._cookie)

    def _with_headers(self, send: AsgiSend, cookie: bool = True) -> AsgiSend:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = dict(SECURITY_HEADERS)
                if cookie:
                    extra["set-cookie"] = f"{self._cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
                added = [(name.encode(), value.encode()) for name, value in extra.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return send_with_headers


async def _send_text(send: AsgiSend, status: int, text: str) -> None:
    body = text.encode() + b"\n"
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: AsgiScope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _secrets_match(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "replace"), secret.encode())


class ConsoleServer:
    """Serves the page at the address that `start` returns.

    Args:
        hub: of the run.
        host: a loopback address or name.
        port: 0 takes any free one.
        token: the secret in the address; random if it is empty.
        audit: receives sign-ins, sign-outs and refusals.

    Raises:
        ConfigError: `host` is not loopback.
    """

    def __init__(
        self,
        hub: ConsoleHub,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        audit: AuditSink = discard_audit_event,
    ) -> None:
        if host not in LOOPBACK_HOSTS:
            raise ConfigError(f"console.host: {host!r} is not loopback; use 127.0.0.1, and an SSH tunnel to it")
        self._hub = hub
        self._host = host
        self._port = port
        self._token = token or secrets.token_urlsafe(TOKEN_BYTES)
        self._audit = audit
        self._pages = _Pages(hub, audit)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listens, and returns the address with its token. Blocks until pages can be opened, `START_TIMEOUT_S` at most.

        Raises:
            RunError: the port is in use or not permitted, or the server did not start.
        """
        listening = _listen(self._host, self._port)
        port = listening.getsockname()[1]
        server = _Server(self._config(port), self._pages)
        thread = threading.Thread(target=server.run, args=([listening],), name="console", daemon=True)
        thread.start()
        if not server.ready.wait(START_TIMEOUT_S):
            server.should_exit = True
            raise RunError(f"the console did not start within {START_TIMEOUT_S:.0f} s; read the run's log")
        self._server, self._thread = server, thread
        host = f"[{self._host}]" if ":" in self._host else self._host
        _log.info("console.started address=http://%s:%d", host, port)
        return f"http://{host}:{port}/?token={self._token}"

    def stop(self) -> None:
        """Closes every page and the port, and waits `STOP_TIMEOUT_S` at most for the thread. May be called twice."""
        if self._server is None or self._thread is None:
            return
        self._pages.close()
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("console.stop_timeout the server's thread did not end within %.0f s", STOP_TIMEOUT_S)
        self._server = self._thread = None

    def _config(self, port: int) -> uvicorn.Config:
        return uvicorn.Config(
            AccessMiddleware(build_app(self._pages), self._token, port, self._audit),
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,  # its lines would contain the token
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            ws_max_size=protocol.MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,  # pictures are compressed already
        )


def build_app(pages: _Pages) -> FastAPI:
    """The page, its files and its WebSockets, without access control (see `AccessMiddleware`)."""
    static = Path(str(files("user_sys.console") / "static"))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=static))

    @app.get("/")
    async def index() -> FileResponse:
        return FileResponse(static / "index.html")

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await pages.serve(socket)

    @app.websocket("/stop")
    async def stop(socket: WebSocket) -> None:
        await pages.serve_estops(socket)

    return app


class _Pages:
    """All open pages. Threads that update the hub call `on_hub_message`; the server's event loop calls the rest."""

    def __init__(self, hub: ConsoleHub, audit: AuditSink) -> None:
        self._hub, self._audit = hub, audit
        self._open: set[PageSocket] = set()
        self._estop_sockets: set[EstopSocket] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._replies: deque[OperatorReply] = deque(maxlen=MAX_REPLIES)
        self._waking = False
        self._watched_s = 0.0
        self._unsubscribe = hub.subscribe(self.on_hub_message)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close(self) -> None:
        self._unsubscribe()
        self._loop = None

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        if len(self._open) >= MAX_PAGES:
            await socket.close(TRY_AGAIN_LATER, f"{MAX_PAGES} pages are open already; close one")
            return
        page = PageSocket(socket, self._hub, self._claim_name, self._watch)
        self._open.add(page)
        try:
            await page.run()
        finally:
            self._open.discard(page)
            if page.operator:
                self._audit(AuditEntry(event="sign-out", person=page.operator, address=page.address))

    async def serve_estops(self, socket: WebSocket) -> None:
        await socket.accept()
        if len(self._estop_sockets) >= MAX_ESTOP_SOCKETS:
            await socket.close(
                TRY_AGAIN_LATER, f"{MAX_ESTOP_SOCKETS} connections for e-stops are open already; close a page"
            )
            return
        estops = EstopSocket(socket, self._hub)
        self._estop_sockets.add(estops)
        try:
            await estops.run()
        finally:
            self._estop_sockets.discard(estops)

    def on_hub_message(self, message: HubMessage | PreviewImage) -> None:
        """Wakes the pages. Calls before they wake have one effect."""
        loop = self._loop
        if loop is None or not (self._open or self._estop_sockets):
            return
        if isinstance(message, OperatorReply):
            self._replies.append(message)
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the server has just ended
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._waking = False  # before reading: later messages wake again
        while self._replies:
            self._deliver(self._replies.popleft())
        for page in self._open:
            page.wake()

    def _deliver(self, reply: OperatorReply) -> None:
        if reply.order == "e-stop":
            for estops in self._estop_sockets:
                estops.confirm(reply)
            return
        if reply.order == "release" or (reply.order == "drive" and reply.accepted):
            return
        for page in self._open:
            if page.operator == reply.operator:
                page.push(protocol.OrderReply(reply.robot, reply.order, reply.accepted, reply.reason))

    def _claim_name(self, page: PageSocket, wish: str) -> str:
        """The wished name, made unique among the open pages: a name drives a robot from one page only."""
        wish = wish or f"guest-{secrets.token_hex(2)}"
        taken = {other.operator for other in self._open if other is not page}
        name = next(n for n in (wish, *(f"{wish}-{i}" for i in range(2, MAX_PAGES + 2))) if n not in taken)
        formerly = f"formerly {page.operator}" if page.operator else ""
        self._audit(AuditEntry(event="sign-in", person=name, address=page.address, outcome="done", reason=formerly))
        return name

    def _watch(self) -> None:
        now_s = time.monotonic()
        if now_s - self._watched_s < WATCH_PERIOD_S:
            return
        self._watched_s = now_s
        try:
            self._hub.request_previews(WATCH_RATE_HZ, WATCH_TTL_S)
        except UserSysError as error:
            _log.warning("console.preview_request_failed pictures will stop: %s", error)


class _Server(uvicorn.Server):
    """Sets `ready` when pages can be opened."""

    def __init__(self, config: uvicorn.Config, pages: _Pages) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self._pages = pages

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._pages.attach(asyncio.get_running_loop())
        self.ready.set()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    try:
        listening.bind((host, port))
        listening.listen(MAX_CONNECTIONS)
    except OSError as error:
        listening.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise RunError(f"console: port {port} of {host} {why}; choose another with --console.port, or 0") from None
    return listening
