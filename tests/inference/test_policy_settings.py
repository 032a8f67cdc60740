"""Settings of the policy's location: refusals before the start, and the started processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from hal.resource import Kind
from user_sys.compose import PolicyConfig, RobotConfig
from user_sys.config import load
from user_sys.edge.session import SessionConfig
from user_sys.errors import ConfigError, RunError
from user_sys.inference.__main__ import main
from user_sys.inference.protocol import POLICY_NODE
from user_sys.run.config import ResourceRequestConfig, RunConfig, RunFolder, create_run_folder
from user_sys.run.prepare import prepare_run_folder
from user_sys.run.topology import policy_process
from user_sys.tunnel.keys import load_keypair, new_keypair, save_keypair

ENDPOINT = "tcp://127.0.0.1:5999"


def fleet(runs: Path, **policy: object) -> RunConfig:
    robots = tuple(RobotConfig(name=name, driver="fake") for name in ("left", "right"))
    return RunConfig(robots=robots, runs=runs, policy=PolicyConfig(**policy))  # type: ignore[arg-type]


def prepared(config: RunConfig) -> RunFolder:
    folder, card = create_run_folder(config, "run", ENDPOINT)
    prepare_run_folder(config, folder, card)
    return folder


def test_edge_policy_needs_no_server_key(tmp_path: Path) -> None:
    assert not (prepared(fleet(tmp_path)).keys / "policy.key").exists()


def test_sessions_read_the_servers_address_file(tmp_path: Path) -> None:
    folder = prepared(fleet(tmp_path, location="server", device="cpu"))
    node = policy_process(folder, "cpu", {}, "10.0.0.7")
    given = dict(zip(node.argv[3::2], node.argv[4::2], strict=True))
    assert given["--device"] == "cpu" and given["--listen"] == "tcp://10.0.0.7:0"
    load_keypair(Path(given["--keys"]) / "policy.key")
    session = load(SessionConfig, folder.edge("left") / "session.yaml")
    assert str(session.policy_address) == given["--announce"] and session.policy.location == "server"


def test_external_server_needs_its_public_key(tmp_path: Path) -> None:
    config = fleet(tmp_path, location="server", endpoint="tcp://10.0.0.7:5557")
    folder, card = create_run_folder(config, "run", ENDPOINT)
    with pytest.raises(RunError, match=r"no public key at .*policy.pub"):
        prepare_run_folder(config, folder, card)
    save_keypair(new_keypair(), folder.keys, POLICY_NODE)
    (folder.keys / "policy.key").unlink()
    prepare_run_folder(config, folder, card)
    assert not (folder.keys / "policy.key").exists()


def test_too_fast_robot_is_refused_before_the_start(tmp_path: Path) -> None:
    fast = RobotConfig(name="left", driver="fake", options={"rate_hz": 500.0})
    config = replace(fleet(tmp_path, location="server"), robots=(fast,))
    with pytest.raises(ConfigError, match=r"0.5 of a control period of 2 ms is 1 ms"):
        prepared(config)


GPU = ResourceRequestConfig(kind="gpu", use="policy", colocate="cell", colocate_by="site")


@pytest.mark.parametrize(
    ("location", "resources", "says"),
    [
        ("edge", (GPU,), "the run starts no policy server; add policy.location: server"),
        ("server", (GPU, GPU), "2 are requested with use: policy, but a run has one policy server"),
        ("server", (ResourceRequestConfig(kind="gpu", count=2, use="policy"),), "2 are requested"),
    ],
)
def test_invalid_policy_resource_requests_are_refused(
    location: Literal["edge", "server"], resources: tuple[ResourceRequestConfig, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig(policy=PolicyConfig(location=location), resources=resources)


def test_policy_gpu_is_hidden_from_learners(tmp_path: Path) -> None:
    config = replace(
        fleet(tmp_path, location="server"), resources=(GPU, ResourceRequestConfig(kind="compute", cores=2))
    )
    assert [request.kind for request in config.compute_requests()] == [Kind.COMPUTE]
    assert [(request.kind, request.colocate) for request in config.policy_requests()] == [(Kind.GPU, "cell")]
    assert config.requests()[-1] == config.policy_requests()[0]
    assert not any(need.is_learner_gpu for need in config.resources)
    with pytest.raises(ConfigError, match="not for a robot; leave out use"):
        ResourceRequestConfig(kind="robot", use="policy")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_fraction": 1.0}, "policy.timeout_fraction is 1; it must be above 0 and below 1"),
        ({"timeout_fraction": 0.0}, "policy.timeout_fraction is 0"),
        ({"device": "cuda"}, "policy.device is cuda, which is for a policy server; add policy.location: server"),
        ({"endpoint": "tcp://a:1"}, "policy.endpoint is tcp://a:1, which is for a policy server"),
        ({"location": "server", "endpoint": "a:1"}, "policy.endpoint a:1: expected tcp://HOST:PORT"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyConfig(**settings)  # type: ignore[arg-type]


def test_server_without_key_or_with_a_wrong_address_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--keys", str(tmp_path), "--device", "cpu", "--listen", "tcp://127.0.0.1:0"]) == 2
    assert "no private key at" in caplog.text
    assert main(["--keys", str(tmp_path), "--listen", "127.0.0.1"]) == 2
    assert "expected tcp://ADDRESS:PORT" in caplog.text


def test_torch_is_not_imported_on_the_cpu() -> None:
    code = (
        "import sys, user_sys.inference.__main__ as m, user_sys.edge.session, user_sys.compose as c\n"
        "from user_sys.policies.conformance import example_spec\n"
        "assert m.select_device('cpu') == 'cpu'\n"
        "c.policy_factory('cpu')('mlp', (), example_spec(), 0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
