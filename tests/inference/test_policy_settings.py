"""Settings of the policy's location: refusals before the start, where it acts, and the started processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from inference_kit import OBSERVATION, SPEC, make_keys, remote, running, unavailable
from run_kit import until, user_sys

from hal.resource import Kind
from hal.spec import ArraySpec, CameraSpec
from user_sys.compose import PolicyConfig, RobotConfig
from user_sys.config import load
from user_sys.edge.session import SessionConfig
from user_sys.episode import decode_chunk
from user_sys.errors import ConfigError, RunError
from user_sys.inference.__main__ import MAX_ELEMENTS, PolicyServerConfig, main, policy_opener, require_own_policy
from user_sys.inference.policy_server import PolicyServer
from user_sys.inference.protocol import POLICY_NODE, PolicyDescription
from user_sys.policies.mlp import MlpSettings
from user_sys.run.config import ResourceRequestConfig, RunConfig, RunFolder, create_run_folder
from user_sys.run.prepare import prepare_run_folder, resolve_paths
from user_sys.run.topology import ProcessSlot, policy_process
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.tunnel.keys import Keyring, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.weights.catalog import BlobCache
from user_sys.weights.governor import GovernorConfig
from user_sys.weights.receiver import ReceiverConfig
from user_sys.weights.version_store import VersionStore

ENDPOINT = "tcp://127.0.0.1:5999"
GPU = ResourceRequestConfig(kind="gpu", use="policy", colocate="cell", colocate_by="site")
FLEET = """
robots:
  - {name: left, driver: fake, task: reach, options: {rate_hz: 10}}
  - {name: right, driver: fake, task: reach, options: {rate_hz: 10}}
policy: {location: server, device: cpu, timeout_fraction: 0.9}
demonstrations: {episodes: 2}
learner: {max_training_s: 600, batch_size: 64, warmup_updates: 50}
evaluation: {episodes: 2, video_episodes: 0}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


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
    config = fleet(tmp_path, location="server", device="cpu")
    given = dict(
        word.split("=")
        for word in policy_process(folder, config, ProcessSlot(address="10.0.0.7"), "desk", ENDPOINT).argv[3:]
    )
    assert given["--listen"] == "tcp://10.0.0.7:0" and given["--gateway"] == ENDPOINT
    load_keypair(Path(given["--keys"]) / "policy.key")
    session = load(SessionConfig, folder.edge("left") / "session.yaml")
    assert str(session.policy_address) == given["--announce"] and session.policy.location == "server"


def test_settings_of_weights_and_tunnels_reach_the_policy_server(tmp_path: Path) -> None:
    config = replace(
        fleet(tmp_path, location="server", device="cpu"),
        weights=ReceiverConfig(
            max_staleness_versions=3, governor=GovernorConfig(enabled=False, link_bytes_per_s=1e6), precisions=("bf16",)
        ),
        tunnel=TunnelLimits(dead_after_s=30.0, weights=ChannelLimits(window_bytes=1 << 20)),
    )
    argv = policy_process(prepared(config), config, ProcessSlot(), "desk", ENDPOINT).argv
    found = load(PolicyServerConfig, None, argv[3:])
    assert found.weights == config.weights and found.tunnel == config.tunnel


