"""Run folders, their preparation, the progress of a run, and bad input at the command line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from run_kit import Launch, user_sys

from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import load
from user_sys.edge.session import SessionConfig
from user_sys.errors import ConfigError, RunError
from user_sys.gateway import GatewayConfig
from user_sys.gateway.relay import RelayConfig
from user_sys.messages import EpisodeReport, MetricsReport, RobotStatus
from user_sys.process_exit import ExitStatus
from user_sys.robot_records import read_robot_records
from user_sys.run.config import (
    METADATA_FILE,
    EvaluationConfig,
    RunConfig,
    RunMetadata,
    TargetConfig,
    create_run_folder,
    default_run_name,
    open_run_folder,
)
from user_sys.run.evaluate import exit_status
from user_sys.run.metrics import MetricsWriter
from user_sys.run.prepare import free_endpoint, prepare_run_folder, report_unreadable_checkpoints
from user_sys.run.progress import ROBOT_TIMEOUT_S, ProgressTracker, plain_line, previous_elapsed_s
from user_sys.run.report import RunSummary
from user_sys.tunnel.keys import load_keypair

ENDPOINT = "tcp://127.0.0.1:5999"
RUN = Path("runs/demo")


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


def test_existing_run_name_is_refused(tmp_path: Path) -> None:
    create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    with pytest.raises(RunError, match=r"the run 'first' exists in .*; continue it with `--resume .*/first`"):
        create_run_folder(fleet(tmp_path), "first", ENDPOINT)
    open_run_folder(tmp_path / "first")


def test_unwritable_run_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot create the run folder .*: Not a directory"):
        create_run_folder(fleet(tmp_path / "runs"), "first", ENDPOINT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run folder: it has no run.json"),
        (b"{", "cannot be read"),
        (b'{"format": 1}', "cannot be read"),
        (
            msgspec.json.encode(RunMetadata(format=2, name="x", started_unix_s=0.0, endpoint=ENDPOINT)),
            r"run format 2, this version reads 1",
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


def test_default_name_has_config_and_time() -> None:
    assert re.fullmatch(r"demo-\d{4}-\d{4}-\d\d", default_run_name(Path("configs/demo.yaml")))
    assert default_run_name(None).startswith("run-")


def test_target_over_no_episodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TargetConfig(success=0.9, episodes=0)


# Preparation


def test_preparing_again_keeps_keys_and_allows_a_new_robot(tmp_path: Path) -> None:
    config = fleet(tmp_path, "left")
    folder, metadata = create_run_folder(config, "first", ENDPOINT)
    prepare_run_folder(config, folder, metadata)
    before = {path.name: path.read_bytes() for path in folder.keys.glob("*.key")}
    assert set(before) == {"gateway.key", "learner.key", "console.key", "left.key"}
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
    assert (session.robot, session.holder, session.endpoint, session.seed) == ("left", "run first", ENDPOINT, 5)
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


@pytest.mark.usefixtures("ipv6")
def test_port_zero_becomes_a_free_port_on_ipv6() -> None:
    assert re.fullmatch(r"tcp://\[::1\]:[1-9]\d+", free_endpoint("tcp://[::1]:0"))


# The tracker


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> ProgressTracker:
    return ProgressTracker("demo", "http://here", 300.0, clock, RUN)


def episode(success: bool | None, steps: int = 10, person: int = 0) -> EpisodeReport:
    return EpisodeReport(
        robot="left",
        episode="e",
        source="online",
        steps=steps,
        success=success,
        intervention_steps=person,
        episode_return=0.0,
        policy_version=3,
    )


def status(robot: str, version: int = 3) -> RobotStatus:
    return RobotStatus(
        robot=robot,
        authority="policy",
        operator="",
        phase="policy",
        episode="e",
        step=4,
        policy_version=version,
        real_time=False,
        outbox_chunks=2,
        control_hz=10.0,
        safety_interventions=0,
    )


def learner(updates: int, training_s: float, version: int) -> MetricsReport:
    scalars = {"training_s": training_s, "policy_version": float(version)}
    return MetricsReport(node="learner", count=updates, scalars=scalars)


def test_success_rate_counts_autonomous_episodes_only(tracker: ProgressTracker) -> None:
    for report in (episode(True), episode(False), episode(None), episode(True, person=3), episode(True)):
        tracker.on_episode(report)
    assert (
        tracker.episodes.success_rate(4) == 0.5
        and tracker.episodes.success_rate(2) == 0.5
        and tracker.episodes.success_rate(5) is None
    )
    assert (tracker.episodes.count, tracker.episodes.env_steps, tracker.episodes.interventions) == (5, 50, 1)
    assert [(p.success, p.intervened) for p in tracker.episodes.points].count((True, True)) == 1


def test_rates_and_staleness_follow_the_reports(tracker: ProgressTracker, clock: Clock) -> None:
    tracker.on_status(status("left", version=2))
    tracker.on_status(status("right", version=5))
    for second in range(5):
        clock.now_s += 1
        tracker.on_episode(episode(True, steps=20))
        tracker.on_metrics(learner(100 * second, float(second), version=6))
    tracker.on_metrics(MetricsReport(node="gateway", count=9, scalars={"training_s": 99.0}))
    progress = tracker.snapshot("training")
    assert (progress.env_steps_per_s, progress.updates_per_s) == (20.0, 100.0)
    assert (progress.updates, progress.policy_version, progress.staleness, progress.left_s) == (400, 6, 4, 296.0)
    assert tracker.scalars()["env_steps_per_s"] == 20.0 and "success_20" not in tracker.scalars()


def test_full_disk_warns_until_there_is_space(tracker: ProgressTracker) -> None:
    assert not tracker.snapshot("training").warning
    for node, folder in (
        ("gateway", "store"),
        ("learner", "checkpoints"),
        ("learner-ur5e-1", "checkpoints/learner-ur5e-1"),
    ):
        short = {"disk_needed_bytes": 5e6, "disk_free_bytes": 4096.0}
        tracker.on_metrics(MetricsReport(node=node, count=9, scalars=short))
        message = f"waiting for disk space in {RUN / folder}: needs 5 MB, 0.0041 MB free; "
        assert message in tracker.snapshot("training").warning
        tracker.on_metrics(MetricsReport(node=node, count=9, scalars={key: 0.0 for key in short}))
        assert not tracker.snapshot("training").warning


def test_unreadable_checkpoints_are_counted(tracker: ProgressTracker) -> None:
    scalars = {"checkpoints_unreadable": 2.0}
    tracker.on_metrics(MetricsReport(node="learner", count=9, scalars=scalars))
    tracker.on_metrics(MetricsReport(node="gateway", count=9, scalars={}))
    assert tracker.learners.unreadable_checkpoints == {"learner": 2}


def test_training_held_by_a_pinned_version_warns(tracker: ProgressTracker) -> None:
    tracker.on_metrics(MetricsReport(node="learner", count=9, scalars={"held_by_pin": 1.0}))
    assert "training waits" in tracker.snapshot("training").warning
    tracker.on_metrics(MetricsReport(node="learner", count=9, scalars={"held_by_pin": 0.0}))
    assert not tracker.snapshot("training").warning


def test_staleness_is_relative_to_the_robots_own_learner(tracker: ProgressTracker) -> None:
    tracker.on_metrics(learner(100, 1.0, version=90))
    tracker.on_metrics(MetricsReport(node="learner-arm-1", count=10, scalars={"policy_version": 4.0}))
    tracker.on_status(status("left", version=89))
    tracker.on_status(status("right", version=2))
    tracker.robots.set_learners({"left": "learner", "right": "learner-arm-1"})
    assert tracker.snapshot("training").staleness == 2
    tracker.robots.set_learners({"left": "learner", "right": "learner-that-is-silent"})
    assert tracker.snapshot("training").staleness == 1


def test_silent_robot_is_lost(tracker: ProgressTracker, clock: Clock) -> None:
    tracker.on_status(status("left"))
    clock.now_s += ROBOT_TIMEOUT_S + 1
    tracker.on_status(status("right"))
    assert [(r.name, r.control) for r in tracker.snapshot("training").robots] == [("left", "lost"), ("right", "policy")]
    assert tracker.robots.seen == {"left", "right"}


def test_remote_robot_is_missing_until_it_connects_and_lost_when_silent(tracker: ProgressTracker, clock: Clock) -> None:
    tracker.robots.expect(["far"])
    clock.now_s += 65
    assert [(r.name, r.control, r.note) for r in tracker.snapshot("training").robots] == [
        ("far", "missing", "not connected yet, for 1:05")
    ]
    assert not tracker.robots.seen
    tracker.on_status(status("far"))
    assert tracker.robots.active == {"far"}
    assert [(r.name, r.control) for r in tracker.snapshot("training").robots] == [("far", "policy")]
    clock.now_s += 125
    assert "far lost (silent for 2:05)" in plain_line(tracker.snapshot("training"))
    assert not tracker.robots.active and tracker.robots.seen == {"far"}


def test_resumed_run_continues_its_counts(tracker: ProgressTracker, clock: Clock, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "run") as metrics:
        assert previous_elapsed_s(metrics.path) == 0.0
        clock.now_s += 100.0
        metrics.write(500, tracker.scalars())
        before_s = previous_elapsed_s(metrics.path)
    resumed = ProgressTracker("demo", "http://here", 300.0, clock)
    resumed.seed_history(episodes=10, env_steps=500, interventions=2, elapsed_s=before_s)
    resumed.robots.expect(["far"])
    clock.now_s += 5.0
    resumed.on_episode(episode(True, person=1))
    resumed.on_metrics(learner(900, training_s=80.0, version=9))
    assert (resumed.episodes.count, resumed.episodes.env_steps, resumed.episodes.interventions) == (11, 510, 3)
    progress = resumed.snapshot("training")
    assert (progress.elapsed_s, progress.left_s, resumed.scalars()["elapsed_s"]) == (105.0, 220.0, 105.0)
    assert progress.robots[0].note == "not connected yet, for 0:05", "in this launch"


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
        require_told(launch, message)


def require_told(launch: Launch, message: str) -> None:
    assert launch.wait() == 2, launch.err
    err = "".join(
        line for line in launch.err.splitlines(True) if "machine.test_folder" not in line
    )  # says the test kit
    assert err.count("\n") == 1 and err.startswith("user-sys: error: "), err
    assert re.search(message, err), err
    assert "Traceback" not in launch.out + err
    launch.require_nothing_left()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fake.yaml"
    path.write_text(FAKE)
    return path


MISTAKES = {
    "did you mean 'learner.batch_size'": ["train", "fake.yaml", "--learner.batchsize=3"],
    "fak.yaml: no such file; did you mean fake.yaml": ["train", "fak.yaml"],
    "robot left: unknown option 'rate'; did you mean 'rate_hz'": ["train", "fake.yaml", "--robots.0.options.rate=3"],
    "nowhere is not a run folder": ["train", "--resume", "nowhere"],
    "nothing is not a run folder": ["evaluate", "nothing"],
    "robot arm: the task 'tidy' has no scripted expert: set --demonstrations.episodes=0": ["train", "own.yaml"],
    "the task 'tidy' has no scripted expert: .* [(]docs/people.md[)]": ["record", "own.yaml"],
    "asks for one computer with 9999 processors. The largest computer here, .* has": ["train", "greedy.yaml"],
}


OWN = "robots: [{name: arm, driver: ur, task: tidy, options: {host: 127.0.0.1}}]\n"  # demonstrations by default


def test_mistake_prints_one_line_and_creates_nothing(config: Path) -> None:
    (config.parent / "greedy.yaml").write_text(f"{FAKE}resources: [{{kind: compute, cores: 9999}}]\n")
    (config.parent / "own.yaml").write_text(f"{FAKE[FAKE.index('console') :]}{OWN}")
    with ExitStack() as stack:
        launches = {message: stack.enter_context(user_sys(config.parent, *argv)) for message, argv in MISTAKES.items()}
        for message, launch in launches.items():
            require_told(launch, message)
    assert not (config.parent / "runs").exists()


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


def test_missing_egl_names_the_package(tmp_path: Path, without_egl: dict[str, str]) -> None:
    require_one_line(
        tmp_path, "EGL is missing or broken.*apt-get install libegl1", "train", "sim.yaml", env=without_egl
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


def test_required_share_is_missed_without_evaluation() -> None:
    config = RunConfig(evaluation=EvaluationConfig(required=0.6))
    assert exit_status(config, RunSummary("x", 0, 0, 1.0, 1, 1, 0, 0), False, Console()) == ExitStatus.NOT_REACHED


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
