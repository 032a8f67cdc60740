"""What the launcher does before and while a run's processes work, without starting them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
from rich.console import Console
from run_folder_kit import STARTED_S, make_run

from hal.process_supervisor import ProcessState, ProcessStatus
from hal.resource import Health, Kind, ResourceRecord
from hal.signals import TerminationRequest
from robots.fake import FakeRobot
from user_sys.commands.main import main
from user_sys.compose import RobotConfig
from user_sys.console.hub import ConsoleHub
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.errors import RunError
from user_sys.learner.config import LearnerConfig
from user_sys.logs import LOG_VARIABLE
from user_sys.messages import EpisodeReport, MetricsReport, ResourceUpdate, RobotStatus
from user_sys.operator_overrides import overrides_of_real_robots
from user_sys.robot_records import assign_learners, learner_from_robot, read_robot_records, save_robot_record
from user_sys.run import launcher, prepare
from user_sys.run.allocation import LocalAllocation
from user_sys.run.compare import read_variants
from user_sys.run.config import RunConfig, RunFolder, create_run_folder, read_run_metadata
from user_sys.run.launcher import RunSupervisor
from user_sys.run.metrics import MetricsWriter
from user_sys.run.pins import AUTOMATIC, current_pin, set_pin
from user_sys.run.prepare import record_all_demonstrations
from user_sys.run.processes import RunProcesses
from user_sys.run.status import read_status
from user_sys.tunnel.client import TunnelState
from user_sys.tunnel.keys import GATEWAY_NAME
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.signing import ensure_signer
from user_sys.weights.version_store import VersionStore

ENDPOINT = "tcp://127.0.0.1:5999"
REAL = RobotConfig(driver="ur", task="tidy", options={"host": "127.0.0.1"})


@pytest.fixture
def driven_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the robots whose devices this computer would open for demonstrations."""
    names: list[str] = []

    def drive(robot: RobotConfig, *args: Any, **kwargs: Any) -> Iterator[Any]:
        names.append(robot.name)
        return iter(())

    monkeypatch.setattr(prepare, "generate_demonstrations", drive)
    return names


@pytest.mark.parametrize(("driver", "episodes"), [("fake", 3), ("lab", 0)])
def test_robot_of_another_node_that_needs_no_device_has_its_demonstrations(
    driver: str, episodes: int, tmp_path: Path, driven_here: list[str]
) -> None:
    far = RobotConfig(name="far", driver=driver, task="reach")
    config = RunConfig(robots=(far,), demonstrations=DemonstrationConfig(episodes=episodes))
    record_all_demonstrations(config, tmp_path, Console(file=io.StringIO()), {"far"})
    assert driven_here == (["far"] if episodes else [])


def test_held_robot_records_no_demonstrations(tmp_path: Path, driven_here: list[str]) -> None:
    robots = tuple(replace(REAL, name=name) for name in ("ready", "held"))
    config = RunConfig(robots=robots, demonstrations=DemonstrationConfig(episodes=3))
    record_all_demonstrations(config, tmp_path / "store", Console(file=io.StringIO()), (), {"held"})
    assert driven_here == ["ready"]


