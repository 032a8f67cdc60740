"""The console of the robots on one computer."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from wait_kit import until
from websockets.sync.client import connect

from hal.machine_folder import RobotFiles
from user_sys.console.config import ConsoleConfig
from user_sys.edge.local_estop import PressResult
from user_sys.run import edge_console
from user_sys.run.edge_console import EdgeConsole, EdgeConsoleConfig

HUNG = tuple(f"hung-{n}" for n in range(12))


def test_hung_drivers_do_not_delay_the_e_stop_of_another_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, pressed = threading.Event(), list[str]()

    def press(files: RobotFiles, person: str, reason: str = "") -> PressResult:
        pressed.append(files.lock_path.name)
        return PressResult(True, "stopped") if "fine" in files.lock_path.name or ended.wait(600) else pytest.fail()

    monkeypatch.setattr(edge_console, "press_estop", press)
    config = EdgeConsoleConfig(
        robots=(*HUNG, "fine"), endpoint=f"ipc://{tmp_path}/e", folder=tmp_path, console=ConsoleConfig(port=0)
    )
    stop = threading.Event()
    serving = threading.Thread(target=EdgeConsole(config).serve, args=(stop,))
    serving.start()
    try:
        parts = urlsplit(str(until(lambda: config.address.exists() and config.address.read_text())))
        with connect(f"ws://{parts.netloc}/stop?{parts.query}", proxy=None) as page:
            for _ in range(3):  # the page repeats an unconfirmed press
                page.send(json.dumps({"type": "stop", "operator": "ana", "presses": dict.fromkeys(HUNG, 1)}))
            page.send(json.dumps({"type": "stop", "operator": "ana", "presses": {"fine": 2}}))
            assert json.loads(page.recv(timeout=60))["robot"] == "fine"
        assert len(pressed) == len(HUNG) + 1, "one press in progress for each robot"
    finally:
        ended.set()
        stop.set()
        serving.join(60)
