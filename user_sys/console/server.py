"""The console's web server: FastAPI and uvicorn in a thread of the console's process.

On loopback the printed address has a secret. Beyond loopback, and behind a reverse proxy, people sign in with accounts
over HTTPS. `user_sys.console.access` guards both.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from hal.state_database import AuditEntry, AuditSink, discard_audit_event
from user_sys.console import protocol
from user_sys.console.access import TOKEN_BYTES, Access, AccessMiddleware, AccountAccess, TokenAccess
from user_sys.console.accounts import (
    AccountStore,
    SignIn,
    certificate_fingerprint,
    require_accounts,
    self_signed_certificate,
)
from user_sys.console.config import ConsoleConfig, require_certificate
from user_sys.console.connections import (
    HANDSHAKE_TIMEOUT_S,
    MAX_CONNECTIONS,
    BoundedHttpProtocol,
    WebSocketProtocol,
)
from user_sys.console.episodes import EpisodeLibrary, episode_routes
from user_sys.console.hub import ConsoleHub, HubMessage, PreviewImage
from user_sys.console.page import EstopSocket, PageSocket
from user_sys.console.scene import SceneViews, scene_routes
from user_sys.console.sign_in import sign_in_routes
from user_sys.errors import RunError, UserSysError
from user_sys.messages import OperatorReply
from user_sys.tunnel.connection import raise_descriptor_limit

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 1  # for open pages; without it uvicorn waits for them without a deadline
MAX_PAGES = 16
MAX_ESTOP_SOCKETS = 2 * MAX_PAGES  # a page opens a second one if the first does not respond
MAX_PAGES_OF_PERSON = 4
MAX_ESTOP_SOCKETS_OF_PERSON = 2 * MAX_PAGES_OF_PERSON
SILENT_S = 3.0
"""A page that is not hidden sends several messages a second. It reconnects after so long without a reply."""
RECEIVE_BUFFER_BYTES = 8192  # bounds the time to decode one connection's data to a few milliseconds
MAX_REPLIES = 256
WATCH_PERIOD_S = 1.0
WATCH_AGAIN_S = 0.1  # after a page shows other cameras
WATCH_TTL_S = 3.0
TRY_AGAIN_LATER = 1013

AnySocket = TypeVar("AnySocket", PageSocket, EstopSocket)
_log = logging.getLogger(__name__)


class ConsoleServer:
    """Serves the pages at the address that `start` returns.

    Args:
        hub: of the run.
        config: None for loopback, with any free port.
        token: the secret in the address on loopback; random if it is empty.
        audit: receives sign-ins, sign-outs, refusals, and orders about episodes.
        store: of the run, for the page of its episodes; None for none.
        accounts: of people who sign in; None for those of this computer.
        drawing_sources: by robot, see `user_sys.compose.drawing_source`.

    Raises:
        ConfigError: the console needs accounts, and there is none; or its certificate cannot be used.
    """

    def __init__(
        self,
        hub: ConsoleHub,
        config: ConsoleConfig | None = None,
        token: str = "",
        audit: AuditSink = discard_audit_event,
        store: Path | None = None,
        accounts: AccountStore | None = None,
        drawing_sources: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config = config or ConsoleConfig(port=0)
        self._accounts = accounts or AccountStore()
        if config.has_accounts:
            require_accounts(config, self._accounts)
        require_certificate(config)
        self._token, self._audit, self._store = token or secrets.token_urlsafe(TOKEN_BYTES), audit, store
        self._pages = _Pages(hub, audit)
        self._views = SceneViews(hub, drawing_sources or {}, lambda sign_in: self._pages.is_valid(sign_in))
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listens, and returns the address. Blocks until pages can be opened, `START_TIMEOUT_S` at most.

        Raises:
            RunError: the port is in use or not permitted, or the server did not start.
        """
        config = self._config
        raise_descriptor_limit()
        listening = _listen(config.host, config.port)
        port = listening.getsockname()[1]
        server = _Server(self._uvicorn_config(port), self._pages)
        thread = threading.Thread(target=server.run, args=([listening],), name="console", daemon=True)
        thread.start()
        if not server.ready.wait(START_TIMEOUT_S):
            server.should_exit = True
            raise RunError(f"the console did not start within {START_TIMEOUT_S:.0f} s; read the run's log")
        self._server, self._thread = server, thread
        host = f"[{config.host}]" if ":" in config.host else config.host
        if config.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        address = config.public_url or f"{'http' if config.is_loopback else 'https'}://{host}:{port}"
        _log.info("console.started address=%s", address)
        return f"{address}/" if config.has_accounts else f"{address}/?token={self._token}"

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

    def _uvicorn_config(self, port: int) -> uvicorn.Config:
        config, certificate, key = self._config, self._config.certificate, self._config.certificate_key
        access = (
            AccountAccess(self._accounts, config.public_url) if config.has_accounts else TokenAccess(self._token, port)
        )
        self._pages.is_valid = access.is_valid
        if not config.is_loopback and not certificate:
            certificate, key = map(str, self_signed_certificate(self._accounts.folder, config.host))
            fingerprint = certificate_fingerprint(Path(certificate))
            _log.warning("console.certificate self-signed; browsers ask for trust; SHA-256 %s", fingerprint)
        return uvicorn.Config(
            AccessMiddleware(
                build_app(self._pages, self._views, access, self._audit, self._store), access, self._audit
            ),
            ssl_certfile=certificate or None,
            ssl_keyfile=key or None,
            loop="asyncio",
            http=BoundedHttpProtocol,
            ws=WebSocketProtocol,
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


def build_app(pages: _Pages, views: SceneViews, access: Access, audit: AuditSink, store: Path | None) -> FastAPI:
    """The pages, their files, WebSockets and orders, without access control (see `AccessMiddleware`)."""
    static = Path(str(files("user_sys.console") / "static"))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=static))

    @app.get("/")
    async def index() -> FileResponse:
        return FileResponse(static / "index.html")

    if store is not None:
        app.include_router(episode_routes(EpisodeLibrary(store), audit))

    @app.get("/episodes")
    async def episodes_page() -> Response:
        return Response(status_code=204) if store is None else FileResponse(static / "episodes.html")

    app.include_router(scene_routes(views))
    if isinstance(access, AccountAccess):
        app.include_router(sign_in_routes(access, audit, static / "sign-in.html"))

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await pages.serve(socket)

    @app.websocket("/stop")
    async def stop(socket: WebSocket) -> None:
        await pages.serve_estops(socket)

    return app