def test_launch_holds_a_robot_that_another_run_has_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any process starts, and before a demonstration is recorded."""
    overrides_of_real_robots(tmp_path / "runs").set_override("arm", "quarantined", "ana", "oil")
    text = "robots: [{name: arm, driver: ur, task: tidy, options: {host: 127.0.0.1}}]\ndemonstrations: {episodes: 0}\n"
    (tmp_path / "lab.yaml").write_text(f"{text}console: {{port: 0}}\ngateway: {{endpoint: 'tcp://127.0.0.1:0'}}\n")
    held: list[str] = []

    def record(*args: Any) -> None:
        held.extend(args[-1])
        raise RunError("the recording would begin")

    monkeypatch.setattr(launcher, "record_all_demonstrations", record)
    argv = ["train", str(tmp_path / "lab.yaml"), f"--runs={tmp_path / 'runs'}", "--name=b"]
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "arm is quarantined by ana: oil: no program moves it until" in captured.out, captured.err
    assert held == ["arm"]


def test_demonstrations_of_a_real_robot_of_another_node_are_refused(tmp_path: Path, driven_here: list[str]) -> None:
    near, far = (replace(REAL, name=name) for name in ("near", "far"))
    config = RunConfig(robots=(near, far), demonstrations=DemonstrationConfig(episodes=3))
    store = tmp_path / "run" / "store"
    with pytest.raises(RunError, match="far is on another computer, and 3 of its demonstrations are missing") as caught:
        record_all_demonstrations(config, store, Console(file=io.StringIO()), {"far"})
    assert driven_here == [], "no robot moves before that"
    words = ("user-sys record", f"--into {store}", f"--resume {tmp_path / 'run'}", "demonstrations.episodes")
    assert not [word for word in words if word not in str(caught.value)] and "\n" not in str(caught.value)


class FakeProcesses:
    """The processes of a run, with their `statuses`; those that are `leaving` take some looks to end."""

    def __init__(self, statuses: dict[str, ProcessStatus] | None = None, *, is_done: bool = True) -> None:
        self.statuses, self.is_done = statuses or {}, is_done
        self.stopped: list[str] = []
        self.polls = iter([{"learner"}, {"learner"}, set[str]()])
        self.names = [GATEWAY_NAME]
        self.cluster = SimpleNamespace(
            statuses=lambda: self.statuses, stop=lambda *names, within_s: self.stopped.extend(names)
        )

    def leaving(self) -> set[str]:
        return {"learner"}

    def still_running(self, names: object) -> set[str]:
        return next(self.polls)

    def are_learners_done(self, statuses: object) -> bool:
        return self.is_done

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def robot_status(robot: str) -> RobotStatus:
    return RobotStatus(
        robot=robot, authority="policy", operator="", phase="policy", episode="", step=0, policy_version=0,
        real_time=True, outbox_chunks=0, safety_interventions=0,
    )  # fmt: skip


def train(
    folder: RunFolder,
    config: RunConfig,
    processes: FakeProcesses,
    *messages: object,
    patch: pytest.MonkeyPatch,
    refused: str = "",
) -> str:
    """What the launcher prints while it supervises these processes and receives these messages from the gateway."""
    patch.setattr(launcher, "RunProcesses", lambda *_: processes)
    patch.setattr(launcher, "MESSAGE_WAIT_S", 0.0)
    left, output = iter(messages), io.StringIO()
    client = SimpleNamespace(
        receive=lambda wait_s: next(left, None),
        send=lambda message: True,
        state=TunnelState.REFUSED if refused else TunnelState.OPEN,
        reason=refused,
    )
    link: Any = SimpleNamespace(
        hub=ConsoleHub("r", lambda message: True), show=lambda feed, *report: feed(*report), client=client
    )
    logger: Any = SimpleNamespace(run=SimpleNamespace(path=folder.path / "run.jsonl"), log=lambda *_: None)
    console = Console(file=output, width=1000)
    metadata, allocation = read_run_metadata(folder.path), LocalAllocation(config, "r")
    run = RunSupervisor(config, folder, metadata, allocation, link, logger, console, TerminationRequest())
    try:
        run.train()
    except RunError as error:
        return f"{output.getvalue()}{error}"
    return output.getvalue()


@pytest.mark.parametrize(("last_exit", "ended"), [(-6, "by signal 6"), (4, "with exit status 4")])
def test_robot_whose_driver_ends_at_each_start_ends_the_run(
    last_exit: int, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(runs=tmp_path, robots=(RobotConfig(name="arm", driver="lab"),))
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    driver = ProcessStatus(state=ProcessState.WAITING, restarts=1, last_exit=last_exit)
    text = train(folder, config, FakeProcesses({"arm-driver": driver}), patch=monkeypatch)
    assert "cannot be driven" not in text, "it may succeed at its next start"
    driver = ProcessStatus(state=ProcessState.WAITING, restarts=2, last_exit=last_exit)
    text = train(folder, config, FakeProcesses({"arm-driver": driver}), patch=monkeypatch)
    assert text.count(f"arm cannot be driven: its driver ends {ended}: its log is empty; see ") == 2, "and as the error"


def test_session_that_fails_at_each_start_is_printed_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(runs=tmp_path, robots=(RobotConfig(name="arm", driver="lab"),))
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    folder.log("arm-session").parent.mkdir(parents=True, exist_ok=True)
    folder.log("arm-session").write_text("2026-01-01 00:00:00,000 E session session.failed SpecError: no joint 7\n")
    driver = ProcessStatus(state=ProcessState.RUNNING)
    for restarts, times in ((1, 0), (2, 1)):
        session = ProcessStatus(state=ProcessState.WAITING, restarts=restarts, last_exit=1)
        statuses = {"arm-driver": driver, "arm-session": session}
        text = train(folder, config, FakeProcesses(statuses), patch=monkeypatch)
        assert text.count("arm holds: its session ends with exit status 1 at each start") == times
        assert ("session.failed SpecError: no joint 7; see " in text) == bool(times)


def test_launcher_that_the_gateway_refuses_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(runs=tmp_path)
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    text = train(folder, config, FakeProcesses(), patch=monkeypatch, refused="this key was revoked")
    assert f"the gateway refuses the launcher: this key was revoked; continue with --resume {folder.path}" in text


@pytest.mark.parametrize(
    ("on_drop", "by", "version"), [("warn", AUTOMATIC, None), ("best", AUTOMATIC, 7), ("warn", "ana", 7)]
)
def test_launch_without_a_guard_of_success_releases_the_pin_of_an_earlier_guard(
    on_drop: Literal["warn", "best"], by: str, version: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(runs=tmp_path, learner=LearnerConfig(publish=PublishConfig(on_success_drop=on_drop)))
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    ensure_signer(folder.keys, "learner")
    set_pin(folder.path, "learner", 7, by, "success fell")
    text = train(folder, config, FakeProcesses(), patch=monkeypatch, refused="so it ends at once")
    pin = current_pin(VersionStore(folder.weights))
    assert (None if pin is None else pin.version) == version
    assert ("learner: robots act with the newest version again, no longer with version 7" in text) is (version is None)


def test_training_sets_the_results_of_the_run_s_earlier_end_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the newer training they would seem to be of its policy."""
    folder = make_run(tmp_path, "week", [True] * 20)
    assert read_variants([folder.path])[0].total("episodes") == 20
    for _ in range(2):
        train(folder, RunConfig(), FakeProcesses(), patch=monkeypatch)
        assert read_variants([folder.path])[0].total("episodes") == 0
        assert json.loads((folder.path / "earlier-summary.json").read_text())["episodes"] == 20


