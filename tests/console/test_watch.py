"""A robot that a program watches through the console."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import simplejpeg
from console_kit import SimulatedRun
from websockets.sync.client import connect

from user_sys.console import page, watch
from user_sys.console.accounts import CERTIFICATE, AccountStore
from user_sys.console.config import ConsoleConfig
from user_sys.console.server import ConsoleServer
from user_sys.console.watch import PersonSignIn, watch_robot
from user_sys.errors import RunError
from user_sys.messages import Preview
from user_sys.run.config import RunConfig, create_run_folder


class Seen:
    """A viewer that keeps the newest message of each topic, and ends the stream when it has all of `wanted`."""

    def __init__(self, wanted: set[str]) -> None:
        self.newest: dict[str, Any] = {}
        self.stop, self._wanted = threading.Event(), wanted

    def show_picture(self, topic: str, image: Any, at_ns: int) -> None:
        self._show(topic, bytes(image))

    def show_numbers(self, topic: str, numbers: dict[str, float], at_ns: int) -> None:
        self._show(topic, numbers)

    def _show(self, topic: str, content: object) -> None:
        self.newest[topic] = content
        if self._wanted <= self.newest.keys():
            self.stop.set()


def test_robot_is_watched_through_its_console() -> None:
    simulated = SimulatedRun().start()
    simulated.state = (0.5, -1.5)
    server = ConsoleServer(simulated.hub)
    try:
        topics = ("front", "wrist", "action", "applied_action", "step", "observation.state")
        seen = Seen({f"panda-0/{topic}" for topic in topics})
        watch_robot(server.start(), "panda-0", seen, seen.stop)
        assert seen.newest["panda-0/observation.state"] == {"0": 0.5, "1": -1.5}
        assert seen.newest["panda-0/front"].startswith(b"\xff\xd8")
        assert seen.newest["panda-0/action"].keys() == {"dx", "dy", "dz", "gripper"}
        assert not simulated.orders("take-over")
    finally:
        server.stop()
        simulated.close()


def test_robot_without_pictures_is_watched_for_longer_than_a_silent_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RECEIVE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(watch, "PING_PERIOD_S", 0.1)
    server, seen = ConsoleServer(SimulatedRun().hub), Seen({"nothing"})
    threading.Timer(3.0, seen.stop.set).start()
    try:
        watch_robot(server.start(), "panda-0", seen, seen.stop)
    finally:
        server.stop()


def test_robot_with_six_cameras_is_watched_at_their_full_rate() -> None:
    simulated = SimulatedRun()
    server, seen, jpeg = (
        ConsoleServer(simulated.hub),
        Seen({"nothing"}),
        simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)),
    )

    def film() -> None:
        for step in range(150):  # at 30 Hz
            for camera in "abcdef":
                simulated.hub.update_preview(Preview(robot="panda-0", camera=camera, step=step), jpeg)
            seen.stop.wait(1 / 30)
        seen.stop.set()

    filming = threading.Thread(target=film)
    filming.start()
    try:
        watch_robot(server.start(), "panda-0", seen, seen.stop)
        assert {f"panda-0/{camera}" for camera in "abcdef"} <= seen.newest.keys()
    finally:
        seen.stop.set()
        filming.join()
        server.stop()


def test_person_signs_in_to_watch(tmp_path: Path) -> None:
    simulated, accounts = SimulatedRun().start(), AccountStore(tmp_path)
    accounts.add("ana", "viewer", "correct horse")
    server = ConsoleServer(simulated.hub, ConsoleConfig(host="0.0.0.0", port=0), accounts=accounts)
    try:
        address = f"https://127.0.0.1:{urlsplit(server.start()).port}/"
        seen, ana = Seen({"panda-0/front"}), PersonSignIn("ana", "correct horse", tmp_path / CERTIFICATE)
        with pytest.raises(RunError, match="refuses 'ana': the name or the password is wrong"):
            watch_robot(address, "panda-0", seen, seen.stop, replace(ana, password="wrong horse"))
        with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):
            watch_robot(address, "panda-0", seen, seen.stop, replace(ana, certificate=None))
        watch_robot(address, "panda-0", seen, seen.stop, ana)
        assert seen.newest["panda-0/front"].startswith(b"\xff\xd8")
    finally:
        server.stop()
        simulated.close()


def test_run_is_viewed_in_foxglove_until_ctrl_c(tmp_path: Path) -> None:
    pytest.importorskip("foxglove", reason="the extra `foxglove` is not installed")
    simulated = SimulatedRun().start()
    server = ConsoleServer(simulated.hub)
    folder, _ = create_run_folder(RunConfig(runs=tmp_path), "first", "tcp://127.0.0.1:1")
    folder.console_address.write_text(server.start())
    program = [sys.executable, "-m", "user_sys.commands.main", "view", str(folder.path)]
    options = ["--robot", "panda-0", "--foxglove", "--port", "0"]
    with subprocess.Popen([*program, *options], stderr=subprocess.PIPE, text=True) as shown:
        try:
            assert shown.stderr is not None
            found = re.search(r"ws://[0-9.:]+", shown.stderr.readline())
            assert found is not None
            with connect(found[0], subprotocols=["foxglove.sdk.v1"], proxy=None) as client:  # type: ignore[list-item]
                topics: set[str] = set()
                while not {"/panda-0/front", "/panda-0/action", "/panda-0/step"} <= topics:
                    topics |= {each["topic"] for each in json.loads(client.recv(60)).get("channels", ())}
            shown.send_signal(signal.SIGINT)
            assert shown.wait(60) == 0
        finally:
            shown.kill()
            server.stop()
            simulated.close()