class _Pages:
    """All open pages. Threads that update the hub call `on_hub_message`; the server's event loop calls the rest.

    Attributes:
        is_valid: whether a sign-in is still valid.
    """

    def __init__(self, hub: ConsoleHub, audit: AuditSink) -> None:
        self._hub, self._audit = hub, audit
        self.is_valid: Callable[[SignIn], bool] = lambda sign_in: True
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
        page = PageSocket(socket, self._hub, self._claim_name, self._watch, self.is_valid, self._audit)
        if why := _admit(page, self._open, "pages", MAX_PAGES, MAX_PAGES_OF_PERSON):
            await socket.close(TRY_AGAIN_LATER, why)
            return
        try:
            await page.run()
        finally:
            self._open.discard(page)
            if page.operator:
                self._audit(AuditEntry(event="sign-out", person=page.operator, address=page.address))

    async def serve_estops(self, socket: WebSocket) -> None:
        await socket.accept()
        estops = EstopSocket(socket, self._hub, self._audit, self.is_valid)
        what = "connections for e-stops"
        if why := _admit(estops, self._estop_sockets, what, MAX_ESTOP_SOCKETS, MAX_ESTOP_SOCKETS_OF_PERSON):
            await socket.close(TRY_AGAIN_LATER, why)
            return
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
        """The wished name, made unique among the open pages: a name drives a robot from one page only.

        The suffix has a space, so that the name is no other account's.
        """
        wish = wish or f"guest-{secrets.token_hex(2)}"
        taken = {other.operator for other in self._open if other is not page}
        suffixes = ("", *(f" {i}" for i in range(2, MAX_PAGES + 2)))
        names = (wish[: protocol.MAX_NAME_CHARS - len(suffix)] + suffix for suffix in suffixes)
        name = next(each for each in names if each not in taken)
        formerly = f"formerly {page.operator}" if page.operator else ""
        self._audit(AuditEntry(event="sign-in", person=name, address=page.address, outcome="done", reason=formerly))
        return name

    def _watch(self, at_once: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._watched_s < (WATCH_AGAIN_S if at_once else WATCH_PERIOD_S):
            return
        self._watched_s = now_s
        try:
            self._hub.request_previews([page.shown for page in self._open if page.shown is not None], WATCH_TTL_S)
        except UserSysError as error:
            _log.warning("console.preview_request_failed pictures will stop: %s", error)


def _admit(new: AnySocket, admitted: set[AnySocket], what: str, limit: int, limit_of_person: int) -> str:
    """Adds `new` to `admitted`; returns why it is refused, or an empty text.

    At a limit the longest-silent connection of the same person makes way, if it is silent for `SILENT_S`: after a
    change of network it seems open for a minute.
    """
    own = [each for each in admitted if each.person == new.person]
    if len(admitted) >= limit or (new.person and len(own) >= limit_of_person):
        oldest = max(own, key=lambda each: each.silent_s, default=None)
        if oldest is None or oldest.silent_s < SILENT_S:
            count = f"{limit} {what} are" if len(admitted) >= limit else f"you have {limit_of_person} {what}"
            return f"{count} open already; close a page"
        admitted.discard(oldest)
        oldest.make_way()
    admitted.add(new)
    return ""


class _Server(uvicorn.Server):
    """Sets `ready` when pages can be opened, and ends while pages are closing."""

    def __init__(self, config: uvicorn.Config, pages: _Pages) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self._pages = pages

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:  # uvicorn has no setting for it
            limited = functools.partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S)
            loop.create_server = limited  # type: ignore[method-assign]  # of this server's own loop
        await super().startup(sockets=sockets)
        self._pages.attach(loop)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drop_closing()  # uvicorn 0.54 raises for such a WebSocket and leaves the others open
        await super().shutdown(sockets)
        await self._drop_closing()

    async def _drop_closing(self) -> None:
        """Ends connections that wait for the end of their TLS."""
        connections: Iterable[Any] = self.server_state.connections  # of the classes in `_uvicorn_config`
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while closing := [each for each in connections if each.transport.is_closing()]:
                    for each in closing:
                        each.abort()
                    await asyncio.sleep(0)  # the loop reports the lost connections


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