def test_success_that_falls_after_a_resume_is_compared_with_its_best_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, "week", [True] * 100)
    with MetricsWriter(folder.path, "run") as metrics:
        for second in (0.0, 110.0):
            metrics.write(0, {"elapsed_s": second}, STARTED_S + second)
    report = EpisodeReport(robot="arm", episode="new", source="online", steps=2, success=False, intervention_steps=0,
                           episode_return=0.0, policy_version=1)  # fmt: skip
    text = train(folder, RunConfig(), FakeProcesses(), *[report] * 30, patch=monkeypatch)
    assert "success fell to 40% of the newest 50 autonomous episodes, from 100%" in text


@pytest.mark.parametrize("finished", [0.0, 1.0])
def test_learner_that_delivers_its_last_version_is_not_stopped_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, finished: float
) -> None:
    monkeypatch.setattr(launcher, "LEAVE_DEADLINE_S", 0.0)
    config, processes = RunConfig(runs=tmp_path), FakeProcesses()
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    train(
        folder,
        config,
        processes,
        MetricsReport(node="learner", count=1, scalars={"finished": finished}),
        patch=monkeypatch,
    )
    assert (next(processes.polls, None) is None) == (finished == 1.0) == ("run.left_behind" not in caplog.text)
    assert processes.stopped == [GATEWAY_NAME]


def test_robot_that_comes_back_with_another_spec_is_named_as_one_without_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, spec = RunConfig(runs=tmp_path), FakeRobot().spec
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    save_robot_record(folder.robots, "arm", spec)
    status = robot_status("arm")
    record = ResourceRecord(kind=Kind.ROBOT, name="arm", model="fake", node="desk", embodiment=spec.embodiment)
    other = msgspec.structs.replace(record, embodiment=msgspec.structs.replace(spec, gripper=-1).embodiment)
    same = (record, msgspec.structs.replace(other, health=Health.LOST), msgspec.structs.replace(other, name="b"))
    text = train(
        folder, config, FakeProcesses(), status, *(ResourceUpdate(record=each) for each in same), patch=monkeypatch
    )
    assert "arm" in text and "no learner" not in text
    text = train(folder, config, FakeProcesses(), status, ResourceUpdate(record=other), patch=monkeypatch)
    assert "arm has another spec than before" in text and "no learner" in text
    assert f"or end the run and continue with `user-sys train --resume {folder.path}`" in text


def test_present_records_of_a_new_connection_are_no_news_unless_a_robot_is_out_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(runs=tmp_path)
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    record = ResourceRecord(kind=Kind.ROBOT, name="arm", model="fake", node="desk")
    out = msgspec.structs.replace(record, name="b", health=Health.QUARANTINED, note="by ana")
    present = [ResourceUpdate(record=each, is_change=False) for each in (record, out)]
    text = train(folder, config, FakeProcesses(), *present, patch=monkeypatch)
    assert "b (robot fake) is quarantined by ana" in text and "is available" not in text


