"""Consoles with accounts: roles, sign-ins, HTTPS, and hostile requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from argon2 import PasswordHasher
from console_kit import SimulatedRun, until, write_episode
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from hal.machine_folder import open_locked
from hal.pacing import TokenBucket
from hal.state_database import STATE_FILE, AuditLog, read_audit_log
from user_sys.commands.main import main
from user_sys.console import access as access_module
from user_sys.console import page as page_module
from user_sys.console import server as server_module
from user_sys.console.access import (
    ACCOUNT_COOKIE,
    MAX_LIMITED,
    SIGN_INS_PER_MINUTE,
    AccessMiddleware,
    AccountAccess,
)
from user_sys.console.accounts import MAX_SIGN_INS, SIGN_IN_S, AccountStore, self_signed_certificate
from user_sys.console.config import ConsoleConfig
from user_sys.console.hub import ConsoleHub
from user_sys.console.server import MAX_ESTOP_SOCKETS_OF_PERSON, MAX_PAGES_OF_PERSON, ConsoleServer
from user_sys.errors import AccountError, ConfigError
from user_sys.store.labels import queued_files

PASSWORD = "correct horse battery"
ROLES = {"vera": "viewer", "otto": "operator", "ada": "admin"}
MASKED_CLOSE_FRAME = b"\x88\x80\0\0\0\0"
CLOSE_OPCODE = b"\x88"
SERVICE_RESTART = 1012
ANY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
ANY.check_hostname, ANY.verify_mode = False, ssl.CERT_NONE


class Page:
    """A WebSocket over TLS in one thread: Python 3.11 loses data when two threads use a TLS connection at once
    (CPython issue 124984), and the library's own synchronous client reads in a thread."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._runner = asyncio.Runner()
        self._opening = connect(url, additional_headers=headers, proxy=None, open_timeout=60, close_timeout=1, ssl=ANY)

    def __enter__(self) -> Page:
        try:
            self._socket = self._runner.run(self._opening.__aenter__())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._socket.close())
        self._runner.close()

    def send(self, message: str | bytes) -> None:
        self._runner.run(self._socket.send(message))

    def recv(self) -> str | bytes:
        return self._runner.run(asyncio.wait_for(self._socket.recv(), timeout=60))


class Console:
    """A console beyond loopback, and the browsers that reach it."""

    def __init__(self, run: Path, accounts: AccountStore) -> None:
        self.run, self.simulated = run, SimulatedRun(folder=run)
        self.log = AuditLog(run / "audit")
        config = ConsoleConfig(host="0.0.0.0", port=0)
        self.server = ConsoleServer(
            self.simulated.hub, config, audit=self.log.write, store=run / "store", accounts=accounts
        )
        self.port = urlsplit(self.server.start()).port
        self.origin = f"https://127.0.0.1:{self.port}"
        self.simulated.start()

    def close(self) -> None:
        self.server.stop()
        self.simulated.close()
        self.log.close()

    def browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.origin, trust_env=False, timeout=60, verify=ANY)

    def sign_in(self, browser: httpx.Client, name: str, password: str = PASSWORD, **headers: str) -> httpx.Response:
        headers = {"origin": self.origin, **headers}
        return browser.post("/sign-in", json={"name": name, "password": password}, headers=headers)

    def cookie(self, name: str) -> str:
        with self.browser() as browser:
            return self.sign_in(browser, name).headers["set-cookie"].partition(";")[0]

    def connection(self) -> ssl.SSLSocket:
        """A connection of a stranger."""
        return ANY.wrap_socket(socket.create_connection(("127.0.0.1", self.port), timeout=60))

    def post_header(self, fields: str) -> bytes:
        own = f"Host: 127.0.0.1:{self.port}\r\nOrigin: {self.origin}\r\n"
        return f"POST /sign-in HTTP/1.1\r\n{own}{fields}\r\n".encode()

    def socket(self, cookie: str, path: str = "/ws", **headers: str) -> Page:
        return Page(f"wss://127.0.0.1:{self.port}{path}", {"Origin": self.origin, "Cookie": cookie, **headers})


@pytest.fixture
def accounts(tmp_path: Path) -> AccountStore:
    """The accounts of `ROLES`."""
    store = AccountStore(tmp_path / "accounts")
    for name, role in ROLES.items():
        store.add(name, role, PASSWORD)  # type: ignore[arg-type]
    return store


