"""Who may use a console: the owner of a secret address on this computer, or people with accounts.

`AccessMiddleware` guards the application. It refuses foreign pages by their origin, and programs without a secret. With
`TokenAccess` a request must name a loopback host, which defeats DNS rebinding; the port is not compared, so that an SSH
tunnel works. With `AccountAccess` the browser sends its cookie to the host that set it only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from hal.pacing import TokenBucket
from hal.state_database import AuditEntry, AuditSink, discard_audit_event
from user_sys.console.accounts import SIGN_IN_S, AccountStore, SignIn
from user_sys.errors import AccountError
from user_sys.tunnel.limits import LOOPBACK_HOSTS

TOKEN_BYTES = 24
COOKIE = "user_sys_console"
ACCOUNT_COOKIE = "__Host-user_sys_console"  # browsers take this prefix over HTTPS from the host itself only
API_PREFIX = "/api/"
SIGN_IN_PATH, SIGN_OUT_PATH = "/sign-in", "/sign-out"
MAX_BODY_BYTES = 4096
BODY_TIMEOUT_S = 10.0
SIGN_INS_PER_MINUTE = 5
MAX_LIMITED = 1024
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "xr-spatial-tracking=(self), gamepad=(self), accelerometer=(self), gyroscope=(self), "
    "camera=(), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SCENE_PREFIX = "/scene/"
SCENE_POLICY = (  # of viser's page: one file that unpacks itself by WebAssembly, with pictures and a worker inside
    "default-src 'none'; script-src 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:; connect-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]

_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_log = logging.getLogger(__name__)


class Access(ABC):
    """Identifies the sender of a request. Any thread may call it."""

    def refuses_host(self, host: str) -> str:
        """Why a request to this host is refused; empty if it is not."""
        return ""

    @abstractmethod
    def origin(self, host: str) -> str:
        """The origin of this console's own pages that are reached at `host`."""

    @abstractmethod
    def find(self, scope: AsgiScope, headers: dict[str, str]) -> SignIn | None:
        """The sender, whose name is empty if it is not known; None if the request has no valid secret."""

    def address(self, scope: AsgiScope) -> str:
        """The sender's address; empty if it is not known."""
        return str((scope.get("client") or ("",))[0])

    def has_token(self, scope: AsgiScope) -> bool:
        """Whether the request proves that it is no foreign page's, without an origin."""
        return False

    def is_public(self, scope: AsgiScope) -> bool:
        """Whether the path needs no secret."""
        return False

    @abstractmethod
    def refusal(self, scope: AsgiScope) -> tuple[int, str]:
        """Status and reason for a request without a valid secret."""

    def cookie(self) -> str:
        """The cookie that each response sets; empty for none."""
        return ""

    @abstractmethod
    def is_valid(self, sign_in: SignIn) -> bool:
        """Whether a sign-in still holds."""


class TokenAccess(Access):
    """Any person on this computer with the token in the address. The browser keeps a cookie instead of the token."""

    def __init__(self, token: str, port: int) -> None:
        # A browser sends a host's cookies to all of its ports. So the name contains the port, which keeps several
        # consoles' cookies apart, and the cookie does not reveal the token. It outlives a restart of the server.
        self._token, self._cookie_name = token, f"{COOKIE}_{port}"
        self._cookie = hmac.new(token.encode(), b"cookie", "sha256").hexdigest()

    def refuses_host(self, host: str) -> str:
        if _LOOPBACK_HOST.fullmatch(host):
            return ""
        return "this console answers on this machine only; from another computer use an SSH tunnel to it"

    def origin(self, host: str) -> str:
        return f"http://{host}"

    def find(self, scope: AsgiScope, headers: dict[str, str]) -> SignIn | None:
        has_secret = self.has_token(scope) or _secrets_match(_cookie(headers, self._cookie_name), self._cookie)
        return SignIn("", "admin", float("inf")) if has_secret else None

    def has_token(self, scope: AsgiScope) -> bool:
        try:
            shown = parse_qs(scope.get("query_string", b"").decode("ascii"), max_num_fields=8).get("token", [""])[0]
        except (UnicodeDecodeError, ValueError):
            return False
        return _secrets_match(shown, self._token)

    def refusal(self, scope: AsgiScope) -> tuple[int, str]:
        return 401, "open the address that the run printed in its terminal: it carries the key to this page"

    def cookie(self) -> str:
        return f"{self._cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"

    def is_valid(self, sign_in: SignIn) -> bool:
        return True