def test_robot_that_comes_back_with_the_spec_of_others_joins_their_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, spec = RunConfig(runs=tmp_path), FakeRobot().spec
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    wrong = msgspec.structs.replace(spec, gripper=-1)
    records = iter([("arm", spec), ("visitor", wrong), ("visitor", spec)])  # at each introduction of a robot
    processes: Any = FakeProcesses()
    processes.start_new_learners = lambda: save_robot_record(folder.robots, *next(records))
    record = ResourceRecord(kind=Kind.ROBOT, name="visitor", model="fake", node="desk", embodiment=spec.embodiment)
    visitor, corrected = robot_status("visitor"), ResourceUpdate(record=record)
    messages = (robot_status("arm"), visitor, corrected, visitor, corrected, visitor)
    text = train(folder, config, processes, *messages, patch=monkeypatch)
    assert "visitor (robot fake) is available" in text and "another spec" not in text
    assert next(records, None) is None, "the corrected robot was introduced again"


def test_log_lines_name_the_robot_whose_name_begins_with_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots = tuple(RobotConfig(name=name, driver="fake", task="reach") for name in ("arm", "arm-2"))
    config = RunConfig(runs=tmp_path, robots=robots)
    folder, metadata = create_run_folder(config, "r", ENDPOINT)
    named: dict[str, str] = {}

    def start(name: str, argv: Any, resources: Any, *, env: dict[str, str], **settings: Any) -> None:
        named[name] = json.loads(env[LOG_VARIABLE]).get("robot", "")

    cluster = SimpleNamespace(start=start, local_resource="node:here", has_resource=lambda _: False)
    monkeypatch.setattr(LocalAllocation, "connect", lambda *_: cluster)
    processes = RunProcesses(config, folder, metadata, LocalAllocation(config, "r"))
    processes.connect()
    processes.start()
    expected = {f"{name}-{part}": name for name in ("arm", "arm-2") for part in ("driver", "session")}
    assert named.items() >= expected.items() and named["gateway"] == ""


@pytest.fixture
def two_learners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunProcesses, RunFolder, str, list[str]]:
    """The processes of a run that `arm` and `visitor`, of another embodiment, have joined. Two processes train each.

    With them the name of the second learner, and the processes that are asked to stop.
    """
    spec, stopped = FakeRobot().spec, list[str]()
    config = RunConfig(runs=tmp_path, learner=LearnerConfig(processes=2))
    folder, metadata = create_run_folder(config, "r", ENDPOINT)
    for robot, each in (("arm", spec), ("visitor", msgspec.structs.replace(spec, gripper=-1))):
        save_robot_record(folder.robots, robot, each)
    cluster = SimpleNamespace(
        local_resource="node:here",
        start=lambda *args, **settings: None,
        request_stop=lambda *names: stopped.extend(names),
    )
    monkeypatch.setattr(LocalAllocation, "connect", lambda *_: cluster)
    processes = RunProcesses(config, folder, metadata, LocalAllocation(config, "r"))
    processes.connect()
    processes.start_new_learners()
    return processes, folder, list(assign_learners(read_robot_records(folder.robots)))[1], stopped


def test_learner_that_cannot_start_leaves_the_run_to_the_other_robots(
    two_learners: tuple[RunProcesses, RunFolder, str, list[str]],
) -> None:
    processes, folder, second, stopped = two_learners
    folder.log(second).parent.mkdir(parents=True, exist_ok=True)
    folder.log(second).write_text("2026-01-01 00:00:00,000 E learner learner.failed SpecError: no camera 'top'\n")
    failed, running = ProcessStatus(state=ProcessState.FAILED, last_exit=2), ProcessStatus(state=ProcessState.RUNNING)
    others = {f"{second}-rank-1": failed, "learner": running, "learner-rank-1": running}
    lines = list[str]()
    for _ in range(3):
        processes.report_failures({second: failed, **others}, lines.append)
    processes.require_running(has_other_robots=True)
    assert len(lines) == 1 and stopped == [f"{second}-rank-1"], "its other process would start again for ever"
    words = (f"{second} failed: learner.failed SpecError: no camera 'top'", "continues", "visitor", "--resume")
    assert not [word for word in words if word not in lines[0]]
    done = ProcessStatus(state=ProcessState.STOPPED, last_exit=0)
    assert not processes.are_learners_done({second: failed, **others})
    assert processes.are_learners_done({second: failed, **others, "learner": done}), "the run ends in time all the same"

    processes.report_failures({"learner-rank-1": failed}, lines.append)
    with pytest.raises(RunError, match="learner-rank-1 cannot be kept running"):
        processes.require_running(has_other_robots=True)


