"""The console's server over real sockets: access, orders and invalid messages."""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from console_kit import SimulatedRun, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from hal.state_database import STATE_FILE, AuditLog, discard_audit_event, read_audit_log
from user_sys.console import connections, server
from user_sys.console.accounts import AccountStore
from user_sys.console.config import ConsoleConfig
from user_sys.console.hub import PreviewImage, ShownCameras
from user_sys.console.page import MAX_MESSAGES_HZ, MAX_ORDER_AGE_S
from user_sys.console.protocol import MAX_MESSAGE_BYTES, MAX_NAME_CHARS
from user_sys.console.server import MAX_PAGES, ConsoleServer
from user_sys.errors import ConfigError, RunError

FRAME_HEADER_BYTES = 14  # of a long masked frame


class Site:
    """A running console and ways to reach it."""

    def __init__(self, simulated: SimulatedRun, url: str) -> None:
        parts = urlsplit(url)
        self.simulated, self.url = simulated, url
        self.host = parts.netloc
        self.token = parse_qs(parts.query)["token"][0]

    def get(self, path: str = "/", **options: Any) -> httpx.Response:
        return httpx.get(f"http://{self.host}{path}", trust_env=False, timeout=60, **options)

    def socket(
        self, query: str | None = None, path: str = "/ws", **headers: str
    ) -> AbstractContextManager[ClientConnection]:
        query = f"?token={self.token}" if query is None else query
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return connect(
            f"ws://{self.host}{path}{query}", additional_headers=sent, proxy=None, open_timeout=60, close_timeout=1
        )

    def stops(self) -> AbstractContextManager[ClientConnection]:
        """The connection for e-stops."""
        return self.socket(path="/stop")

    def page(self, operator: str) -> Person:
        return Person(self, operator)

    def front(self) -> PreviewImage:
        """The newest picture of the robot's camera."""
        return next(each for each in self.simulated.hub.previews(ShownCameras()) if each.camera == "front")