class AccountAccess(Access):
    """People with accounts, over HTTPS.

    Args:
        public_url: under which a reverse proxy serves the console; empty without one.
    """

    def __init__(self, store: AccountStore, public_url: str = "") -> None:
        self._store = store
        self._public_url = public_url.rstrip("/").lower().removesuffix(":443")  # as browsers write an origin
        self._limits: dict[str, TokenBucket] = {}  # by address or name, the newest last
        self._lock = threading.Lock()  # one password is checked at a time: each check takes 64 MB

    def origin(self, host: str) -> str:
        return self._public_url or f"https://{host}"

    def find(self, scope: AsgiScope, headers: dict[str, str]) -> SignIn | None:
        token = _cookie(headers, ACCOUNT_COOKIE)
        return self._store.find(token) if token else None

    def is_public(self, scope: AsgiScope) -> bool:
        path = str(scope["path"])
        return scope["type"] == "http" and (path == SIGN_IN_PATH or path.startswith("/static/"))

    def refusal(self, scope: AsgiScope) -> tuple[int, str]:
        if scope["type"] == "http" and scope["method"] == "GET" and not scope["path"].startswith(API_PREFIX):
            return 303, SIGN_IN_PATH
        return 401, f"sign in at {SIGN_IN_PATH}"

    def address(self, scope: AsgiScope) -> str:
        """The sender's address. A reverse proxy on this computer appends it to ``X-Forwarded-For``."""
        client = super().address(scope)
        if not self._public_url or client not in LOOPBACK_HOSTS:
            return client
        return headers_of(scope).get("x-forwarded-for", "").rpartition(",")[2].strip()[:64] or client

    def sign_in(self, name: str, password: str, address: str) -> str:
        """Returns the cookie of a new sign-in. Blocks for a tenth of a second.

        Raises:
            AccountError: name or password is wrong, or there were too many attempts for this name or address.
        """
        with self._lock:
            for key in (f"address {address}", f"name {name[:64]}"):  # a refused address uses up no name's attempts
                limit = self._limits.pop(key, None) or TokenBucket(SIGN_INS_PER_MINUTE / 60, SIGN_INS_PER_MINUTE)
                self._limits[key] = limit
                if (wait_s := limit.wait_s(1)) > 0:
                    raise AccountError(f"too many attempts; try again in {wait_s:.0f} s")
                limit.consume()
            while len(self._limits) > MAX_LIMITED:
                del self._limits[next(iter(self._limits))]
            token = self._store.sign_in(name, password)
        return f"{ACCOUNT_COOKIE}={token}; Path=/; Max-Age={SIGN_IN_S:.0f}; Secure; HttpOnly; SameSite=Strict"

    def sign_out(self, headers: dict[str, str]) -> str:
        """Ends the sign-in of these headers' cookie; returns the cookie that removes it."""
        self._store.sign_out(_cookie(headers, ACCOUNT_COOKIE))
        return f"{ACCOUNT_COOKIE}=; Path=/; Max-Age=0; Secure; HttpOnly; SameSite=Strict"

    def is_valid(self, sign_in: SignIn) -> bool:
        return self._store.is_valid(sign_in)


