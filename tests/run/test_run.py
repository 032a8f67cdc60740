"""Run folders, their preparation, the progress of a run, and bad input at the command line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from run_kit import user_sys
from safetensors.numpy import save_file

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import save_state
from user_sys.commands.main import main
from user_sys.compose import PolicyConfig, RobotConfig, robot_spec
from user_sys.config import load, save
from user_sys.console.accounts import AccountStore
from user_sys.console.config import ConsoleConfig
from user_sys.edge.help_requests import HelpConfig, InterventionConfig
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.session import SessionConfig
from user_sys.errors import ConfigError, ExitStatus, RunError
from user_sys.gateway import Gateway, GatewayConfig
from user_sys.gateway.relay import RelayConfig
from user_sys.learner.checkpoint import Checkpoint, save_checkpoint
from user_sys.learner.config import LearnerConfig
from user_sys.plugins import load_algorithm
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.rewards.reward import FORMAT, RewardMetadata
from user_sys.robot_records import embodiment_names, read_robot_records
from user_sys.run import config as config_module
from user_sys.run import prepare
from user_sys.run.config import (
    METADATA_FILE,
    EvaluationConfig,
    RunConfig,
    RunFolder,
    RunMetadata,
    TargetConfig,
    create_run_folder,
    default_run_name,
    open_run_folder,
)
from user_sys.run.evaluate import exit_status
from user_sys.run.prepare import (
    LAUNCHER,
    LaunchRequest,
    check_plugins,
    free_endpoint,
    gateway_client,
    load_run,
    open_or_create_folder,
    prepare_run_folder,
    print_join_instructions,
    report_unreadable_checkpoints,
)
from user_sys.run.report import RunSummary, stored_episodes
from user_sys.tunnel import router
from user_sys.tunnel.client import TunnelState
from user_sys.tunnel.keys import GATEWAY_NAME, Keyring, load_keypair, new_keypair, save_keypair

ENDPOINT = "tcp://127.0.0.1:5999"


def fleet(runs: Path, *names: str) -> RunConfig:
    robots = tuple(RobotConfig(name=name, driver="fake") for name in names or ("left",))
    return RunConfig(robots=robots, runs=runs)


# Run folders


def test_run_folder_reopens_with_its_settings(tmp_path: Path) -> None:
    config = replace(fleet(tmp_path / "runs", "left", "right"), seed=7)
    folder, metadata = create_run_folder(config, "first", ENDPOINT)
    again, found, found_metadata = open_run_folder(tmp_path / "runs" / "first")
    assert again.path == folder.path.resolve() and found_metadata == metadata
    assert found == replace(config, name="first", gateway=replace(config.gateway, endpoint=ENDPOINT))
    assert found_metadata.endpoint == ENDPOINT


def test_overrides_change_settings_of_a_resumed_run(tmp_path: Path) -> None:
    create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    _, config, _ = open_run_folder(tmp_path / "first", ["--learner.max_training_s=7", "--console.port", "0"])
    assert (config.learner.max_training_s, config.console.port) == (7.0, 0)
    with pytest.raises(ConfigError, match="did you mean 'learner.batch_size'"):
        open_run_folder(tmp_path / "first", ["--learner.batchsize=7"])
    with pytest.raises(RunError, match=f"gateway.endpoint: the run in .*first listens on {ENDPOINT}"):
        open_run_folder(tmp_path / "first", ["--gateway.endpoint=tcp://0.0.0.0:7777"])


def test_settings_of_another_version_are_refused(tmp_path: Path) -> None:
    folder, _ = create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    folder.config.write_text(folder.config.read_text() + "retired: 3\n")
    with pytest.raises(ConfigError, match="retired.*; this run was made by another version, or its file was edited"):
        open_run_folder(folder.path)


def test_earlier_setting_that_was_off_is_left_out(tmp_path: Path) -> None:
    folder, _ = create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    settings, at = folder.config.read_text(), "  publish:\n"
    for value in ("0.0", "0.1"):
        folder.config.write_text(settings.replace(at, f"{at}    kl: {value}\n"))
        with nullcontext() if value == "0.0" else pytest.raises(ConfigError, match="learner.publish.kl: unknown key"):
            assert open_run_folder(folder.path)[1].learner == fleet(tmp_path).learner


def test_emptied_settings_are_not_read_as_defaults(tmp_path: Path) -> None:
    folder, _ = create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    folder.config.write_bytes(b"")
    with pytest.raises(RunError, match=r"config.yaml: name is '', and the run is called 'first'"):
        open_run_folder(folder.path)


def test_settings_of_a_run_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def recorded(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    assert any(Path(name).name.startswith(".config.yaml.") for name in synced), synced


@pytest.mark.parametrize("file", ["my arm.yaml", "lift+place.yaml", "arm (2).yaml", ".arm.yaml", "+.yaml", "a" * 99])
def test_default_name_of_any_file_is_one_that_the_run_accepts(file: str, tmp_path: Path) -> None:
    folder, _ = create_run_folder(fleet(tmp_path), default_run_name(Path("configs") / file), ENDPOINT)
    _, config, _ = open_run_folder(folder.path)
    assert config.name == folder.path.name


def test_existing_run_name_is_refused(tmp_path: Path) -> None:
    create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    with pytest.raises(RunError, match=r"the run 'first' exists in .*; continue it with `--resume .*/first`"):
        create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    open_run_folder(tmp_path / "first")


def test_run_whose_creation_was_killed_can_be_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt  # no handler cleans up, as after a power cut

    with monkeypatch.context() as patch:
        patch.setattr(config_module, "replace_durably", killed)
        with pytest.raises(KeyboardInterrupt):
            create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    open_run_folder(tmp_path / "first")


def test_killed_start_leaves_no_run_without_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fleet(tmp_path / "runs")
    request = LaunchRequest("cloud", None, None, False, False, tmp_path / "own", [])
    home = config.runs / "first"
    with monkeypatch.context() as killing:
        killing.setattr(Path, "symlink_to", _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            _open(request, config, home)
    assert not home.exists()
    _open(request, config, home)
    assert open_run_folder(home)[0].keys.resolve() == tmp_path / "own"


def test_resume_without_the_folder_of_keys_is_refused(tmp_path: Path) -> None:
    config = fleet(tmp_path / "runs")
    request = LaunchRequest("cloud", None, None, False, False, tmp_path / "own", [])
    _open(request, config, home := config.runs / "first")
    (tmp_path / "own").rename(tmp_path / "moved")
    message = f"{home}/keys is a link to {tmp_path}/own; move the keys back, or make the link again with `ln -sfn KEYS"
    with pytest.raises(RunError, match=re.escape(message)):
        load_run(replace(request, resume=home))


def _raise_interrupt(*args: object, **settings: object) -> None:
    raise KeyboardInterrupt


def test_run_that_another_launcher_runs_is_refused(tmp_path: Path) -> None:
    config = replace(fleet(tmp_path), console=ConsoleConfig(enabled=False))
    create_run_folder(config, "first", ENDPOINT)
    folder, config, _ = open_run_folder(tmp_path / "first")
    request = LaunchRequest("train", None, folder.path, False, False, None, ["--seed=9"])
    with open_or_create_folder(request, config, folder.path):
        before = folder.config.read_bytes()
        for launch in (lambda: load_run(request), lambda: _open(request, replace(config, seed=9), folder.path)):
            with pytest.raises(RunError, match=rf"first is already run by pid {os.getpid()} of \S+; end that first"):
                launch()
        assert folder.config.read_bytes() == before
    assert load_run(request)[0].seed == 9


def test_run_at_the_port_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher, with the same keys, would reach the gateway of the other run, and replace that run's launcher."""
    monkeypatch.setattr(router, "BIND_TIMEOUT_S", 0.2)
    config = replace(fleet(tmp_path / "runs"), console=ConsoleConfig(enabled=False))
    folder, metadata = create_run_folder(config, "first", endpoint := free_endpoint("tcp://127.0.0.1:0"))
    prepare_run_folder(config, folder, metadata)
    (tmp_path / "second.yaml").write_text("console: {enabled: false}\n")
    at_port = [f"--gateway.endpoint={endpoint}", f"--runs={tmp_path / 'runs'}"]
    new = LaunchRequest("cloud", tmp_path / "second.yaml", None, False, False, folder.keys, at_port)
    resumed = LaunchRequest("cloud", None, folder.path, False, False, None, [])
    server = Gateway(GatewayConfig(endpoint=endpoint), folder.path)
    with ExitStack() as stack:
        stop = threading.Event()
        thread = threading.Thread(target=server.run, args=(stop,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        launcher = stack.enter_context(gateway_client(folder, metadata, LAUNCHER))
        launcher.wait_open(60)
        for request, remedy in ((new, "choose another port with"), (resumed, "its robots connect there")):
            with pytest.raises(RunError, match=f"cannot listen on {endpoint} .*; {remedy}"):
                load_run(request)
        assert launcher.state is TunnelState.OPEN
        assert [path.name for path in config.runs.iterdir()] == ["first"]
    for request in (new, resumed):
        load_run(request)


def _open(request: LaunchRequest, config: RunConfig, home: Path) -> None:
    with open_or_create_folder(request, config, home):
        pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run folder: it has no run.json"),
        (b"{", "cannot be read"),
        (b'{"format": 1}', "cannot be read"),
        (
            msgspec.json.encode(RunMetadata(format=3, name="x", started_unix_s=0.0, endpoint=ENDPOINT)),
            r"run format 3, this version reads 2",
        ),
    ],
)
def test_invalid_run_folder_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    folder, _ = create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    if content is None:
        (folder.path / METADATA_FILE).unlink()
    else:
        (folder.path / METADATA_FILE).write_bytes(content)
    with pytest.raises(RunError, match=message):
        open_run_folder(folder.path)
    with pytest.raises(RunError, match="not a run folder"):
        open_run_folder(tmp_path / "nowhere")


