"""The console of the robots on one computer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from wait_kit import until
from websockets.sync.client import ClientConnection, connect

from hal.machine_folder import RobotFiles
from hal.state_database import STATE_FILE, read_audit_log
from user_sys.console.config import ConsoleConfig
from user_sys.edge import local_estop
from user_sys.edge.local_estop import PressResult
from user_sys.edge.local_link import LocalLink
from user_sys.messages import OperatorCommand, OperatorReply
from user_sys.run.edge_console import EdgeConsole, EdgeConsoleConfig
from user_sys.tunnel.protocol import AnyMessage, Payload

HUNG = tuple(f"hung-{n}" for n in range(12))


def test_hung_drivers_do_not_delay_the_e_stop_of_another_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, pressed = threading.Event(), list[str]()

    def press(files: RobotFiles, person: str, reason: str = "") -> PressResult:
        pressed.append(files.lock_path.name)
        return PressResult(True, "stopped") if "fine" in files.lock_path.name or ended.wait(600) else pytest.fail()

    monkeypatch.setattr(local_estop, "press_estop", press)
    config = EdgeConsoleConfig(
        robots=(*HUNG, "fine"), endpoint=f"ipc://{tmp_path}/e", folder=tmp_path, console=ConsoleConfig(port=0)
    )
    with ExitStack() as stack:
        page = stack.enter_context(_page(config))
        stack.callback(ended.set)
        for _ in range(3):  # the page repeats an unconfirmed press
            page.send(json.dumps({"type": "stop", "operator": "ana", "presses": dict.fromkeys(HUNG, 1)}))
        page.send(json.dumps({"type": "stop", "operator": "ana", "presses": {"fine": 2}}))
        assert json.loads(page.recv(timeout=60))["robot"] == "fine"
        until(lambda: len(pressed) > len(HUNG), "a press of each robot")  # each press has its own thread
        assert len(pressed) == len(HUNG) + 1, "one press in progress for each robot"


def test_repeat_of_a_confirmed_e_stop_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed: list[str] = []

    def press(files: RobotFiles, person: str, reason: str = "") -> PressResult:
        pressed.append(person)
        return PressResult(True, "stopped")

    monkeypatch.setattr(local_estop, "press_estop", press)
    config = EdgeConsoleConfig(
        robots=("arm-0",), endpoint=f"ipc://{tmp_path}/e", folder=tmp_path, console=ConsoleConfig(port=0)
    )
    with _page(config) as page:
        for number in (7, 7, 8):  # the second comes late, after another person's re-arm
            page.send(json.dumps({"type": "stop", "operator": "ana", "presses": {"arm-0": number}}))
            reply = json.loads(page.recv(timeout=60))
            assert reply["confirmed"] and reply["press"] == number
    assert len(pressed) == 2


def test_order_is_audited_with_the_reply_of_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_estop, "press_estop", lambda *_: PressResult(True, "stopped"))
    config = EdgeConsoleConfig(
        robots=("arm-0",), endpoint=f"ipc://{tmp_path}/e", folder=tmp_path, console=ConsoleConfig(port=0)
    )

    def answer(message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, OperatorCommand):
            is_done = message.order == "pause"
            session.send(message.reply(accepted=is_done, reason="" if is_done else "the button is pressed"))

    def audited() -> list[tuple[str, str, str]]:
        entries = read_audit_log(tmp_path / STATE_FILE)
        return sorted((each.person, each.order, each.outcome) for each in entries if each.event == "order")

    with _page(config, "ws") as page, LocalLink(config.endpoint, answer, "arm-0") as session:
        session.send(OperatorReply(robot="arm-0", operator="eva", order="reset", accepted=True))  # to the run's page
        page.send(json.dumps({"type": "hello", "operator": "ana"}))
        for order in ("pause", "re-arm"):
            until(lambda order=order: _is_replied(page, order), "the session replies")
        with _connected(config, "stop") as stops:
            stops.send(json.dumps({"type": "stop", "operator": "ana", "presses": {"arm-0": 1}}))
            assert json.loads(stops.recv(timeout=60))["confirmed"]
        until(lambda: len(audited()) == 3)
    assert audited() == [
        ("ana", "e-stop", "done"),
        ("ana", "pause", "done"),
        ("ana", "re-arm", "refused: the button is pressed"),
    ]


def _is_replied(page: ClientConnection, order: str) -> bool:
    """Sends an order until the session, which may still connect, has replied."""
    page.send(json.dumps({"type": "order", "robot": "arm-0", "order": order}))
    with suppress(TimeoutError):
        while True:
            shown = page.recv(timeout=1)
            if isinstance(shown, str) and json.loads(shown).get("order") == order:
                return True
    return False


@contextmanager
def _page(config: EdgeConsoleConfig, socket: str = "stop") -> Iterator[ClientConnection]:
    """A connection of the page, by default that for e-stops, of a console that serves until the end."""
    stop = threading.Event()
    serving = threading.Thread(target=EdgeConsole(config).serve, args=(stop,))
    serving.start()
    try:
        until(lambda: config.address.exists() and config.address.read_text())
        with _connected(config, socket) as page:
            yield page
    finally:
        stop.set()
        serving.join(60)


def _connected(config: EdgeConsoleConfig, socket: str) -> ClientConnection:
    parts = urlsplit(config.address.read_text())
    return connect(f"ws://{parts.netloc}/{socket}?{parts.query}", proxy=None)