def test_server_of_a_run_gets_its_policy(tmp_path: Path) -> None:
    options = {"type": "act", "config": {"dim_model": (16, 8), "optimizer_lr": 1e-5}}
    config = fleet(tmp_path, kind="lerobot", location="server", device="cpu", options=options, features=("a",))
    argv = policy_process(prepared(fleet(tmp_path)), config, ProcessSlot(), "desk", ENDPOINT).argv
    own = load(PolicyServerConfig, None, argv[3:]).policy
    assert (own.kind, own.features, own.device) == ("lerobot", ("a",), "cpu")
    require_own_policy(own, PolicyDescription(kind="lerobot", options=options, features=("a",), spec=SPEC))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("steered", {"base": "flow"}),
        ("steered", {"base": "lerobot", "base_options": {"path": "act"}}),
        ("lerobot", {"path": "act", "statistics": "latest"}),
        ("lerobot", {"path": "~/act"}),
        ("lerobot", {"path": "lerobot/smolvla_base"}),
        ("vla", {"text_encoder": "act"}),
    ],
)
def test_server_with_the_policy_section_of_a_run_acts_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    for name in ("act", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    own = PolicyConfig(kind=kind, options=options, endpoint="tcp://gpu:5557")
    sent = resolve_paths(RunConfig(policy=own)).policy
    monkeypatch.setenv("HOME", "/root")
    require_own_policy(own, PolicyDescription(kind=kind, options=sent.options, features=(), spec=SPEC))


def test_options_that_are_left_out_equal_their_defaults() -> None:
    options = {"hidden": list(MlpSettings().hidden)}
    require_own_policy(PolicyConfig(), PolicyDescription(kind="mlp", options=options, features=(), spec=SPEC))


LONG = [f"layers.{number}" for number in range(100)]


@pytest.mark.parametrize(
    ("kind", "own", "requested", "reason"),
    [
        ("lerobot", {"path": "a/act"}, {"path": "/b/pi0"}, "options.path is 'a/act', the robot's '/b/pi0'; set"),
        ("lerobot", {"type": "act"}, {"path": "/b/act"}, "options.path is None, the robot's '/b/act'; set"),
        (
            "lerobot",
            {"type": "act", "config": {"chunk_size": 8, "n_obs_steps": 1}},
            {"type": "act", "config": {"chunk_size": 8}},
            "options.config.n_obs_steps is 1, the robot's None; set",
        ),
        (
            "vla",
            {"train": {"mode": "modules", "modules": [*LONG, "head"]}},
            {"train": {"mode": "modules", "modules": [*LONG, "tail"]}},
            "'head'], the robot's",
        ),
        ("steered", {"base": "flow"}, {"base": "vla"}, "options.base is 'flow', the robot's 'vla'; set"),
        (
            "steered",
            {"base_options": {"hidden": [64]}},
            {"base_options": {"hidden": [64], "chunk_length": 7}},
            "options.base_options.chunk_length is",
        ),
    ],
)
def test_first_option_that_differs_is_named_with_both_values(
    kind: str, own: dict[str, Any], requested: dict[str, Any], reason: str
) -> None:
    wanted = PolicyDescription(kind=kind, options=requested, features=(), spec=SPEC)
    with pytest.raises(ConfigError, match="is another than the robot's: its policy") as refusal:
        require_own_policy(PolicyConfig(kind=kind, options=own), wanted)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        ({"kind": "lerobot", "options": {"path": "evil/act"}}, "kind is 'mlp', the robot's 'lerobot'; set both"),
        ({"options": {"hidden": [20000, 20000]}}, "options.hidden is [256, 256], the robot's [20000, 20000]; set"),
        ({"features": ("observation.state",)}, "features is [], the robot's ['observation.state']; set"),
    ],
)
def test_policy_that_is_not_the_servers_is_refused(tmp_path: Path, requested: dict[str, Any], reason: str) -> None:
    keys = make_keys(tmp_path / "keys")
    config = PolicyServerConfig(gateway="tcp://127.0.0.1:1", keys=keys, policy=PolicyConfig(device="cpu"))
    own = load_keypair(keys / f"{POLICY_NODE}.key")
    server = PolicyServer("tcp://127.0.0.1:0", own, Keyring(keys), policy_opener(config))
    with running(server) as endpoint, remote(lambda: endpoint, keys, timeout_s=2.0, **requested) as policy:
        unavailable(policy, f"is another than the robot's: its policy.{reason}")


@pytest.mark.parametrize(
    ("kind", "giant"),
    [
        ("mlp", {"action": ArraySpec.from_rows("action", [("x", "1", -1.0, 1.0)] * (MAX_ELEMENTS + 1))}),
        ("vla", {"cameras": (CameraSpec(name="front", height=10**6, width=10**6, rate_hz=10.0),)}),
    ],
)
def test_policy_of_a_giant_robot_is_refused(tmp_path: Path, kind: str, giant: dict[str, Any]) -> None:
    spec = msgspec.structs.replace(SPEC, **giant)
    own, keys = PolicyConfig(kind=kind, device="cpu"), make_keys(tmp_path / "keys")
    open_policy = policy_opener(PolicyServerConfig(gateway="tcp://127.0.0.1:1", keys=keys, policy=own))
    with pytest.raises(ConfigError, match="this robot's have more"):
        open_policy(PolicyDescription(kind=kind, options={}, features=(), spec=spec)).__enter__()


def test_policy_explores_differently_after_each_start_of_its_server(tmp_path: Path) -> None:
    own, keys = PolicyConfig(device="cpu"), make_keys(tmp_path / "keys")
    config = PolicyServerConfig(gateway="tcp://127.0.0.1:1", keys=keys, policy=own)
    description = PolicyDescription(kind="mlp", options={}, features=(), spec=SPEC)
    drawn = []
    for _ in range(2):
        with policy_opener(config)(description) as policy:
            drawn.append(policy.act_batch([OBSERVATION], [""], deterministic=False)[0].actions)
    assert not np.array_equal(*drawn)


def test_robots_of_a_resumed_run_with_weights_do_not_explore(tmp_path: Path) -> None:
    robots = (RobotConfig(name="left", driver="fake", explore="on"),)
    config = replace(fleet(tmp_path, location="server", device="cpu"), robots=robots)
    folder, card = create_run_folder(config, "run", ENDPOINT)
    explores = list[bool]()
    for _ in range(2):
        prepare_run_folder(config, folder, card)
        explores.append(load(SessionConfig, folder.edge("left") / "session.yaml").explore)
        VersionStore(folder.weights).save([], BlobCache(), b"")  # as of a version
    assert explores == [True, False]