class Person:
    """A page as a program, which sends messages and reads replies."""

    def __init__(self, site: Site, operator: str) -> None:
        self._context = site.socket()
        self.wish = operator
        self.pictures: list[tuple[dict[str, Any], bytes]] = []

    def __enter__(self) -> Person:
        self.socket = self._context.__enter__()
        self.say(type="hello", operator=self.wish)
        self.name = self.hear("welcome")["operator"]
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def say(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def order(self, order: str, robot: str = "panda-0", **more: object) -> dict[str, Any]:
        self.say(type="order", robot=robot, order=order, **more)
        return self.hear("reply")

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message of `kind`. Pictures before it are kept and not acknowledged."""
        while True:
            frame = self.socket.recv(timeout=60)
            if isinstance(frame, bytes):
                length = struct.unpack_from("<I", frame)[0]
                self.pictures.append((json.loads(frame[4 : 4 + length]), frame[4 + length :]))
                continue
            message: dict[str, Any] = json.loads(frame)
            if message["type"] == kind:
                return message

    def closed(self) -> str:
        """Reads until the server closes; returns its reason."""
        try:
            while True:
                self.socket.recv(timeout=60)
        except ConnectionClosed as end:
            assert end.rcvd is not None
            return end.rcvd.reason


@pytest.fixture(scope="module")
def door() -> Iterator[Site]:
    """A console that tests without orders share."""
    yield from serve()


@pytest.fixture
def site() -> Iterator[Site]:
    yield from serve()


def stop(socket: ClientConnection, operator: str = "bob", robot: str = "panda-0", press: int = 7) -> dict[str, Any]:
    """Presses once; returns the reply."""
    socket.send(json.dumps({"type": "stop", "operator": operator, "presses": {robot: press}}))
    answer: dict[str, Any] = json.loads(socket.recv(timeout=60))
    return answer


def serve(log: AuditLog | None = None) -> Iterator[Site]:
    simulated = SimulatedRun().start()
    server = ConsoleServer(simulated.hub, audit=log.write if log else discard_audit_event)
    try:
        yield Site(simulated, server.start())
    finally:
        server.stop()
        simulated.close()


def test_address_opens_the_page_and_sets_a_cookie(door: Site) -> None:
    with httpx.Client(base_url=f"http://{door.host}", trust_env=False, timeout=60) as browser:
        page = browser.get(f"/?token={door.token}")
        assert page.status_code == 200 and "E-STOP" in page.text
        assert "HttpOnly" in page.headers["set-cookie"] and "SameSite=Strict" in page.headers["set-cookie"]
        assert door.token not in page.headers["set-cookie"]
        assert browser.get("/").status_code == browser.get("/static/app.js").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/?token=", "/?token=wrong", "/static/app.js", "/ws", "/scene/panda-0/", "/?token=%FF%FE", "/openapi.json"],
)
def test_request_without_token_is_refused(door: Site, path: str) -> None:
    answer = door.get(path)
    assert answer.status_code == 401 and "address" in answer.text and "set-cookie" not in answer.headers


def test_every_response_has_security_headers(door: Site) -> None:
    for path in ("/", f"/?token={door.token}"):
        policy = door.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_rebound_host_name_is_refused(door: Site) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1].evil.example:80", "evil.example:127.0.0.1"):
        assert door.get(f"/?token={door.token}", headers={"host": host}).status_code in (400, 403)


def test_ssh_tunnel_may_use_another_port(door: Site) -> None:
    assert door.get(f"/?token={door.token}", headers={"host": "localhost:9999"}).status_code == 200


def test_only_get_is_allowed(door: Site) -> None:
    answer = httpx.post(f"{door.url}", trust_env=False, timeout=60)
    assert answer.status_code == 405


@pytest.mark.parametrize("path", ["/ws", "/scene/panda-0"])
@pytest.mark.parametrize("query", ["", "?token=wrong"])
def test_socket_without_token_is_refused(door: Site, query: str, path: str) -> None:
    with pytest.raises(InvalidStatus) as refusal, door.socket(query, path):
        pass
    assert refusal.value.response.status_code == 403


def test_robot_without_a_description_has_no_3d_view(door: Site) -> None:
    missing = door.get(f"/api/scene/panda-0?token={door.token}").json()
    page = door.get(f"/scene/panda-0/?token={door.token}")
    assert "description" in missing and page.text == f"{missing}\n" and page.status_code == 503
    with pytest.raises(InvalidStatus), door.socket(path="/scene/panda-0"):
        pass


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost", "http://localhost:1"])
def test_foreign_page_cannot_use_the_socket(door: Site, origin: str) -> None:
    cookie = door.get(f"/?token={door.token}").headers["set-cookie"].partition(";")[0]
    for query in ("", None):
        with pytest.raises(InvalidStatus), door.socket(query, Origin=origin, Cookie=cookie):
            pass


def test_cookie_admits_a_page_and_no_program(door: Site) -> None:
    cookie = door.get(f"/?token={door.token}").headers["set-cookie"].partition(";")[0]
    with door.socket("", Origin=f"http://{door.host}", Cookie=cookie):
        pass
    with pytest.raises(InvalidStatus), door.socket("", Cookie=cookie):
        pass


def test_operator_takes_over_drives_and_hands_back(site: Site) -> None:
    with site.page("alice") as alice:
        assert alice.name == "alice"
        assert alice.order("take-over") == {
            "type": "reply", "robot": "panda-0", "order": "take-over", "accepted": True, "reason": "",
        }  # fmt: skip
        alice.say(type="drive", robot="panda-0", move=[1, 0, -0.5], gripper=-1)
        until(lambda: site.simulated.orders("drive"))
        assert site.simulated.orders("drive")[0].twist == (1.0, 0.0, -0.5, -1.0)
        until(lambda: site.simulated.authority.twist()[0] == 1.0)
        assert alice.order("hand-back")["accepted"]
    assert site.simulated.authority.state == "policy"


def test_second_page_gets_the_drivers_name(site: Site) -> None:
    with site.page("alice") as alice, site.page("bob") as bob, site.stops() as stops:
        alice.order("take-over")
        alice.say(type="drive", robot="panda-0", move=[0, 0, 0], gripper=0)
        reply = bob.order("take-over")
        assert not reply["accepted"] and "alice" in reply["reason"]
        assert stop(stops) == {"type": "stopped", "robot": "panda-0", "press": 7, "confirmed": True, "reason": ""}
        assert "bob" in alice.order("take-over")["reason"]


def test_pages_with_the_same_longest_name_get_names_of_that_length(door: Site) -> None:
    wish = "a" * MAX_NAME_CHARS
    with door.page(wish) as first, door.page(wish) as second, door.page(wish) as third:
        assert [first.name, second.name, third.name] == [wish, f"{wish[:-2]} 2", f"{wish[:-2]} 3"]
        with door.page(third.name) as fourth:
            assert len(fourth.name) <= MAX_NAME_CHARS


@pytest.mark.parametrize("way", ["closed", "cut", "hidden"])
def test_closed_page_holds_the_robot_at_once(site: Site, way: str) -> None:
    """The input timeout plays no part, as the run's clock stands still."""
    with site.page("alice") as alice:
        alice.order("take-over")
        alice.say(type="drive", robot="panda-0", move=[1, 0, 0], gripper=0)
        until(lambda: site.simulated.orders("drive"))
        if way == "cut":
            alice.socket.socket.shutdown(socket.SHUT_RDWR)
        if way == "hidden":
            alice.say(type="look", on=False)
            until(lambda: site.simulated.authority.state == "hold")
    until(lambda: site.simulated.authority.state == "hold")
    assert len(site.simulated.orders("release")) == 1
    with site.page("bob") as bob:
        assert bob.order("take-over")["accepted"]


def test_flooding_page_is_closed_and_its_e_stop_passes(site: Site) -> None:
    with site.page("eve") as eve, site.stops() as stops:
        for _ in range(1000):
            eve.say(type="order", robot="panda-0", order="reset")
        assert "60 messages a second" in eve.closed()
        assert stop(stops, "eve")["confirmed"]
        assert len(site.simulated.orders("reset")) < 10 * MAX_MESSAGES_HZ
    with site.page("alice") as alice:
        assert alice.order("re-arm")["accepted"]


def test_flood_of_e_stops_does_not_delay_other_pages(site: Site) -> None:
    with site.stops() as flood, site.stops() as stops:
        for press in range(2000):
            flood.send(json.dumps({"type": "stop", "operator": "eve", "presses": {"panda-0": press + 100}}))
        assert stop(stops, "bob")["confirmed"]
        assert len(site.simulated.orders("e-stop")) < 500


def test_order_that_the_network_held_back_is_refused(site: Site) -> None:
    with site.page("alice") as alice:
        alice.order("take-over")
        alice.say(type="ping", sent_ms=1.0)
        server_s = alice.hear("pong")["server_s"]
        late = alice.order("hand-back", server_s=server_s - MAX_ORDER_AGE_S)
        assert not late["accepted"] and "too late" in late["reason"]
        assert site.simulated.authority.state == "human"
        assert alice.order("hand-back", server_s=time.monotonic())["accepted"]


def test_label_names_its_episode(site: Site) -> None:
    with site.page("alice") as alice:
        alice.order("success", episode="panda-0-1")
        (label,) = site.simulated.orders("success")
        assert label.episode == "panda-0-1"


def test_unsent_e_stop_is_reported_unconfirmed(site: Site) -> None:
    with site.stops() as stops:
        site.simulated.away = True
        answer = stop(stops)
        assert not answer["confirmed"] and "no connection to the gateway" in answer["reason"]
        assert "no robot" in stop(stops, robot="panda-9")["reason"]
        site.simulated.away = False
        assert stop(stops)["confirmed"]
        assert [order.press for order in site.simulated.orders("e-stop")] == [7]


def test_sign_ins_refusals_and_addresses_are_audited(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / STATE_FILE)
    for site in serve(log):
        with site.page("ana") as ana, site.stops() as stops:
            assert stop(stops, "ana")["confirmed"]
            assert ana.order("re-arm")["accepted"]
        for _ in range(5):
            assert httpx.get(f"http://{site.host}/", trust_env=False, timeout=60).status_code == 401
        for order in ("e-stop", "re-arm"):
            (given,) = site.simulated.orders(order)
            assert (given.operator, given.address) == ("ana", "127.0.0.1")
    log.close()
    reply = [(e.event, e.person, e.address, e.count) for e in read_audit_log(tmp_path / STATE_FILE)]
    assert [each for each in reply if each[0] == "refused"] == [
        ("refused", "", "127.0.0.1", 1),
        ("refused", "", "127.0.0.1", 4),
    ]
    assert [each for each in reply if each[0] != "refused"] == [
        ("sign-in", "ana", "127.0.0.1", 1),
        ("sign-out", "ana", "127.0.0.1", 1),
    ]


def test_page_that_is_closed_for_its_message_is_audited(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / STATE_FILE)
    for site in serve(log):
        with site.page("eve") as eve:
            eve.say(type="shutdown")
            eve.closed()
    log.close()
    (refused,) = [each for each in read_audit_log(tmp_path / STATE_FILE) if each.event == "refused"]
    assert refused.address == "127.0.0.1" and refused.reason.startswith("not a message")


def test_picture_follows_an_acknowledgement_and_the_newest_wins(site: Site) -> None:
    with site.page("alice") as alice:
        until(lambda: alice.hear("state") and len(alice.pictures) == 2)
        newest = site.front()
        until(lambda: alice.hear("state") and site.front().serial > newest.serial + 20)
        assert len(alice.pictures) == 2  # later pictures are not sent before an acknowledgement
        alice.say(type="seen", pictures=[["panda-0", "front"]])
        until(lambda: alice.hear("state") and len(alice.pictures) == 3)
        header, jpeg = alice.pictures[-1]
        assert header["camera"] == "front" and header["step"] > newest.step and jpeg.startswith(b"\xff\xd8")


def test_page_gets_pictures_of_the_cameras_that_it_shows(site: Site) -> None:
    site.simulated.add("panda-1")
    with site.page("alice") as alice:
        until(lambda: alice.hear("state") and len(alice.pictures) == 4)
        for look, shown in (
            ({"large": ["panda-1"]}, {("panda-1", "front"), ("panda-1", "wrist")}),
            ({"large": [], "thumbnails": True}, {("panda-0", "front"), ("panda-1", "front")}),
        ):
            alice.say(type="look", on=True, **look)
            assert alice.order("success")["accepted"], "the page has looked"
            alice.pictures.clear()
            alice.say(type="seen", pictures=[[f"panda-{n}", name] for n in (0, 1) for name in ("front", "wrist")])
            until(lambda: alice.hear("state") and len(alice.pictures) >= 2)
            for _ in range(3):
                alice.hear("state")
            assert {(header["robot"], header["camera"]) for header, _ in alice.pictures} == shown


def test_traces_of_the_selected_robot_continue_where_they_stood(site: Site) -> None:
    with site.page("alice") as alice:
        alice.say(type="trace", robot="panda-0")
        first = alice.hear("trace")
        assert [signal["label"] for signal in first["signals"]] == ["dx", "dy", "dz", "gripper"]
        periods = first["periods"]
        while len(periods) < 5:
            later = alice.hear("trace")
            assert not later["signals"]
            periods += later["periods"]
        assert all(earlier[0] < later[0] for earlier, later in zip(periods, periods[1:], strict=False)), "none twice"
        alice.say(type="trace", robot="nobody")
        assert alice.order("take-over")["accepted"]


def test_previews_are_requested_for_visible_pages_only(site: Site) -> None:
    assert not site.simulated.sent
    with site.page("alice") as alice:
        until(lambda: alice.hear("state") and site.simulated.sent)
        alice.say(type="look", on=False)
        alice.order("success")
        asked = len(site.simulated.sent)
        for _ in range(6):  # a hidden page still gets the state
            alice.hear("state")
        assert len(site.simulated.sent) == asked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 4000,
        b"\x00\x01",
        '{"type":"shutdown"}',
        '{"type":"order"}',
        '{"type":"order","robot":"panda-0","order":"drive"}',
        '{"type":"order","robot":"panda-0","order":"e-stop"}',
        '{"type":"stop","operator":"a","presses":{"panda-0":1}}',
        '{"type":"drive","robot":"panda-0","move":[1,2,0],"gripper":0}',
        '{"type":"drive","robot":"panda-0","move":[NaN,0,0],"gripper":0}',
        '{"type":"drive","robot":"panda-0","move":[0,0],"gripper":0}',
        '{"type":"hello","operator":"<b>"}',
        '{"type":"hello","operator":"a","more":1}',
    ],
)
def test_invalid_message_closes_the_page_with_a_reason(door: Site, text: str | bytes) -> None:
    with door.page("alice") as alice:
        alice.socket.send(text)
        assert alice.closed()
    assert not [m for m in door.simulated.sent if hasattr(m, "order")]