@pytest.fixture
def console(tmp_path: Path, accounts: AccountStore) -> Iterator[Console]:
    write_episode(tmp_path / "store", "a")
    console = Console(tmp_path, accounts)
    yield console
    console.close()


def hear(socket: Page, kind: str) -> dict[str, Any]:
    while True:
        frame = socket.recv()
        if isinstance(frame, str) and (message := json.loads(frame))["type"] == kind:
            return dict(message)


def ask(socket: Page, **message: Any) -> dict[str, Any]:
    socket.send(json.dumps(message))
    return hear(socket, "reply")


def test_only_signed_in_people_see_the_pages(console: Console) -> None:
    with console.browser() as browser:
        for path in ("/", "/episodes"):
            answer = browser.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
        assert browser.get("/api/episodes").status_code == 401
        assert "Password" in browser.get("/sign-in").text
        assert console.sign_in(browser, "otto", "wrong password").status_code == 401
        answer = console.sign_in(browser, "otto")
        set_cookie = answer.headers["set-cookie"]
        assert all(each in set_cookie for each in ("Secure", "HttpOnly", "SameSite=Strict", "Max-Age=43200"))
        assert "E-STOP" in browser.get("/").text and browser.get("/api/episodes").json()["matching"] == 1
        assert browser.post("/sign-out", headers={"origin": console.origin}).status_code == 200
        assert browser.get("/").status_code == 303
    secret = set_cookie.partition("=")[2].partition(";")[0]
    stored = b"".join(file.read_bytes() for file in (console.run / "accounts").iterdir())
    assert secret.encode() not in stored and PASSWORD.encode() not in stored
    assert all(file.stat().st_mode & 0o077 == 0 for file in (console.run / "accounts").iterdir())
    entries = [(e.person, e.outcome) for e in read_audit_log(console.run / "audit") if e.event == "sign-in"]
    assert entries == [("otto", "the name or the password is wrong"), ("otto", "done")]


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt comes back while a test runs."""
    monkeypatch.setattr(access_module, "TokenBucket", partial(TokenBucket, clock=lambda: 0.0))


@pytest.mark.usefixtures("standing_clock")
def test_sixth_attempt_in_a_minute_is_refused_even_with_the_right_password(console: Console) -> None:
    with console.browser() as browser:
        for _ in range(SIGN_INS_PER_MINUTE):
            assert "wrong" in console.sign_in(browser, "nobody", "wrong password").text
        assert "too many attempts" in console.sign_in(browser, "otto").text


@pytest.mark.parametrize("url", ["https://Lab.Example", "https://lab.example:443/", "https://lab.example"])
def test_public_url_is_compared_as_browsers_write_an_origin(url: str, tmp_path: Path) -> None:
    assert AccountAccess(AccountStore(tmp_path), url).origin("ignored") == "https://lab.example"


@pytest.mark.usefixtures("standing_clock")
def test_many_names_do_not_raise_the_limit_of_an_address(tmp_path: Path) -> None:
    access = AccountAccess(AccountStore(tmp_path))
    refused = 0
    for number in range(3 * MAX_LIMITED):
        with pytest.raises(AccountError) as error:
            access.sign_in(f"name-{number}", "wrong password", "192.0.2.1")
        refused += "too many" in str(error.value)
    assert refused == 3 * MAX_LIMITED - SIGN_INS_PER_MINUTE


@pytest.mark.parametrize("length", ["", "Content-Length: 10\r\n"])
def test_body_without_an_end_is_refused_at_its_header(console: Console, length: str) -> None:
    with console.connection() as raw:
        raw.sendall(console.post_header(f"{length}Transfer-Encoding: chunked\r\n"))
        assert raw.recv(4096).startswith(b"HTTP/1.1 411")


def test_body_that_does_not_arrive_ends_its_connection(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "BODY_TIMEOUT_S", 0.1)
    with console.connection() as raw:
        raw.sendall(console.post_header("Content-Length: 10\r\n") + b"{")
        received = b""
        while more := raw.recv(4096):
            received += more
        assert received.startswith(b"HTTP/1.1 408")


def test_connection_without_a_tls_handshake_is_closed(
    tmp_path: Path, accounts: AccountStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 0.1)
    console = Console(tmp_path, accounts)
    try:
        with socket.create_connection(("127.0.0.1", console.port), timeout=20) as silent:
            assert silent.recv(1) == b""
    finally:
        console.close()


def test_address_of_a_person_is_the_one_that_a_local_proxy_appends(tmp_path: Path) -> None:
    proxied = [(b"x-forwarded-for", b"forged, 192.0.2.7")]
    for url, client, headers, address in (
        ("https://lab.example", "127.0.0.1", proxied, "192.0.2.7"),
        ("https://lab.example", "127.0.0.1", [], "127.0.0.1"),
        ("https://lab.example", "192.0.2.9", proxied, "192.0.2.9"),
        ("", "127.0.0.1", proxied, "127.0.0.1"),
    ):
        access = AccountAccess(AccountStore(tmp_path), url)
        assert access.address({"client": (client, 1), "headers": headers}) == address


OTHER_COOKIES = ('consent={"a":1}', "x=Jos\u00e9", "k[x]=1", 'q="a"b', "flag", "x=a b", "=", "", f"a{ACCOUNT_COOKIE}=1")


@pytest.mark.parametrize("other", OTHER_COOKIES)
def test_cookie_of_another_application_hides_no_sign_in(accounts: AccountStore, other: str) -> None:
    own, access = f"{ACCOUNT_COOKIE}={accounts.sign_in('otto', PASSWORD)}", AccountAccess(accounts)
    for cookie in (own, f"{other}; {own}", f"{own}; {other}", f"{other};{own};{other}"):
        found = access.find({}, {"cookie": cookie})
        assert found is not None and found.name == "otto", cookie
    assert access.find({}, {"cookie": other}) is None and access.find({}, {}) is None


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_order_through_a_proxy_has_the_persons_address(accounts: AccountStore, kind: str) -> None:
    cookie = f"{ACCOUNT_COOKIE}={accounts.sign_in('otto', PASSWORD)}"
    headers = {"host": "lab.example", "origin": "https://lab.example", "cookie": cookie}
    headers["x-forwarded-for"] = "forged, 192.0.2.7"
    scope: dict[str, Any] = {"type": kind, "method": "GET", "path": "/ws", "client": ("127.0.0.1", 5)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    seen: list[tuple[str, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"])

    guarded = AccessMiddleware(app, AccountAccess(accounts, "https://lab.example"))
    asyncio.run(guarded(scope, None, None))  # type: ignore[arg-type]
    assert seen == [("192.0.2.7", 5)]


@pytest.mark.parametrize("path", ["/ws", "/stop"])
def test_sign_out_ends_each_socket_of_its_cookie_only(console: Console, path: str) -> None:
    cookie = console.cookie("otto")
    with console.socket(cookie, path) as page, console.socket(console.cookie("otto"), path) as other:
        with console.browser() as browser:
            browser.post("/sign-out", headers={"origin": console.origin, "cookie": cookie})
        with pytest.raises(ConnectionClosed, match="the sign-in has ended"):
            while True:
                page.recv()
        greet(other, path)


@pytest.mark.parametrize("path", ["/ws", "/stop"])
@pytest.mark.parametrize("name", ["accounts.json", "sign-ins.json"])
def test_unreadable_file_of_accounts_leaves_sign_ins_as_they_were(
    console: Console, path: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_module, "SIGN_IN_PERIOD_S", 0.0)
    file, cookie = console.run / "accounts" / name, console.cookie("otto")
    content = file.read_bytes()
    with console.socket(cookie, path) as page:
        for damaged in (b"[{", content):
            file.write_bytes(damaged)
            for _ in range(8):  # more than a second of the checks
                greet(page, path)
                time.sleep(0.1)
        assert caplog.text.count(f"{name}: ") == 1
        with console.browser() as browser:
            browser.post("/sign-out", headers={"origin": console.origin, "cookie": cookie})
        with pytest.raises(ConnectionClosed, match="the sign-in has ended"):
            while True:
                page.recv()


@pytest.mark.parametrize(
    ("path", "quota"), [("/ws", MAX_PAGES_OF_PERSON), ("/stop", MAX_ESTOP_SOCKETS_OF_PERSON)], ids=["pages", "e-stops"]
)
def test_silent_connection_makes_way_for_another_of_its_person(
    console: Console, path: str, quota: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    otto = console.cookie("otto")
    with contextlib.ExitStack() as stack:
        pages = [stack.enter_context(console.socket(otto, path)) for _ in range(quota)]
        for page in pages:
            greet(page, path)
        if path == "/ws":
            assert ask(pages[0], type="order", robot="panda-0", order="take-over")["accepted"]
            for page in pages[1:]:
                greet(page, path)
        monkeypatch.setattr(server_module, "SILENT_S", 0.0)
        greet(stack.enter_context(console.socket(otto, path)), path)
        with pytest.raises(ConnectionClosed, match="another page of the same person"):
            while True:
                pages[0].recv()
        until(lambda: path == "/stop" or console.simulated.orders("release"))
        greet(pages[1], path)


def greet(page: Page, path: str) -> None:
    page.send(json.dumps({"type": "ping", "sent_ms": 1} if path == "/stop" else {"type": "hello"}))
    hear(page, "pong" if path == "/stop" else "welcome")


@pytest.mark.parametrize(
    ("path", "quota"), [("/ws", MAX_PAGES_OF_PERSON), ("/stop", MAX_ESTOP_SOCKETS_OF_PERSON)], ids=["pages", "e-stops"]
)
def test_one_person_takes_no_other_persons_connections(
    console: Console, path: str, quota: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SILENT_S", math.inf)
    vera, ada = console.cookie("vera"), console.cookie("ada")
    with contextlib.ExitStack() as stack:
        for _ in range(quota):
            greet(stack.enter_context(console.socket(vera, path)), path)
        with console.socket(vera, path) as refused, pytest.raises(ConnectionClosed, match="open already"):
            refused.recv()
        with console.socket(ada, path) as admin:
            greet(admin, path)


def test_operator_drives_and_labels_under_the_accounts_name(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.console.episodes.STORE_TIMEOUT_S", 0.0)  # no gateway stores the label
    with console.socket(console.cookie("otto")) as page:
        page.send(json.dumps({"type": "hello", "operator": "ada"}))
        assert hear(page, "welcome") == {"type": "welcome", "operator": "otto", "role": "operator", "signed_in": True}
        assert ask(page, type="order", robot="panda-0", order="take-over")["accepted"]
        assert console.simulated.authority.operator == "otto"
        refused = ask(page, type="override", robot="panda-0", order="quarantine", reason="oil")
        assert not refused["accepted"] and "admin" in refused["reason"]
        assert ask(page, type="order", robot="panda-0", order="pause")["reason"] == "only an admin pauses robots"
    with console.browser() as browser:
        console.sign_in(browser, "otto")
        body = {"person": "ada", "success": "no"}
        browser.post("/api/episodes/a/label", json=body, headers={"origin": console.origin}, timeout=60)
    orders = [e.person for e in read_audit_log(console.run / "audit") if e.event == "order"]
    assert orders == ["otto"]


def test_viewer_may_press_the_e_stop_only(console: Console) -> None:
    cookie = console.cookie("vera")
    with console.socket(cookie) as page:
        page.send(json.dumps({"type": "hello", "operator": ""}))
        assert not ask(page, type="order", robot="panda-0", order="take-over")["accepted"]
        assert not ask(page, type="drive", robot="panda-0", move=[1, 0, 0], gripper=0)["accepted"]
    with console.browser() as browser:
        console.sign_in(browser, "vera")
        body = {"person": "vera", "success": "no"}
        answer = browser.post("/api/episodes/a/label", json=body, headers={"origin": console.origin})
        assert answer.status_code == 403 and not queued_files(console.run / "store")
    with console.socket(cookie, "/stop") as stops:
        stops.send(json.dumps({"type": "stop", "operator": "otto", "presses": {"panda-0": 7}}))
        until(lambda: console.simulated.orders("e-stop"))
    assert [order.operator for order in console.simulated.orders("e-stop")][:1] == ["vera"]
    assert not console.simulated.orders("take-over")
    refused = [entry for entry in read_audit_log(console.run / "audit") if entry.event == "refused"]
    assert {(entry.person, entry.robot, entry.order) for entry in refused if entry.order} == {
        ("vera", "panda-0", "take-over"),
        ("vera", "panda-0", "drive"),
    }


def test_admin_takes_a_robot_out_of_use_and_puts_it_back(console: Console) -> None:
    (console.run / "config.yaml").write_text("robots: [{name: panda-0, driver: sim}]\n")
    with console.socket(console.cookie("ada")) as page:
        page.send(json.dumps({"type": "hello", "operator": ""}))
        assert ask(page, type="order", robot="panda-0", order="pause")["accepted"]
        assert ask(page, type="override", robot="panda-0", order="quarantine", reason="oil")["accepted"]
        assert (console.run / STATE_FILE).exists()
        assert ask(page, type="override", robot="panda-0", order="restore")["accepted"]
        assert "no override" in ask(page, type="override", robot="panda-0", order="restore")["reason"]
        assert "no robot" in ask(page, type="override", robot="ur-9", order="drain")["reason"]


def test_console_stops_while_a_page_is_closing(console: Console) -> None:
    head = f"GET /ws HTTP/1.1\r\nHost: {console.origin[8:]}\r\nOrigin: {console.origin}\r\n"
    head += f"Cookie: {console.cookie('vera')}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
    with (
        console.socket(console.cookie("otto")) as other,
        socket.create_connection(("127.0.0.1", console.port)) as plain,
        ANY.wrap_socket(plain) as page,
    ):
        page.sendall(head.encode())
        assert page.recv(4096).startswith(b"HTTP/1.1 101")
        page.sendall(MASKED_CLOSE_FRAME)
        while page.recv(4096)[:1] != CLOSE_OPCODE:  # the server has answered, and waits for the end of TLS
            pass
        console.server.stop()
        with pytest.raises(ConnectionClosed) as end:
            while True:
                other.recv()
    assert end.value.rcvd is not None and end.value.rcvd.code == SERVICE_RESTART


def test_foreign_page_and_program_without_origin_are_refused(console: Console) -> None:
    cookie = console.cookie("ada")
    for headers in ({"Origin": "https://evil.example"}, {"Origin": f"http://127.0.0.1:{console.port}"}):
        with pytest.raises(InvalidStatus), console.socket(cookie, **headers):
            pass
    with pytest.raises(InvalidStatus), console.socket(f"{ACCOUNT_COOKIE}=guessed"):
        pass
    with console.browser() as browser:
        assert console.sign_in(browser, "ada", origin="https://evil.example").status_code == 403
        assert browser.post("/sign-in", json={}, headers={"origin": console.origin}).status_code == 400
        assert browser.post("/sign-in", content="x" * 5000, headers={"origin": console.origin}).status_code == 413


@pytest.mark.parametrize("change", ["remove", "password", "role"])
def test_changed_account_ends_its_sign_ins_and_pages(console: Console, accounts: AccountStore, change: str) -> None:
    cookie = console.cookie("otto")
    with console.socket(cookie) as page:
        page.send(json.dumps({"type": "hello", "operator": ""}))
        hear(page, "welcome")
        if change == "remove":
            accounts.remove("otto")
        else:
            accounts.add("otto", "viewer" if change == "role" else "operator", PASSWORD + change)
        with pytest.raises(InvalidStatus), console.socket(cookie):
            pass
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                page.recv()
        assert closed.value.rcvd is not None and "sign in again" in closed.value.rcvd.reason


def test_frequent_sign_ins_of_a_person_end_no_others(accounts: AccountStore) -> None:
    otto, *vera = [accounts.sign_in(name, PASSWORD) for name in ("otto", *["vera"] * 300)]
    assert accounts.find(otto) is not None
    assert [token for token in vera if accounts.find(token)] == vera[-MAX_SIGN_INS:]


def test_sign_in_ends_after_twelve_hours(tmp_path: Path) -> None:
    now_s = [1e9]
    store = AccountStore(tmp_path, lambda: now_s[0])
    store.add("ana", "operator", PASSWORD)
    token = store.sign_in("ana", PASSWORD)
    now_s[0] += SIGN_IN_S - 1
    found = AccountStore(tmp_path, lambda: now_s[0]).find(token)
    assert found is not None and (found.name, found.role) == ("ana", "operator")
    now_s[0] += 2
    assert store.find(token) is None


def test_expired_cookie_is_refused_closes_its_page_and_is_audited(tmp_path: Path) -> None:
    now_s = [1e9]
    store = AccountStore(tmp_path / "accounts", lambda: now_s[0])
    store.add("otto", "operator", PASSWORD)
    console = Console(tmp_path, store)
    try:
        cookie = console.cookie("otto")
        with console.socket(cookie) as page, console.browser() as browser:
            page.send('{"type":"hello"}')
            hear(page, "welcome")
            now_s[0] += SIGN_IN_S + 1
            with pytest.raises(ConnectionClosed, match="the sign-in has ended"):
                while True:
                    page.recv()
            assert browser.get("/api/episodes", headers={"Cookie": cookie}).status_code == 401
            with pytest.raises(InvalidStatus, match="403"), console.socket(cookie):
                pass
    finally:
        console.close()
    refused = [entry for entry in read_audit_log(console.run / "audit") if entry.event == "refused"]
    assert sum(entry.count for entry in refused) == 3 and refused[0].reason.startswith("the sign-in has ended")


@pytest.mark.parametrize(("name", "password"), [("", PASSWORD), ("a b", PASSWORD), ("a\n", PASSWORD), ("ana", "short")])
def test_name_and_password_are_checked(tmp_path: Path, name: str, password: str) -> None:
    with pytest.raises(AccountError):
        AccountStore(tmp_path).add(name, "viewer", password)


def test_passwords_are_stored_as_argon2id_hashes(
    tmp_path: Path, password_hasher: type[PasswordHasher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argon2.PasswordHasher", password_hasher)
    accounts = AccountStore(tmp_path)
    accounts.add("ana", "viewer", PASSWORD)
    assert accounts.accounts()["ana"].password.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    assert accounts.find(accounts.sign_in("ana", PASSWORD)) is not None


def test_removal_during_another_addition_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = AccountStore(tmp_path)
    accounts.add("bob", "admin", PASSWORD)

    def remove_and_hash(hasher: object, password: str) -> str:
        AccountStore(tmp_path).remove("bob")  # by another process
        return password

    monkeypatch.setattr("argon2.PasswordHasher.hash", remove_and_hash)
    accounts.add("ana", "viewer", PASSWORD)
    assert set(accounts.accounts()) == {"ana"}


def test_changes_by_several_processes_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argon2.PasswordHasher.hash", lambda hasher, password: password)
    monkeypatch.setattr("argon2.PasswordHasher.verify", lambda hasher, stored, password: True)

    def add_and_sign_in(name: str) -> str:
        store = AccountStore(tmp_path)  # shares nothing in memory with the others
        store.add(name, "viewer", PASSWORD)
        return store.sign_in(name, PASSWORD)

    names = [f"person-{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as threads:
        cookies = list(threads.map(add_and_sign_in, names))
    store = AccountStore(tmp_path)
    assert sorted(store.accounts()) == sorted(names)
    assert [found and found.name for found in map(store.find, cookies)] == names


def test_account_file_that_stays_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.console.accounts.LOCK_TIMEOUT_S", 0.0)
    with open_locked(tmp_path / "lock"), pytest.raises(AccountError, match="another process keeps .*lock locked"):
        AccountStore(tmp_path).add("ana", "viewer", PASSWORD)


def test_commands_add_list_and_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin.readline", lambda: PASSWORD + "\n")
    assert main(["console", "user", "add", "ana", "--role", "operator", "--password-stdin"]) == 0
    assert main(["console", "user", "list"]) == 0
    assert "ana" in (output := capsys.readouterr().out) and "operator" in output
    assert main(["console", "user", "remove", "ana"]) == 0
    assert main(["console", "user", "remove", "ana"]) != 0
    assert "there is no account 'ana'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {"certificate": "missing.pem", "host": "0.0.0.0"},
        {"public_url": "http://lab.example"},
        {"public_url": "https://lab.example/console"},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="console"):
        ConsoleConfig(**settings)


@pytest.mark.parametrize("damage", ["missing", "of another key", "encrypted", "no certificate"])
def test_unusable_certificate_is_refused_at_once(tmp_path: Path, damage: str) -> None:
    certificate, key = self_signed_certificate(tmp_path / "one", "127.0.0.1")
    if damage == "missing":
        key.unlink()
    elif damage == "of another key":
        _, key = self_signed_certificate(tmp_path / "other", "127.0.0.1")
    elif damage == "encrypted":
        private = load_pem_private_key(key.read_bytes(), None)
        locked = BestAvailableEncryption(PASSWORD.encode())
        key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    else:
        certificate.write_text("x")
    accounts = AccountStore(tmp_path)
    accounts.add("ada", "admin", PASSWORD)
    config = ConsoleConfig(host="0.0.0.0", port=0, certificate=str(certificate), certificate_key=str(key))
    with pytest.raises(ConfigError, match=f"console: .*{certificate} .*{key}"):
        ConsoleServer(ConsoleHub("run", lambda message: True), config, accounts=accounts).start()
