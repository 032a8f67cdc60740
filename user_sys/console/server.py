"""The console's web server: FastAPI and uvicorn in a thread of the launcher, on this machine only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
from collections import deque
from importlib.resources import files
from pathlib import Path

import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from hal.audit import Audit, unaudited
from user_sys.console import wire
from user_sys.console.access import LOOPBACK, TOKEN_BYTES, Gate
from user_sys.console.hub import ConsoleHub, Picture, Report
from user_sys.console.page import Page, StopSocket
from user_sys.errors import ConfigError, RunError, UserSysError
from user_sys.messages import OperatorReply

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
GRACE_S = 1  # for open pages at the end; without it uvicorn waits for them for ever
MAX_PAGES = 16
MAX_STOP_SOCKETS = 2 * MAX_PAGES  # a page opens another where it doubts the first
MAX_CONNECTIONS = 64
RECEIVE_BUFFER_BYTES = 8192  # so that what one connection sends at once takes a few milliseconds to decode
MAX_REPLIES = 256
WATCH_RATE_HZ = 10.0
WATCH_PERIOD_S = 1.0
WATCH_TTL_S = 3.0
FULL = 1013

_log = logging.getLogger(__name__)


class ConsoleServer:
    """Serves the page to whoever has the address that `start` returns.

    Args:
        hub: the run to show.
        host: a loopback address or name.
        port: 0 takes any free one.
        token: the secret in the address; drawn at random unless given.
        audit: is told who signs in and out, and who is refused.

    Raises:
        ConfigError: `host` is not loopback.
    """

    def __init__(
        self, hub: ConsoleHub, host: str = "127.0.0.1", port: int = 0, token: str = "", audit: Audit = unaudited
    ) -> None:
        if host not in LOOPBACK:
            raise ConfigError(f"console.host: {host!r} is not this machine; use 127.0.0.1, and an SSH tunnel to it")
        self._hub = hub
        self._host = host
        self._port = port
        self._token = token or secrets.token_urlsafe(TOKEN_BYTES)
        self._audit = audit
        self._pages = _Pages(hub, audit)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listens, and returns the address with its token. Blocks until pages can be opened, 15 s at most.

        Raises:
            RunError: the port is in use, or may not be listened on; or the server did not start.
        """
        listening = _listen(self._host, self._port)
        port = listening.getsockname()[1]
        server = _Server(self._config(port), self._pages)
        thread = threading.Thread(target=server.run, args=([listening],), name="console", daemon=True)
        thread.start()
        if not server.ready.wait(START_TIMEOUT_S):
            server.should_exit = True
            raise RunError(f"the console did not start within {START_TIMEOUT_S:.0f} s; the log says why")
        self._server, self._thread = server, thread
        host = f"[{self._host}]" if ":" in self._host else self._host
        _log.info("console.started address=http://%s:%d", host, port)
        return f"http://{host}:{port}/?token={self._token}"

    def stop(self) -> None:
        """Closes every page and the port, and waits for the thread, 5 s at most. Calling it twice is harmless."""
        if self._server is None or self._thread is None:
            return
        self._pages.close()
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("console.stuck the server's thread did not end within %.0f s", STOP_TIMEOUT_S)
        self._server = self._thread = None

    def _config(self, port: int) -> uvicorn.Config:
        return uvicorn.Config(
            Gate(build_app(self._pages), self._token, port, self._audit),
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,  # it would write the token into the log
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
            ws_max_size=wire.MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,  # pictures are compressed already
        )


def build_app(pages: _Pages) -> FastAPI:
    """The page, its files and its WebSocket; without `access.Gate` before it, open to everybody."""
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
        await pages.serve_stops(socket)

    return app


class _Pages:
    """All open pages. `heard` runs in the threads that feed the hub; everything else in the server's event loop."""

    def __init__(self, hub: ConsoleHub, audit: Audit) -> None:
        self._hub, self._audit = hub, audit
        self._open: set[Page] = set()
        self._stops: set[StopSocket] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._replies: deque[OperatorReply] = deque(maxlen=MAX_REPLIES)
        self._waking = False
        self._watched_s = 0.0
        self._end_listening = hub.listen(self.heard)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close(self) -> None:
        self._end_listening()
        self._loop = None

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        if len(self._open) >= MAX_PAGES:
            await socket.close(FULL, f"{MAX_PAGES} pages are open already; close one")
            return
        page = Page(socket, self._hub, self._claim_name, self._watch)
        self._open.add(page)
        try:
            await page.run()
        finally:
            self._open.discard(page)
            if page.operator:
                self._audit("sign-out", person=page.operator, address=page.address)

    async def serve_stops(self, socket: WebSocket) -> None:
        await socket.accept()
        if len(self._stops) >= MAX_STOP_SOCKETS:
            await socket.close(FULL, f"{MAX_STOP_SOCKETS} connections for e-stops are open already; close a page")
            return
        stops = StopSocket(socket, self._hub)
        self._stops.add(stops)
        try:
            await stops.run()
        finally:
            self._stops.discard(stops)

    def heard(self, what: Report | Picture) -> None:
        """Wakes the pages, once however often it is called before they woke."""
        loop = self._loop
        if loop is None or not (self._open or self._stops):
            return
        if isinstance(what, OperatorReply):
            self._replies.append(what)
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the server has just ended: nobody is there to be told
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._waking = False  # before looking: what is fed from here on wakes again
        while self._replies:
            self._deliver(self._replies.popleft())
        for page in self._open:
            page.wake()

    def _deliver(self, reply: OperatorReply) -> None:
        if reply.order == "e-stop":
            for stops in self._stops:
                stops.confirm(reply)
            return
        if reply.order == "release" or (reply.order == "drive" and reply.accepted):
            return
        for page in self._open:
            if page.operator == reply.operator:
                page.push(wire.Reply(reply.robot, reply.order, reply.accepted, reply.reason))

    def _claim_name(self, page: Page, wish: str) -> str:
        """The wished name, made unlike that of every other open page: a name drives one robot from one place."""
        wish = wish or f"guest-{secrets.token_hex(2)}"
        taken = {other.operator for other in self._open if other is not page}
        name = next(n for n in (wish, *(f"{wish}-{i}" for i in range(2, MAX_PAGES + 2))) if n not in taken)
        formerly = f"formerly {page.operator}" if page.operator else ""
        self._audit("sign-in", person=name, address=page.address, outcome="done", reason=formerly)
        return name

    def _watch(self) -> None:
        now_s = time.monotonic()
        if now_s - self._watched_s < WATCH_PERIOD_S:
            return
        self._watched_s = now_s
        try:
            self._hub.watch(WATCH_RATE_HZ, WATCH_TTL_S)
        except UserSysError as error:
            _log.warning("console.watch failed, pictures will stop: %s", error)


class _Server(uvicorn.Server):
    """Tells when pages can be opened."""

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
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
        raise RunError(f"console: port {port} of {host} {why}; choose another with --console.port, or 0") from None
    return listening