# Preparation


def test_preparing_again_keeps_keys_and_allows_a_new_robot(tmp_path: Path) -> None:
    config = fleet(tmp_path, "left")
    folder, metadata = create_run_folder(config, "first", ENDPOINT)
    prepare_run_folder(config, folder, metadata)
    before = {path.name: path.read_bytes() for path in folder.keys.glob("*.key")}
    assert set(before) == {"gateway.key", "learner.key", "console.key", "launcher.key", "left.key"}
    larger = fleet(tmp_path, "left", "right")
    specs = prepare_run_folder(larger, folder, metadata)
    after = {path.name: path.read_bytes() for path in folder.keys.glob("*.key")}
    assert set(after) - set(before) == {"right.key"} and all(after[name] == key for name, key in before.items())
    for path in folder.keys.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        public = load_keypair(path).public
        allowed = "\n".join(p.read_text() for p in (folder.keys / "allowed").rglob("*") if p.is_file())
        assert (public in allowed) == (path.stem != "gateway")
    assert set(specs) == {"left", "right"}


def test_reward_of_a_resumed_run_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "load_reward", lambda config: None)
    folder, _ = create_run_folder(replace(fleet(tmp_path), console=ConsoleConfig(enabled=False)), "first", ENDPOINT)
    overrides = ["--rewards.kind=classifier", "--rewards.options={model: reward.safetensors}"]
    request = LaunchRequest("train", None, folder.path, False, False, None, overrides)
    config, _ = load_run(request)
    assert config.rewards.options["model"] == str(tmp_path / "reward.safetensors")


