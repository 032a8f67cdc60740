"""Stored episodes in Rerun and Foxglove."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from interchange_kit import episode_chunks, make_store, read_store, usual_store
from websockets.sync.client import connect

from user_sys.commands.main import main
from user_sys.commands.view import stored_player
from user_sys.interchange.viewers import Viewer, foxglove_viewer, show_episode


def test_foxglove_client_reads_an_episode(tmp_path: Path) -> None:
    pytest.importorskip("foxglove", reason="the extra `foxglove` is not installed")
    usual_store(tmp_path / "store")
    episode = next(iter(read_store(tmp_path / "store").values()))
    topics = {}
    with foxglove_viewer("test", 0) as (viewer, address):
        show_episode(viewer, episode, None)  # advertises the topics
        with connect(address, subprotocols=["foxglove.sdk.v1"], proxy=None) as client:  # type: ignore[list-item]
            while len(topics) < 5:
                said = json.loads(client.recv(30))
                topics |= {each["topic"]: each["id"] for each in said.get("channels", ())}
            wanted = {1: topics["/panda-0/step"], 2: topics["/panda-0/front"]}
            for subscription, channel in wanted.items():
                subscribed = [{"id": subscription, "channelId": channel}]
                client.send(json.dumps({"op": "subscribe", "subscriptions": subscribed}))
            stop = threading.Event()

            def play() -> None:
                while not stop.is_set():
                    show_episode(viewer, episode, None, stop)

            thread = threading.Thread(target=play)
            thread.start()
            read: dict[int, bytes] = {}
            while len(read) < 2:
                message = client.recv(30)
                if isinstance(message, bytes) and message[0] == 1:
                    subscription, _ = struct.unpack_from("<IQ", message, 1)
                    read[subscription] = message[13:]
            stop.set()
            thread.join()
    assert "reward" in json.loads(read[1]) and b"\xff\xd8" in read[2]


def test_rerun_recording_has_the_episode_and_analytics_are_off(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    usual_store(tmp_path / "store")
    file = tmp_path / "episode.rrd"
    assert main(["view", str(tmp_path / "store"), "--rerun", "--save", str(file)]) == 0
    shown = subprocess.run(
        [sys.executable, "-m", "rerun_cli", "rrd", "print", str(file)], check=True, capture_output=True, text=True
    )
    assert "panda-0" in shown.stdout and "EncodedImage" in shown.stdout and "Scalars" in shown.stdout


def test_repetitions_of_a_one_step_episode_have_a_pause(tmp_path: Path) -> None:
    class SixthWait(threading.Event):
        pauses: list[float | None] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.pauses.append(timeout)
            if len(self.pauses) == 6:
                self.set()
            return self.is_set()

    make_store(tmp_path / "store", episode_chunks("a", 1))
    stop = SixthWait()
    stored_player(tmp_path / "store", None, repeats=True)(create_autospec(Viewer, number_prefix=""), stop)
    assert stop.pauses == [0.0, 1.0] * 3


def test_missing_library_and_misuse_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual_store(tmp_path / "store")
    monkeypatch.setattr("user_sys.interchange.viewers.find_spec", lambda name: None)
    for kind in ("rerun", "foxglove"):
        assert main(["view", str(tmp_path / "store"), f"--{kind}"]) == 2
        assert f"[{kind}]" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "store")]) == 2
    assert "--rerun or --foxglove" in capsys.readouterr().err
