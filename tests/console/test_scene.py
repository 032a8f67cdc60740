"""The process of a 3D view: it starts with a page, is replaced after a failure, and disturbs no other page."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from console_kit import SimulatedRun, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from user_sys.compose import RobotConfig, robot_spec
from user_sys.console.server import ConsoleServer

viser = pytest.importorskip("viser", reason="the extra `scene` is not installed")
pytestmark = pytest.mark.slow

STATE = (0.0, -0.8, 0.0, -2.4, 0.0, 1.6, 0.8, *(0.0,) * 14, 0.08)


def processes() -> list[int]:
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each.pid for each in children if "user_sys.console.scene_process" in each.cmdline()]


def test_killed_view_is_replaced_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    simulated = SimulatedRun().start()
    simulated.hub.set_robot_spec("panda-0", robot_spec(RobotConfig()))
    simulated.hub.set_robot_spec("arm-1", robot_spec(RobotConfig()))
    simulated.state = STATE
    wrong = tmp_path / "wrong.xml"
    server = ConsoleServer(simulated.hub, drawing_sources={"panda-0": "panda", "arm-1": str(wrong)})
    parts = urlsplit(server.start())

    def watch() -> ClientConnection:
        address = f"ws://{parts.netloc}/scene/panda-0?{parts.query}"
        protocol = Subprotocol(f"viser-v{viser.__version__}")
        return connect(address, subprotocols=[protocol], proxy=None, open_timeout=120, max_size=None)

    def get(path: str) -> httpx.Response:
        return httpx.get(f"http://{parts.netloc}{path}?{parts.query}", trust_env=False, timeout=120)

    try:
        refused = get("/scene/arm-1/")
        assert refused.status_code == 503 and f"description {wrong}: " in refused.text and refused.text.count("\n") == 1
        with watch() as page:
            page.send(b"nothing that a page sends reaches viser")
            for angle in (0.1, 0.2, 0.3):
                page.recv(60)
                simulated.state = (angle, *STATE[1:])
            (killed,) = processes()
            psutil.Process(killed).kill()
            with pytest.raises(ConnectionClosed):
                while page.recv(60):
                    pass
        assert get("/").status_code == 200
        until(lambda: not processes() and get("/scene/panda-0/").status_code == 200 and processes())
        with watch() as page:
            page.recv(60)
        assert processes() != [killed]
    finally:
        server.stop()
        simulated.close()
    until(lambda: not processes())