def test_learner_that_is_left_out_stays_so_when_the_others_move_to_another_node(
    two_learners: tuple[RunProcesses, RunFolder, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, _, second, _ = two_learners
    processes.report_failures({second: ProcessStatus(state=ProcessState.FAILED, last_exit=2)}, lambda line: None)
    started = list[str]()
    monkeypatch.setattr(processes.cluster, "start", lambda name, *args, **settings: started.append(name))
    monkeypatch.setattr(processes.cluster, "kill", lambda *names: None, raising=False)
    monkeypatch.setattr(LocalAllocation, "release_lost", lambda self, use: ("b",) if use == "learner" else ())
    monkeypatch.setattr(LocalAllocation, "reacquire", lambda self, use: "" if use == "learner" else None)
    processes.poll_compute(lambda line: None)
    assert started == ["learner", "learner-rank-1"] and processes.leaving() == {"learner"}


def test_learner_that_is_left_out_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.console.progress.LEARNER_SILENT_S", -1.0)
    config = RunConfig(runs=tmp_path)
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    processes = FakeProcesses({"learner-b": ProcessStatus(state=ProcessState.FAILED, last_exit=2)})
    reports = [MetricsReport(node=node, count=1, scalars={}) for node in ("learner", "learner-b")]
    train(folder, config, processes, *reports, patch=monkeypatch)
    assert "no report from learner; " in read_status(folder.path).run.warning


def test_learner_that_its_robot_has_left_does_not_hold_up_the_end(
    two_learners: tuple[RunProcesses, RunFolder, str, list[str]],
) -> None:
    processes, folder, second, _ = two_learners
    done, running = ProcessStatus(state=ProcessState.STOPPED, last_exit=0), ProcessStatus(state=ProcessState.RUNNING)
    assert not processes.are_learners_done({"learner": done, second: running}), "its robot may still give steps"
    save_robot_record(folder.robots, "visitor", FakeRobot().spec)
    assert processes.are_learners_done({"learner": done, second: running})
    assert not processes.are_learners_done({"learner": running, second: done})


def test_first_learner_that_its_robot_has_left_does_not_hold_up_the_end_or_a_resume(
    two_learners: tuple[RunProcesses, RunFolder, str, list[str]],
) -> None:
    processes, folder, second, _ = two_learners
    done, running = ProcessStatus(state=ProcessState.STOPPED, last_exit=0), ProcessStatus(state=ProcessState.RUNNING)
    save_robot_record(folder.robots, "arm", msgspec.structs.replace(FakeRobot().spec, gripper=-1))
    assert learner_from_robot(read_robot_records(folder.robots)) == {"arm": second, "visitor": second}
    assert processes.are_learners_done({"learner": running, second: done})
    assert not processes.are_learners_done({"learner": running, second: running})
    failed = ProcessStatus(state=ProcessState.FAILED, last_exit=2)
    processes.report_failures({second: failed}, lambda line: None)
    assert not processes.are_learners_done({"learner": running, second: failed}), "none has ended"
    with pytest.raises(RunError, match=f"{second} cannot be kept running"):  # no robot has another one
        processes.require_running(has_other_robots=True)


@pytest.mark.parametrize("is_known", [True, False])
def test_run_starts_the_learners_of_its_robots_and_without_robots_the_first(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, started = RunConfig(runs=tmp_path), list[str]()
    folder, metadata = create_run_folder(config, "r", ENDPOINT)
    for spec in (FakeRobot().spec, msgspec.structs.replace(FakeRobot().spec, gripper=-1)) if is_known else ():
        save_robot_record(folder.robots, "arm", spec)  # it was corrected
    cluster = SimpleNamespace(
        start=lambda name, *args, **settings: started.append(name),
        local_resource="node:here",
        has_resource=lambda _: False,
        request_stop=lambda *names: None,
    )
    monkeypatch.setattr(LocalAllocation, "connect", lambda *_: cluster)
    processes = RunProcesses(config, folder, metadata, LocalAllocation(config, "r"))
    processes.connect()
    processes.start()
    (expected,) = assign_learners(read_robot_records(folder.robots)) or ["learner"]
    assert [name for name in started if name.startswith("learner")] == [expected]
    assert (expected == "learner") == (not is_known)
    assert not processes.are_learners_done({expected: ProcessStatus(state=ProcessState.RUNNING)})
    processes.report_failures({expected: ProcessStatus(state=ProcessState.FAILED, last_exit=2)}, lambda line: None)
    with pytest.raises(RunError, match=f"{expected} cannot be kept running"):
        processes.require_running(has_other_robots=True)
