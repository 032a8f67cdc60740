"""Where a policy is to act: what is refused before anything is started, and what a run then starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from user_sys.compose import PolicyConfig, RobotConfig
from user_sys.config import load
from user_sys.edge.session import SessionConfig
from user_sys.errors import ConfigError, RunError
from user_sys.inference.__main__ import main
from user_sys.inference.wire import POLICY
from user_sys.prepare import prepare
from user_sys.run_folder import create
from user_sys.topology import RunConfig, topology
from user_sys.tunnel.keys import load_keypair, new_keypair, save_keypair

ENDPOINT = "tcp://127.0.0.1:5999"


def fleet(runs: Path, **policy: object) -> RunConfig:
    robots = tuple(RobotConfig(name=name, driver="fake") for name in ("left", "right"))
    return RunConfig(robots=robots, runs=runs, policy=PolicyConfig(**policy))  # type: ignore[arg-type]


def nodes(config: RunConfig) -> dict[str, tuple[str, ...]]:
    folder, card = create(config, "run", ENDPOINT)
    prepare(config, folder, card)
    return {node.name: node.argv for node in topology(config, folder, "node:here", lambda resource: False)}


def test_at_the_edge_there_is_no_policy_process(tmp_path: Path) -> None:
    assert POLICY not in nodes(fleet(tmp_path))
    assert not (tmp_path / "run" / "keys" / "policy.key").exists()


def test_at_the_site_there_is_one_before_the_robots_and_sessions_know_where_it_says_its_address(tmp_path: Path) -> None:
    found = nodes(fleet(tmp_path, at="site", device="cpu"))
    assert list(found)[:2] == ["gateway", POLICY]
    argv = found[POLICY]
    assert argv[argv.index("--device") + 1] == "cpu" and argv[argv.index("--listen") + 1] == "tcp://127.0.0.1:0"
    load_keypair(tmp_path / "run" / "keys" / "policy.key")
    session = load(SessionConfig, tmp_path / "run" / "edge" / "left" / "session.yaml")
    assert str(session.policy_address) == argv[argv.index("--announce") + 1] and session.policy.at == "site"


def test_one_that_somebody_else_starts_needs_its_public_key_here(tmp_path: Path) -> None:
    config = fleet(tmp_path, at="site", endpoint="tcp://10.0.0.7:5557")
    folder, card = create(config, "run", ENDPOINT)
    with pytest.raises(RunError, match=r"no public key at .*policy.pub"):
        prepare(config, folder, card)
    save_keypair(new_keypair(), folder.keys, POLICY)
    (folder.keys / "policy.key").unlink()
    prepare(config, folder, card)
    assert not (folder.keys / "policy.key").exists()
    assert POLICY not in [node.name for node in topology(config, folder, "node:here", lambda resource: False)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"answer_within": 1.0}, "policy.answer_within is 1: a share of the control period"),
        ({"answer_within": 0.0}, "policy.answer_within is 0"),
        ({"device": "cuda"}, "policy.device is cuda, which is for a policy process: add policy.at: site"),
        ({"endpoint": "tcp://a:1"}, "policy.endpoint is tcp://a:1, which is for a policy process"),
        ({"at": "site", "endpoint": "a:1"}, "policy.endpoint a:1: expected tcp://HOST:PORT"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyConfig(**settings)  # type: ignore[arg-type]


def test_a_process_without_a_key_or_with_a_wrong_address_says_so_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--keys", str(tmp_path), "--device", "cpu", "--listen", "tcp://127.0.0.1:0"]) == 2
    assert "no private key at" in caplog.text
    assert main(["--keys", str(tmp_path), "--listen", "127.0.0.1"]) == 2
    assert "expected tcp://ADDRESS:PORT" in caplog.text


def test_on_the_processor_neither_the_process_nor_a_session_imports_torch() -> None:
    code = (
        "import sys, user_sys.inference.__main__ as m, user_sys.edge.session, user_sys.compose as c\n"
        "from user_sys.policies.conformance import example_spec\n"
        "assert m.chosen_device('cpu') == 'cpu'\n"
        "c.policy_maker('cpu')('mlp', (), example_spec(), 0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