def save_model(path: Path, cameras: list[str], kind: str = "progress") -> None:
    """A reward's file without tensors."""
    seen = RewardMetadata(
        format=FORMAT, cameras=tuple(cameras), tasks=("reach",), temperature=1.0, successes=5, failures=5
    )
    save_file({}, path, {kind: msgspec.json.encode(seen).decode()})


def test_progress_model_that_robots_cannot_use_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "help.safetensors"
    robot = RobotConfig(name="arm", driver="fake", task="reach", options={"cameras": ["front"]})
    help_ = InterventionConfig(help=HelpConfig(progress=str(path)))
    config = RunConfig(robots=(robot,), intervention=help_)
    save_model(path, ["front"])
    check_plugins(config)
    for cameras, kind, problem in (
        (["front", "top"], "progress", r"reads the cameras \['top'\]; fake has \['front'\]"),
        (["front"], "classifier", "help.safetensors holds no progress"),
    ):
        save_model(path, cameras, kind)
        with pytest.raises(ConfigError, match=f"^intervention.help.progress: .*{problem}") as caught:
            check_plugins(config)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"weights")
    with pytest.raises(ConfigError, match="holds no progress"):
        check_plugins(config)


@pytest.mark.parametrize(
    ("section", "override"),
    [
        ("intervention", "--intervention.reset_instructions=put the cube on the mark"),
        ("outbox", "--outbox.when_full=drop_oldest_autonomous"),
        ("recorder", "--recorder.raw_cameras=[wrist]"),
    ],
)
def test_section_that_only_a_robots_own_file_can_set_is_refused(section: str, override: str, tmp_path: Path) -> None:
    base = replace(fleet(tmp_path / "runs"), robots=(), console=ConsoleConfig(enabled=False))
    save(base, tmp_path / "cloud.yaml")
    new = LaunchRequest("cloud", tmp_path / "cloud.yaml", None, False, False, tmp_path, [])
    folder, _ = create_run_folder(base, "first", ENDPOINT)
    for request in (new, replace(new, config=None, resume=folder.path)):
        load_run(request)
        with pytest.raises(ConfigError, match=f"^{section}: .* in the file of `user-sys edge` on the robot's computer"):
            load_run(replace(request, overrides=[override]))


def test_section_of_robots_does_not_stop_the_resume_of_an_older_run(tmp_path: Path) -> None:
    help_ = InterventionConfig(ends_episode=True)
    config = replace(fleet(tmp_path), robots=(), console=ConsoleConfig(enabled=False), intervention=help_)
    folder, _ = create_run_folder(config, "first", ENDPOINT)
    load_run(LaunchRequest("cloud", None, folder.path, False, False, None, ["--seed=9"]))


