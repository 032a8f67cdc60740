"""What the launcher does before and while a run's processes work, without starting them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console
from run_folder_kit import make_run

from hal.process_supervisor import ProcessState, ProcessStatus
from hal.resource import Health, Kind, ResourceRecord
from hal.signals import TerminationRequest
from robots.fake import FakeRobot
from user_sys.compose import RobotConfig
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.errors import RunError
from user_sys.logs import LOG_VARIABLE
from user_sys.run import launcher, prepare
from user_sys.run.allocation import LocalAllocation
from user_sys.run.compare import read_variants
from user_sys.run.config import RunConfig, create_run_folder
from user_sys.run.launcher import INTERRUPTED, RunSupervisor
from user_sys.run.prepare import record_all_demonstrations
from user_sys.run.processes import ROBOT_RESTARTS, PrintedReasons, RunProcesses
from user_sys.run.topology import topology

ENDPOINT = "tcp://127.0.0.1:5999"


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
    record_all_demonstrations(config, tmp_path, Console(file=io.StringIO()), frozenset({"far"}), {"far"})
    assert driven_here == (["far"] if episodes else [])


def test_demonstrations_of_a_real_robot_of_another_node_are_refused(tmp_path: Path, driven_here: list[str]) -> None:
    near, far = (RobotConfig(name=name, driver="lab", task="reach") for name in ("near", "far"))
    config = RunConfig(robots=(near, far), demonstrations=DemonstrationConfig(episodes=3))
    store = tmp_path / "run" / "store"
    with pytest.raises(RunError, match="far is on another computer, and 3 of its demonstrations are missing") as caught:
        record_all_demonstrations(config, store, Console(file=io.StringIO()), frozenset({"far"}), {"far"})
    assert driven_here == [], "no robot moves before that"
    words = ("user-sys record", f"--into {store}", f"--resume {tmp_path / 'run'}", "demonstrations.episodes")
    assert not [word for word in words if word not in str(caught.value)] and "\n" not in str(caught.value)


@pytest.mark.parametrize(("last_exit", "ended"), [(-6, "by signal 6"), (4, "with exit status 4")])
def test_robot_whose_driver_ends_at_each_start_ends_the_run(last_exit: int, ended: str, tmp_path: Path) -> None:
    config = RunConfig(runs=tmp_path, robots=(RobotConfig(name="arm", driver="lab"),))
    folder, _ = create_run_folder(config, "r", ENDPOINT)
    run: Any = object.__new__(RunSupervisor)
    run._config, run._folder, run._seen, run._missing, run._reasons = config, folder, set(), {}, PrintedReasons()
    run._hub = SimpleNamespace(view=lambda: SimpleNamespace(robots=()))
    printed: list[str] = []
    display: Any = SimpleNamespace(print_line=printed.append)
    driver = ProcessStatus(state=ProcessState.WAITING, restarts=1, last_exit=last_exit)
    run._check_robots({"arm-driver": driver}, display)
    assert not printed, "it may succeed at its next start"
    driver = ProcessStatus(state=ProcessState.WAITING, restarts=2, last_exit=last_exit)
    with pytest.raises(RunError, match=f"arm cannot be driven: its driver ends {ended}: its log is empty; see "):
        run._check_robots({"arm-driver": driver}, display)
    assert len(printed) == 1


def test_training_sets_the_results_of_the_run_s_earlier_end_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the newer training they would seem to be of its policy."""
    folder = make_run(tmp_path, "week", [True] * 20)
    assert read_variants([folder.path])[0].total("episodes") == 20
    run: Any = object.__new__(RunSupervisor)
    run._folder, run._console, run._config = folder, Console(file=io.StringIO()), RunConfig()
    monkeypatch.setattr(RunSupervisor, "_follow", lambda self, display: INTERRUPTED)
    monkeypatch.setattr(RunSupervisor, "_leave", lambda self, reason, display: None)
    run.train()
    assert read_variants([folder.path])[0].total("episodes") == 0
    assert json.loads((folder.path / "earlier-summary.json").read_text())["episodes"] == 20
    run.train()
    assert (folder.path / "earlier-summary.json").exists()


@pytest.mark.parametrize("finished", [0.0, 1.0])
def test_learner_that_delivers_its_last_version_is_not_stopped_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, finished: float
) -> None:
    monkeypatch.setattr(launcher, "LEAVE_DEADLINE_S", 0.0)
    polls, stopped = iter([{"learner"}, {"learner"}, set[str]()]), list[str]()
    run: Any = object.__new__(RunSupervisor)
    run._config, run._seen, run._missing = RunConfig(robots=()), set(), {}
    run._end = TerminationRequest()
    run._link = SimpleNamespace(client=SimpleNamespace(send=lambda message: None))
    view = SimpleNamespace(metrics={"learner": {"finished": finished}})
    run._hub = SimpleNamespace(view=lambda: view, disk_warning=lambda: "")
    run._receive = lambda wait_s: None
    cluster = SimpleNamespace(stop=lambda *names, within_s: stopped.extend(names))
    run._processes = SimpleNamespace(
        leaving=lambda: {"learner"}, still_running=lambda names: next(polls), names=[], cluster=cluster
    )
    run._leave("the target is reached", SimpleNamespace(show=lambda *_: None, print_line=lambda line: None))
    assert (next(polls, None) is None) == (finished == 1.0) == ("run.left_behind" not in caplog.text)
    assert stopped == ["gateway"]


def test_robot_that_comes_back_with_another_spec_is_named_as_one_without_a_learner() -> None:
    spec, output = FakeRobot().spec, io.StringIO()
    run: Any = object.__new__(RunSupervisor)
    run._seen, run._hub = {"arm"}, SimpleNamespace(robot_spec=lambda name: spec)
    run._console = Console(file=output)
    record = ResourceRecord(kind=Kind.ROBOT, name="arm", model="fake", node="desk", embodiment=spec.embodiment)
    other = msgspec.structs.replace(record, embodiment=msgspec.structs.replace(spec, gripper=-1).embodiment)
    for each in (record, msgspec.structs.replace(other, health=Health.LOST), msgspec.structs.replace(other, name="b")):
        run._print_resource(each)
    assert "no learner" not in output.getvalue()
    run._print_resource(other)
    assert "arm has another spec than before" in output.getvalue() and "no learner" in output.getvalue()


def test_log_lines_name_the_robot_whose_name_begins_with_anothers(tmp_path: Path) -> None:
    robots = tuple(RobotConfig(name=name, driver="fake", task="reach") for name in ("arm", "arm-2"))
    config = RunConfig(runs=tmp_path, robots=robots)
    folder, metadata = create_run_folder(config, "r", ENDPOINT)
    named: dict[str, str] = {}

    def start(name: str, argv: Any, resources: Any, *, env: dict[str, str], **settings: Any) -> None:
        named[name] = json.loads(env[LOG_VARIABLE]).get("robot", "")

    processes: Any = RunProcesses(config, folder, metadata, LocalAllocation(config, "r"))
    processes._cluster = SimpleNamespace(start=start)
    for spec in topology(config, folder, "node:here", lambda _: False):
        processes._start(spec, ROBOT_RESTARTS)
    expected = {f"{name}-{part}": name for name in ("arm", "arm-2") for part in ("driver", "session")}
    assert named.items() >= expected.items() and named["gateway"] == ""