def test_order_before_the_name_closes_the_page(door: Site) -> None:
    for attempt in range(60):
        with door.socket() as socket, pytest.raises(ConnectionClosed, match="hello"):
            if attempt % 3:
                socket.recv(timeout=60)
            socket.send('{"type":"order","robot":"panda-0","order":"take-over"}')
            for _ in range(100):  # a page that stays open would send messages for ever
                socket.recv(timeout=60)


@pytest.mark.parametrize("size", [MAX_MESSAGE_BYTES + 1, 1 << 20])
def test_too_long_message_closes_its_page_only(door: Site, size: int) -> None:
    """At its header: the connection is reset for a page that goes on sending, and a reset may overtake the reason."""
    with door.page("bob") as bob, door.page("alice") as alice:
        alice.socket.socket.sendall(Frame(Opcode.TEXT, b"x" * size).serialize(mask=True)[:FRAME_HEADER_BYTES])
        alice.closed()
        assert bob.order("re-arm")["reason"]


def test_unknown_robot_is_refused_without_closing(site: Site) -> None:
    with site.page("alice") as alice:
        reply = alice.order("take-over", robot="panda-9")
        assert not reply["accepted"] and "panda-0" in reply["reason"]
        assert alice.order("take-over")["accepted"]


def test_number_of_pages_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_S", math.inf)
    pages = [site.socket() for _ in range(MAX_PAGES)]
    open_pages = [page.__enter__() for page in pages]
    try:
        for page in open_pages:
            page.recv(timeout=60)
        with site.socket() as late, pytest.raises(ConnectionClosed, match="close a page"):
            late.recv(timeout=60)
    finally:
        for page in pages:
            page.__exit__(None, None, None)