def test_cloud_says_that_its_sections_of_robots_are_not_those_of_user_sys_edge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fleet(tmp_path)
    folder, metadata = create_run_folder(config, "first", ENDPOINT)
    save_keypair(new_keypair(), folder.keys, GATEWAY_NAME)
    print_join_instructions(config, folder, metadata, Console())
    assert "intervention" not in capsys.readouterr().out
    waiting = replace(config, intervention=InterventionConfig(reset_instructions="put the cube on the mark"))
    print_join_instructions(waiting, folder, metadata, Console())
    line = "intervention: for robots that this command starts; `user-sys edge` applies what its CONFIG sets\n"
    assert line in capsys.readouterr().out


def test_files_of_a_resumed_run_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = create_run_folder(replace(fleet(tmp_path), console=ConsoleConfig(enabled=False)), "first", ENDPOINT)
    overrides = [
        "--intervention.help.progress=progress.safetensors",
        "--console={enabled: false, host: 0.0.0.0, certificate: lab.pem, certificate_key: lab.key}",
    ]
    request = LaunchRequest("train", None, folder.path, False, False, None, overrides)
    with pytest.raises(ConfigError, match="intervention.help.progress: progress.safetensors is no file; train one"):
        load_run(request)
    save_model(tmp_path / "progress.safetensors", cameras=[])
    (tmp_path / "lab.pem").symlink_to("lab-7.pem")  # as certbot does: a renewal makes it point to lab-8.pem
    config, _ = load_run(request)
    found = config.intervention.help.progress, config.console.certificate, config.console.certificate_key
    assert found == tuple(str(tmp_path / name) for name in ("progress.safetensors", "lab.pem", "lab.key"))


def test_unusable_certificate_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    AccountStore().add("ada", "admin", "correct horse battery")
    folder, _ = create_run_folder(replace(fleet(tmp_path), console=ConsoleConfig(enabled=False)), "first", ENDPOINT)
    wrong = "--console={host: 0.0.0.0, port: 0, certificate: /lab.pem, certificate_key: /lab.key}"
    with pytest.raises(ConfigError, match="console: /lab.pem and /lab.key"):
        load_run(LaunchRequest("train", None, folder.path, False, False, None, [wrong]))


def test_robot_with_the_name_of_a_remote_robot_does_not_replace_its_key(tmp_path: Path) -> None:
    keys, remote = tmp_path / "keys", new_keypair()
    save_keypair(new_keypair(), keys, "gateway")
    Keyring(keys).allow(remote.public, "left", "robot")
    config = fleet(tmp_path / "runs", "left")
    folder, metadata = create_run_folder(config, "first", ENDPOINT, keys)
    with pytest.raises(RunError, match="robots: left is the name of a robot on another computer, .*; choose another"):
        prepare_run_folder(config, folder, metadata)
    assert [(entry.name, entry.public) for entry in Keyring(keys).list() if entry.role == "robot"] == [
        ("left", remote.public)
    ]


def test_prepared_files_are_read_by_the_processes(tmp_path: Path) -> None:
    config = replace(fleet(tmp_path, "left"), seed=5)
    folder, metadata = create_run_folder(config, "first", ENDPOINT)
    prepare_run_folder(config, folder, metadata)
    state = folder.edge("left")
    assert [(record.robot, record.spec) for record in read_robot_records(folder.robots)] == [
        ("left", robot_spec(config.robots[0]))
    ]
    assert load(RobotConfig, state / "robot.yaml") == config.robots[0]
    session = load(SessionConfig, state / "session.yaml")
    assert (session.robot, session.holder, session.endpoint, session.starts.seed) == ("left", "run first", ENDPOINT, 5)
    assert session.state == state.resolve() and session.keys == folder.keys.resolve()


@pytest.mark.parametrize(
    "endpoint",
    ["", "5555", "0.0.0.0:5555", "tcp://0.0.0.0", "tcp://*:*", "tcp://:5555", "tcp://::1:5555", "tcp://a:65536"],
)
def test_invalid_listen_address_is_refused(endpoint: str) -> None:
    for config in (GatewayConfig, RelayConfig):
        with pytest.raises(ConfigError, match=f"^endpoint: {re.escape(endpoint)}: expected tcp://ADDRESS:PORT, "):
            config(endpoint=endpoint)


def test_listen_address_of_another_machine_is_refused() -> None:
    assert free_endpoint("tcp://*:0").startswith("tcp://*:")
    with pytest.raises(RunError, match="gateway.endpoint: cannot listen on tcp://192.0.2.1:0: "):
        free_endpoint("tcp://192.0.2.1:0")


def test_port_zero_becomes_a_free_port_and_others_stay() -> None:
    found = free_endpoint("tcp://127.0.0.1:0")
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", found)
    assert free_endpoint(found) == found


