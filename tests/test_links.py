"""An emulated network in a run's configuration: its process, and the sessions that connect through it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from user_sys.compose import RobotConfig
from user_sys.config import load
from user_sys.edge.outbox import OutboxConfig
from user_sys.edge.session import SessionConfig
from user_sys.errors import ConfigError
from user_sys.gateway import GatewayConfig
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.run.config import RunConfig, RunFolder, RunMetadata, create_run_folder
from user_sys.run.prepare import free_endpoint, prepare_run_folder
from user_sys.run.topology import learner_processes, local_slots, topology
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer

CONFIG = """
robots:
  - {name: far, driver: fake, link: {delay_ms: 30, up_mbit_s: 20}}
  - {name: near, driver: fake}
"""


class Door:
    """A TunnelHandler that accepts peers and ignores messages."""

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None: ...

    def on_peer_closed(self, peer: Peer, reason: str) -> None: ...

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None: ...


def made(tmp_path: Path, text: str = CONFIG) -> tuple[RunConfig, RunFolder, RunMetadata]:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load(RunConfig, path, [f"--runs={tmp_path}"])
    folder, card = create_run_folder(config, "run", free_endpoint(GatewayConfig().endpoint))
    prepare_run_folder(config, folder, card)
    return config, folder, card


def test_run_processes_find_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(robots=(RobotConfig(name="far", driver="fake", link={"delay_ms": 1.0}),))
    folder = RunFolder(Path("runs/demo"))
    for node in (
        *topology(config, folder, "here", lambda _: True),
        *(n for n, _ in learner_processes(folder, "learner", local_slots(0, 2, ()), "here", "tcp://127.0.0.1:1", 1)),
    ):
        assert node.log.parent == tmp_path / "runs" / "demo" / "logs"
        assert not [part for part in node.argv if part.startswith("runs")]


def test_linked_robot_connects_through_emulator(tmp_path: Path) -> None:
    config, folder, card = made(tmp_path)
    nodes = {node.name: node for node in topology(config, folder, "here", lambda _: True)}
    assert sum(node.resources.get("robot:far", 0.0) for node in nodes.values()) <= 1
    session = load(SessionConfig, folder.edge("far") / "session.yaml")
    assert "far-link" in nodes and "near-link" not in nodes
    assert session.endpoint != card.endpoint == load(SessionConfig, folder.edge("near") / "session.yaml").endpoint
    keys, gateway = load_keypair(folder.keys / "far.key"), load_keypair(folder.keys / "gateway.key")
    link = subprocess.Popen(nodes["far-link"].argv, stderr=subprocess.DEVNULL)
    hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name="far")
    public = load_public_key(folder.keys / "gateway.pub")
    try:
        with (
            TunnelServer(card.endpoint, gateway, Keyring(folder.keys), Door()),
            TunnelClient(session.endpoint, keys, public, hello) as client,
        ):
            client.wait_open(120)
            deadline = time.monotonic() + 120
            counts = folder.link("far").with_suffix(".jsonl")
            while client.clock is None or not (counts.exists() and _last(counts)["connections"]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert client.clock.rtt_ns >= 60e6
    finally:
        link.terminate()
        assert link.wait(120) == 0


def _last(counts: Path) -> dict[str, int]:
    return json.loads(counts.read_text().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("setting", "hint"), [("delay: 30", "delay_ms"), ("delay_ms: -1", "a number >= 0")])
def test_invalid_link_setting_is_refused(tmp_path: Path, setting: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        made(tmp_path, f"robots: [{{name: far, driver: fake, link: {{{setting}}}}}]")


def test_outbox_setting_reaches_each_session(tmp_path: Path) -> None:
    _, folder, _ = made(tmp_path, f"{CONFIG}outbox: {{max_bytes: 50000000, when_full: drop_oldest_autonomous}}")
    for robot in ("far", "near"):
        session = load(SessionConfig, folder.edge(robot) / "session.yaml")
        assert session.outbox == OutboxConfig(50_000_000, "drop_oldest_autonomous")


def test_outbox_smaller_than_a_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="outbox.max_bytes: expected a whole number >= "):
        made(tmp_path, f"{CONFIG}outbox: {{max_bytes: 1000}}")


def test_edge_config_refuses_emulated_link(tmp_path: Path) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text(CONFIG)
    argv = ["edge", str(path), "--connect", "tcp://127.0.0.1:5555", "--keys", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "user_sys.commands.main", *argv], capture_output=True, text=True, timeout=120
    )
    assert done.returncode and "Traceback" not in done.stderr
    message = " ".join((done.stdout + done.stderr).split())
    assert "robot far: link:" in message and "user-sys train" in message