class AccessMiddleware:
    """Guards an application: refuses a request, or passes it on with strict headers and the sender in ``sign_in``.

    ``client`` has the sender's address, also behind a reverse proxy.

    Args:
        app: the guarded application.
        audit: receives each refusal and its reason.
    """

    def __init__(self, app: AsgiApp, access: Access, audit: AuditSink = discard_audit_event) -> None:
        self._app, self._access, self._audit = app, access, audit

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        scope["client"] = (self._access.address(scope), (scope.get("client") or ("", 0))[1])
        refusal = self._refusal(scope)
        if refusal is None and scope["type"] == "http" and scope["method"] == "POST":
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    receive = await _received(receive)
            except TimeoutError:
                refusal = 408, f"the order did not arrive within {BODY_TIMEOUT_S:.0f} s"
        if refusal is None:
            await self._app(scope, receive, self._with_headers(send, str(scope["path"])))
            return
        status, reason = refusal
        if status == 303:
            await _send_redirect(self._with_headers(send), reason)
            return
        address = scope["client"][0]
        self._audit(AuditEntry(event="refused", role="console", address=address, reason=reason))
        _log.warning("console.refused client=%s path=%r: %s", address, scope["path"][:80], reason)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})  # before accept: HTTP 403
        else:
            await _send_text(self._with_headers(send), status, reason)

    def _refusal(self, scope: AsgiScope) -> tuple[int, str] | None:
        headers, access = headers_of(scope), self._access
        host = headers.get("host", "")
        if why := access.refuses_host(host):
            return 403, why
        origin = headers.get("origin")
        if origin is not None and origin != access.origin(host):
            return 403, "a page of another site may not use this console"
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            if (refused := _order_refusal(scope, headers, origin)) is not None:
                return refused
        if access.is_public(scope):
            return None
        sign_in = access.find(scope, headers)
        if sign_in is None:
            return access.refusal(scope)
        if scope["type"] == "websocket" and origin is None and not access.has_token(scope):
            return 403, "a program that is not a browser must present the token"
        if scope["type"] == "http" and scope["method"] == "POST" and sign_in.role == "viewer":
            if scope["path"] != SIGN_OUT_PATH:
                return 403, "a viewer may watch, and press the e-stop"
        scope["sign_in"] = sign_in
        return None

    def _with_headers(self, send: AsgiSend, path: str = "") -> AsgiSend:
        """Adds the strict headers, and to a response to an admitted request for `path` the cookie."""

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = dict(SECURITY_HEADERS)
                if path.startswith(SCENE_PREFIX):
                    extra["content-security-policy"] = SCENE_POLICY
                if path and (own := self._access.cookie()):
                    extra["set-cookie"] = own
                added = [(name.encode(), value.encode()) for name, value in extra.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return send_with_headers


def _order_refusal(scope: AsgiScope, headers: dict[str, str], origin: str | None) -> tuple[int, str] | None:
    """Why a request that changes something is refused."""
    path: str = scope["path"]
    if scope["method"] != "POST" or not (path.startswith(API_PREFIX) or path in (SIGN_IN_PATH, SIGN_OUT_PATH)):
        return 405, "this console answers GET requests only"
    if origin is None:
        return 403, "an order must come from this console's own page"
    if "transfer-encoding" in headers:  # it would override the length
        return 411, "an order states its length"
    if not headers.get("content-length", "").isdecimal() or int(headers["content-length"]) > MAX_BODY_BYTES:
        return 413, f"an order has at most {MAX_BODY_BYTES} bytes"
    return None


async def _received(receive: AsgiReceive) -> AsgiReceive:
    """Receives a whole body, which `_order_refusal` has found small; returns a function that receives it again."""
    messages = deque([await receive()])
    while messages[-1].get("more_body"):
        messages.append(await receive())

    async def receive_again() -> MutableMapping[str, Any]:
        return messages.popleft() if messages else await receive()

    return receive_again


async def _send_text(send: AsgiSend, status: int, text: str) -> None:
    body = text.encode() + b"\n"
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    if status == 408:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_redirect(send: AsgiSend, path: str) -> None:
    headers = [(b"location", path.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def headers_of(scope: AsgiScope) -> dict[str, str]:
    """The headers of a request by their lower-case names."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _cookie(headers: dict[str, str], name: str) -> str:
    """The value of the cookie `name`; empty without it. `SimpleCookie` stops at another application's odd cookie."""
    for pair in headers.get("cookie", "").split(";"):
        found, _, value = pair.strip().partition("=")
        if found == name:
            return value
    return ""


def _secrets_match(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "replace"), secret.encode())