# Bad input at the real command line

FAKE = """
robots: [{name: left, driver: fake, task: reach}]
demonstrations: {episodes: 2}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""


def require_one_line(folder: Path, message: str, *argv: object, env: dict[str, str] | None = None) -> None:
    """The command fails with one line for a person, and leaves no process behind."""
    with user_sys(folder, *argv, env=env) as launch:
        assert launch.wait() == 2, launch.err
        require_one_error(launch.err, message)
        assert "Traceback" not in launch.out
        launch.require_nothing_left()


def require_one_error(err: str, message: str) -> None:
    assert err.count("\n") == 1 and err.startswith("user-sys: error: "), err
    assert re.search(message, err), err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fake.yaml"
    path.write_text(FAKE)
    return path


MISTAKES = {
    "did you mean 'learner.batch_size'": ["train", "fake.yaml", "--learner.batchsize=3"],
    "fak.yaml: no such file; did you mean fake.yaml": ["train", "fak.yaml"],
    "robot left: rate: unknown key; did you mean 'rate_hz'": ["train", "fake.yaml", "--robots.0.options.rate=3"],
    "initial_policy: .*/nowhere has no checkpoint": ["train", "fake.yaml", "--learner.initial_policy=nowhere"],
    "nowhere is not a run folder": ["train", "--resume", "nowhere"],
    "nothing is not a run folder": ["evaluate", "nothing"],
    "robot arm: the task 'tidy' has no scripted expert: set --demonstrations.episodes=0": ["train", "own.yaml"],
    "the task 'tidy' has no scripted expert: .* [(]docs/people.md[)]": ["record", "own.yaml"],
    "learner.sampler.kind is prioritized, which needs TD errors; bc has none: remove it": [
        *("train", "fake.yaml", "--learner.algorithm=bc", "--learner.sampler.kind=prioritized")
    ],
    "learner.sampler.kind has no effect with ppo, which uses each step once": [
        *("train", "fake.yaml", "--learner.algorithm=ppo", "--learner.sampler.kind=uniform")
    ],
    "learner.compute.divide: this algorithm keeps a second copy of the policy, which .*; use bc": [
        *("train", "fake.yaml", "--learner.algorithm=bc", "--learner.compute.divide=true", "--learner.processes=2")
    ],
    "compute.divide: this algorithm keeps": [
        *("train", "fake.yaml", "--learner.compute.divide=true", "--learner.processes=2")
    ],
    "robot left: .*observation.nothing": ["train", "fake.yaml", "--policy.features=[observation.nothing]"],
    "policy.options.gripper is discrete, and the action of .* has no gripper": [
        *("train", "fake.yaml", "--policy.options.gripper=discrete", "--demonstrations.episodes=0"),
        "--robots=[{name: left, driver: gym, task: go, options: {id: Reacher-v5}}]",
    ],
    "compute, 9999 processors: missing [(].* has .* processors": ["train", "greedy.yaml"],
}


OWN = "robots: [{name: arm, driver: ur, task: tidy, options: {host: 127.0.0.1}}]\n"  # demonstrations by default


@pytest.mark.parametrize("message", MISTAKES)
def test_mistake_prints_one_line_and_creates_nothing(
    message: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "greedy.yaml").write_text(f"{FAKE}resources: [{{kind: compute, cores: 9999}}]\n")
    (config.parent / "own.yaml").write_text(f"{FAKE[FAKE.index('console') :]}{OWN}")
    monkeypatch.chdir(config.parent)
    assert main(MISTAKES[message]) == 2
    require_one_error(capsys.readouterr().err, message)
    assert not (config.parent / "runs").exists()


def test_default_training_is_checked_without_torch() -> None:
    """Its import would delay the start of most runs by seconds."""
    checked = (
        "check_plugins(RunConfig(robots=(RobotConfig(name='left', driver='fake', task='reach'),))); import sys; "
        "sys.exit('torch' in sys.modules)"
    )
    imports = "from user_sys.run.prepare import *; from user_sys.run.config import RunConfig; "
    subprocess.run([sys.executable, "-c", imports + checked], check=True, timeout=120)


TABLE = {"cameras": ["front"], "image_size": 32, "table": {"force_max": 20}}


def run_with_demonstrations(runs: Path) -> RunFolder:
    """A run of the policy ``mlp``, which reads no picture."""
    robot = RobotConfig(name="arm", driver="fake", task="reach", options=TABLE)
    folder, metadata = create_run_folder(replace(fleet(runs), robots=(robot,)), "first", ENDPOINT)
    prepare_run_folder(replace(fleet(runs), robots=(robot,)), folder, metadata)
    demonstrations = prepare.DemonstrationConfig(1)
    assert len(list(prepare.record_demonstrations(robot, folder.store, demonstrations, RecorderConfig(), seed=0))) == 1
    return folder


def resumed(folder: RunFolder, options: str) -> RunConfig:
    overrides = [f"--robots.0.options={options}", "--console.enabled=false"]
    return load_run(LaunchRequest("train", None, folder.path, False, False, None, overrides))[0]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ("{cameras: [front], image_size: 48, table: {}}", "cameras.0.height is 48 instead of 32"),
        ("{cameras: [front], image_size: 32}", "observation.0.labels has 7 elements instead of 10"),
    ],
)
def test_robot_whose_stored_steps_would_not_be_drawn_refuses_a_resume(
    options: str, difference: str, tmp_path: Path
) -> None:
    folder = run_with_demonstrations(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=f"robot arm: {difference}, and .*: set it as it was, or start a new run"):
        resumed(folder, options)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_limit_of_a_robot_may_change_at_a_resume(tmp_path: Path) -> None:
    folder = run_with_demonstrations(tmp_path)
    config = resumed(folder, "{cameras: [front], image_size: 32, table: {force_max: 5}}")
    prepare_run_folder(config, folder, open_run_folder(folder.path)[2])
    (record,) = read_robot_records(folder.robots)
    (episode,) = stored_episodes(folder.store)
    assert record.spec.limits.tool_force_max == 5 and episode.embodiment == record.spec.embodiment


def test_limit_may_change_in_a_run_of_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(RobotSpec, "embodiment", RobotSpec.fingerprint)
        folder = run_with_demonstrations(tmp_path)
    for force_max in (20, 5, 3):
        config = resumed(folder, f"{{cameras: [front], image_size: 32, table: {{force_max: {force_max}}}}}")
        prepare_run_folder(config, folder, open_run_folder(folder.path)[2])
    (episode,) = stored_episodes(folder.store)
    assert episode.embodiment in embodiment_names(folder.store, read_robot_records(folder.robots)[0].spec)
    with pytest.raises(ConfigError, match="robot arm: cameras.0.height is 48 instead of 32"):
        resumed(folder, "{cameras: [front], image_size: 48, table: {force_max: 3}}")


def test_run_with_relative_paths_can_be_resumed_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lift-data", "encoder", "bounds", "calib"):
        (tmp_path / name).mkdir()
    (tmp_path / "arm.urdf").touch()
    monkeypatch.chdir(tmp_path)
    robots = tuple(RobotConfig(name=name, description=name) for name in ("arm.urdf", "panda", ""))
    found = prepare.resolve_paths(RunConfig(robots=robots))
    assert [robot.description for robot in found.robots] == [str(tmp_path / "arm.urdf"), "panda", ""]
    found = prepare.resolve_paths(RunConfig(robots=(), remote_robots=robots))
    assert [robot.description for robot in found.remote_robots] == [str(tmp_path / "arm.urdf"), "panda", ""]
    for source, absolute in (("arm.urdf", str(tmp_path / "arm.urdf")), ("topic:/description", "topic:/description")):
        robot = RobotConfig(driver="ros2", options={"description": source})
        (made,) = prepare.resolve_paths(RunConfig(robots=(robot,))).robots
        assert made.options == {"description": absolute}
    settings = {"id": "calib", "calibration_dir": "calib", "left_arm_config": {"calibration_dir": "none"}}
    absolute_settings = {**settings, "calibration_dir": str(tmp_path / "calib")}
    leader = {"kind": "lerobot", "settings": settings}
    robot = RobotConfig(driver="lerobot", options={"settings": settings}, teleoperators=(leader,))
    (made,) = prepare.resolve_paths(RunConfig(robots=(robot,))).robots
    assert made.options == {"settings": absolute_settings}, "`id` is no path"
    assert made.teleoperators == ({"kind": "lerobot", "settings": absolute_settings},)
    for kind, option, value, absolute in (
        ("lerobot", "statistics", "lift-data", str(tmp_path / "lift-data")),
        ("lerobot", "statistics", "bounds", "bounds"),
        ("vla", "text_encoder", "encoder", str(tmp_path / "encoder")),
        ("vla", "text_encoder", "google/t5-small", "google/t5-small"),
        ("lerobot", "path", "encoder", str(tmp_path / "encoder")),
        ("lerobot", "path", "lerobot/smolvla_base", "lerobot/smolvla_base"),
    ):
        options = {"type": "act"} if kind == "lerobot" else {}
        config = RunConfig(policy=PolicyConfig(kind=kind, options={**options, option: value}))
        assert prepare.resolve_paths(config).policy.options == {**options, option: absolute}
        steered = {"base": kind, "base_options": {**options, option: value}}
        config = RunConfig(policy=PolicyConfig(kind="steered", options=steered))
        found = prepare.resolve_paths(config)
        assert found.policy.options == {"base": kind, "base_options": {**options, option: absolute}}
    monkeypatch.setattr(prepare, "load_policy", lambda *_: (None, SimpleNamespace(tokenizer={"kind": "a package's"})))
    assert prepare.resolve_paths(RunConfig()).policy.options == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--learner.algorithm=sac", "learner.algorithm is sac, and .*/first has trained with rlpd: leave it as it was"),
        (
            "--policy.kind=flow",
            "policy.kind is flow, and .*/first has trained with mlp: leave it as it was, or start a",
        ),
        (
            "--learner.initial_policy=nowhere",
            "learner.initial_policy is 'nowhere', and .*/first has trained without it: leave it as it was",
        ),
    ],
)
def test_checkpoint_of_another_training_refuses_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    config = replace(fleet(tmp_path), robots=(RobotConfig(driver="fake", task="reach", frame_stride=1),))
    prepare_run_folder(config, *create_run_folder(config, "first", ENDPOINT))
    folder = RunFolder(tmp_path / "first").checkpoints
    save_checkpoint(folder, Checkpoint(1, {}, {"network.x": np.zeros(3)}), keep=1)
    assert main(["train", "--resume", str(tmp_path / "first"), override, "--console.enabled=false"]) == 2
    require_one_error(capsys.readouterr().err, message)


@pytest.mark.parametrize("override", ["--learner.options.critics=3", "--policy.options.hidden=[8, 8]"])
def test_setting_that_the_checkpoint_does_not_fit_refuses_a_resume(tmp_path: Path, override: str) -> None:
    options: dict[str, Any] = {"critic_hidden": [8], "critics": 2}
    config = replace(
        fleet(tmp_path),
        robots=(RobotConfig(driver="fake", task="reach", frame_stride=1),),
        learner=LearnerConfig(options=options),
        policy=PolicyConfig(options={"hidden": [8]}),
        console=ConsoleConfig(enabled=False),
    )
    folder, metadata = create_run_folder(config, "first", ENDPOINT)
    prepare_run_folder(config, folder, metadata)
    kind, settings = load_algorithm(config.learner.algorithm, options)
    spec = robot_spec(config.robots[0])
    trained = kind(settings, MlpPolicy.make_module(spec, settings=MlpSettings((8,))), spec)
    save_checkpoint(folder.checkpoints, Checkpoint(1, {}, save_state(trained)), keep=1)

    def resume(*overrides: str) -> RunConfig:
        return load_run(LaunchRequest("train", None, folder.path, False, False, None, [*overrides]))[0]

    with pytest.raises(ConfigError, match="does not fit this Rlpd, .* differ, from .*: leave their settings as they"):
        resume(override)
    assert resume("--learner.options.learning_rate=0.001").learner.options["critics"] == 2


def test_initial_policy_may_change_until_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(fleet(tmp_path), console=ConsoleConfig(enabled=False))
    folder, _ = create_run_folder(config, "first", ENDPOINT)
    save_checkpoint(folder.checkpoints, Checkpoint(0, {}, {"network.x": np.zeros(3)}), keep=1)
    request = LaunchRequest("train", None, folder.path, False, False, None, ["--learner.initial_policy=other"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"learner.initial_policy: {tmp_path}/other has no checkpoint"):
        load_run(request)
    save_checkpoint(RunFolder(tmp_path / "other").checkpoints, Checkpoint(1, {}, {"network.x": np.zeros(3)}), keep=1)
    changed, _ = load_run(request)
    assert changed.learner.initial_policy == str(tmp_path / "other")
    _open(request, changed, folder.path)
    save_checkpoint(folder.checkpoints, Checkpoint(1, {}, {"network.x": np.zeros(3)}), keep=1)
    shutil.rmtree(tmp_path / "other")
    assert load_run(request)[0] == load_run(replace(request, overrides=[]))[0] == changed, "it is what it was"
    with pytest.raises(ConfigError, match=f"initial_policy is '', and .* has trained from {tmp_path}/other: leave it"):
        load_run(replace(request, overrides=["--learner.initial_policy="]))


def test_console_port_in_use_is_refused_before_the_folder_exists(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        require_one_line(
            config.parent, f"port {port} .*in use.*--console.port", "train", config, f"--console.port={port}"
        )
    assert not (config.parent / "runs").exists()


@pytest.fixture
def without_egl(tmp_path: Path) -> dict[str, str]:
    """An environment in which files that are no libraries stand before the real ones."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for number in ("", *(f".{n}" for n in range(10))):
        (folder / f"libEGL.so{number}").write_bytes(b"no library")
    (tmp_path / "sim.yaml").write_text(
        "robots: [{name: panda-0}]\nconsole: {port: 0}\nlogging: {wandb: {mode: disabled}}\n"
    )
    return {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


@pytest.mark.parametrize("variables", [{}, {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}], ids=["unset", "egl"])
def test_missing_egl_names_the_package(
    tmp_path: Path, without_egl: dict[str, str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):  # mujoco sets one in a process that has drawn
        monkeypatch.delenv(name, raising=False)
    environment = without_egl | variables
    require_one_line(
        tmp_path, "EGL is missing or broken.*apt-get install libegl1", "train", "sim.yaml", env=environment
    )


@pytest.mark.slow
def test_robot_that_never_starts_ends_the_run(tmp_path: Path, without_egl: dict[str, str]) -> None:
    """Without demonstrations the first to draw is the driver process."""
    require_one_line(
        tmp_path,
        "panda-0 cannot be driven: .*EGL is missing or broken.*; see .*panda-0-driver.log",
        *("train", "sim.yaml", "--demonstrations.episodes=0"),
        env=without_egl,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_crash_looping_learner_ends_the_run(config: Path) -> None:
    require_one_line(
        config.parent,
        "learner cannot be kept running: .*learner.device is cuda, and torch .* finds no GPU on .*; see .*learner.log; "
        "all recorded steps are kept",
        *("train", config, "--learner.device=cuda"),
    )


def test_unreadable_checkpoints_refuse_a_resume(config: Path) -> None:
    folder, _ = create_run_folder(replace(load(RunConfig, config), runs=config.parent / "runs"), "first", ENDPOINT)
    (folder.checkpoints / "learner-fake-0a1b2c" / "000001-000000000700.checkpoint").mkdir(parents=True)
    message = "learner-fake-0a1b2c/000001-000000000700.checkpoint: .*index.json is missing.*--restart-if-unreadable"
    require_one_line(config.parent, message, "train", "--resume", folder.path)


def test_restart_moves_unreadable_checkpoints_aside(config: Path) -> None:
    folder, _ = create_run_folder(replace(load(RunConfig, config), runs=config.parent / "runs"), "first", ENDPOINT)
    (folder.checkpoints / "000001-000000000700.checkpoint").mkdir(parents=True)
    output = StringIO()
    report_unreadable_checkpoints(folder, Console(file=output, width=400))
    kept = folder.checkpoints / "unreadable-1" / "000001-000000000700.checkpoint"
    assert (
        kept.is_dir()
        and str(kept.parent) in output.getvalue()
        and "training starts from the beginning" in output.getvalue()
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", disk], check=True)
        yield disk


@pytest.mark.parametrize("room", [8, 40])
def test_full_disk_prints_one_line(config: Path, small_disk: Path, room: int) -> None:
    """With so many KiB left the run folder or the demonstrations do not fit."""
    (small_disk / "filler").write_bytes(bytes((96 - room) * 1024))
    require_one_line(config.parent, "No space|no space|full", "train", config, f"--runs={small_disk}", "--name=full")


# How a run ends


@pytest.mark.parametrize(
    ("reached", "successes", "any_result", "status"),
    [
        (None, 0, False, ExitStatus.REACHED),
        (True, 6, False, ExitStatus.REACHED),
        (False, 6, False, ExitStatus.NOT_REACHED),
        (True, 5, False, ExitStatus.NOT_REACHED),
        (False, 0, True, ExitStatus.REACHED),
    ],
)
def test_exit_status_tells_whether_the_target_was_reached(
    reached: bool | None, successes: int, any_result: bool, status: ExitStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    required = 0.6 if reached is not None else 0.0
    config = RunConfig(target=TargetConfig(0.9, 30), evaluation=EvaluationConfig(required=required))
    counts = RunSummary("x", successes, 10, 1.0, 1, 1, 0, 0, target_reached=reached)
    assert exit_status(config, counts, any_result, Console()) == status
    assert ("target not reached" in capsys.readouterr().out) == (reached is False or successes == 5)


@pytest.mark.parametrize(("umask", "mode"), [("", 0o700), ("027", 0o750)])
def test_files_are_private_unless_configured(umask: str, mode: int, tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(FAKE)
    env = {"USER_SYS_UMASK": umask}
    with user_sys(tmp_path, "record", "demo.yaml", "--output", "demos", "--episodes", 1, env=env) as launch:
        assert launch.wait() == 0, launch.err
    found = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "demos").rglob("*") if path.is_dir()}
    files = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "demos").rglob("*") if path.is_file()}
    assert found <= {mode} and files <= {mode & 0o666, 0o600} and (mode & 0o666) in files


def test_invalid_umask_is_refused(tmp_path: Path) -> None:
    env = {"USER_SYS_UMASK": "private"}
    require_one_line(tmp_path, "USER_SYS_UMASK='private' is not an octal umask", "record", "demo.yaml", env=env)