def test_robots_explore_until_their_own_learner_has_weights(tmp_path: Path) -> None:
    robots = tuple(
        RobotConfig(name=name, driver="fake", explore="on", options={"rate_hz": rate_hz})
        for name, rate_hz in (("left", 10), ("right", 20))
    )
    config = replace(fleet(tmp_path, location="server", device="cpu"), robots=robots)
    folder, card = create_run_folder(config, "run", ENDPOINT)
    VersionStore(folder.weights).save([], BlobCache(), b"")  # of the first embodiment's learner
    prepare_run_folder(config, folder, card)
    sessions = [load(SessionConfig, folder.edge(robot.name) / "session.yaml") for robot in robots]
    assert [session.explore for session in sessions] == [False, True]


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
    fast = RobotConfig(name="left", driver="fake", real_time=True, options={"rate_hz": 500.0})
    config = replace(fleet(tmp_path, location="server"), robots=(fast,))
    with pytest.raises(ConfigError, match=r"0.5 of a control period of 2 ms is 1 ms"):
        prepared(config)


def test_swaps_between_episodes_need_a_policy_at_the_edge(tmp_path: Path) -> None:
    config = replace(fleet(tmp_path, location="server"), weights=ReceiverConfig(swap_at="episode"))
    with pytest.raises(ConfigError, match="set weights.swap_at: chunk, or policy.location: edge"):
        prepared(config)


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
        (
            {"location": "edge", "device": "cuda"},
            "policy.device is cuda, which is for a policy server; add",
        ),
        ({"location": "edge", "endpoint": "tcp://a:1"}, "policy.endpoint is tcp://a:1, which is for a policy server"),
        ({"location": "server", "endpoint": "a:1"}, "policy.endpoint a:1: expected tcp://HOST:PORT"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyConfig(**settings)  # type: ignore[arg-type]


def test_server_without_key_or_with_a_wrong_address_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main([f"--keys={tmp_path}", "--policy.device=cpu", "--listen=tcp://127.0.0.1:0"]) == 2
    assert "no private key at" in caplog.text
    assert main([f"--keys={tmp_path}", "--listen=127.0.0.1"]) == 2
    assert "expected tcp://ADDRESS:PORT" in caplog.text
    assert main(["--listn=tcp://127.0.0.1:0"]) == 2
    assert "listen" in caplog.text


def test_torch_is_not_imported_on_the_cpu() -> None:
    code = (
        "import sys, user_sys.inference.__main__ as m, user_sys.edge.session, user_sys.compose as c\n"
        "from user_sys.policies.conformance import example_spec\n"
        "assert m.select_device('cpu') == 'cpu'\n"
        "c.make_policy(c.PolicyConfig(), example_spec(), 0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def versions(run: Path, robot: str) -> set[int]:
    """The versions of a robot's stored steps."""
    if not any((run / "store").glob("*.seg")):
        return set()
    with LogReader.open(run / "store") as reader:
        chunks = [decode_chunk(bytes(reader.read(ref))) for ref in reader.records() if ref.kind == CHUNK_KIND]
    return {int(v) for chunk in chunks if chunk.header.robot == robot for v in chunk.columns["policy_version"]}


@pytest.mark.slow  # the quick variant is in tests/edge/test_session.py
@pytest.mark.timeout(3600)
def test_run_uses_its_policy_server_and_survives_its_death(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "site"
    (tmp_path / "fleet.yaml").write_text(FLEET)
    logs = {robot: run / "logs" / f"{robot}-session.log" for robot in ("left", "right")}
    with user_sys(tmp_path, "train", "fleet.yaml", "--name", "site") as launch:
        until(lambda: all(log.exists() for log in logs.values()) or launch.process.poll() is not None, "it starts")
        for robot in logs:
            until(lambda name=robot: max(versions(run, name), default=-1) > 0, f"{robot} acts by what was learned")
        first = launch.pid_of("user_sys.inference")
        assert first is not None, launch.err
        newest = {robot: max(versions(run, robot)) for robot in logs}
        before = {robot: len(log.read_text()) for robot, log in logs.items()}  # its start may have had such events
        os.kill(first, signal.SIGKILL)
        until(lambda: launch.pid_of("user_sys.inference") not in (None, first), "the server is started again")
        for robot, log in logs.items():
            for event in ("session.policy_unavailable", "session.policy_available"):
                until(lambda name=robot, log=log, event=event: event in log.read_text()[before[name] :], event)
            until(lambda name=robot: max(versions(run, name)) > newest[name], f"{robot} goes on, with newer weights")
        launch.interrupt()
        assert launch.wait() == 130, launch.err
        launch.require_nothing_left()
        assert "user-sys" not in launch.err
    for log in logs.values():
        text = log.read_text()
        assert re.search(r"policy_unavailable robot=\w+ the policy at 127.0.0.1:\d+ .*; the robot holds", text)
        assert "session.policy_available" in text and "token=2" not in text and "Traceback" not in text