def test_idle_connections_of_an_address_are_bounded_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNBOUNDED", ())
    monkeypatch.setattr(connections, "MAX_PER_ADDRESS", 4)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 1.0)
    for site in serve():
        port = urlsplit(site.url).port
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
        for one in idle:
            one.settimeout(60)
        assert [one.recv(1) for one in idle[4:]] == [b"", b""], "beyond the bound: closed at once"
        with pytest.raises(httpx.TransportError):
            site.get()
        assert [one.recv(1) for one in idle[:4]] == [b""] * 4, "idle: closed after a time"
        for one in idle:
            one.close()
        assert site.get(params={"token": site.token}).status_code == 200
        with site.page("alice") as alice:  # keeps no place
            assert alice.order("take-over")["accepted"]


def test_port_in_use_names_the_option(door: Site) -> None:
    port = int(door.host.rpartition(":")[2])
    with pytest.raises(RunError, match=r"--console\.port"):
        ConsoleServer(door.simulated.hub, ConsoleConfig(port=port)).start()


def test_other_hosts_need_an_account(door: Site, tmp_path: Path) -> None:
    for settings in ({"host": "0.0.0.0"}, {"public_url": "https://lab.example"}):
        with pytest.raises(ConfigError, match="user-sys console user add"):
            ConsoleServer(door.simulated.hub, ConsoleConfig(port=0, **settings), accounts=AccountStore(tmp_path))


@pytest.mark.parametrize("text", ['{"type":"stop","operator":"","presses":{}}', '{"type":"hello"}', "[]", b"x"])
def test_invalid_message_closes_the_e_stop_socket(door: Site, text: str | bytes) -> None:
    with door.stops() as stops:
        stops.send(text)
        with pytest.raises(ConnectionClosed) as end:
            stops.recv(timeout=60)
        assert end.value.rcvd is not None and end.value.rcvd.reason


def test_stop_closes_pages_and_frees_the_port() -> None:
    simulated = SimulatedRun().start()
    server = ConsoleServer(simulated.hub)
    site = Site(simulated, server.start())
    try:
        with site.page("alice") as alice:
            server.stop()
            alice.closed()
        server.stop()
        again = ConsoleServer(simulated.hub, ConsoleConfig(port=int(site.host.rpartition(":")[2])))
        assert again.start().startswith(f"http://{site.host}/")
        again.stop()
    finally:
        simulated.close()
