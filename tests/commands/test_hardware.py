"""``user-sys hardware``: its output for people and for programs."""

from __future__ import annotations

import getpass
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_kit import until, user_sys

from hal.doctor import OptionalLibrary
from hal.lease import LeaseTable, robot_lock
from hal.placement import format_time
from hal.registry import Registry
from hal.resource import Kind, ResourceRecord
from hal.state_database import STATE_FILE, StateDatabase
from user_sys import compose
from user_sys.commands.main import main
from user_sys.compose import RobotConfig
from user_sys.operator_overrides import overrides_of_run
from user_sys.run.allocation import with_local_lease
from user_sys.run.config import RunConfig, create_run_folder, read_run_metadata
from user_sys.store.store import StoreWriter

JOB = """
robots:
  - {name: left, driver: fake, task: reach, labels: {site: lab}}
  - {name: right, driver: fake, task: reach, address: "127.0.0.1:1"}
console: {port: 0}
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="us-", dir="/tmp") as folder:
        monkeypatch.setenv("USER_SYS_TEST_FOLDER", folder)
        yield Path(folder)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run folder with a robot in its registry."""
    folder, _ = create_run_folder(RunConfig(runs=tmp_path / "runs"), "demo", "tcp://127.0.0.1:5999")
    with StoreWriter.open(folder.store):
        registry = registry_of(folder.path)
        registry.announce(
            ResourceRecord(kind=Kind.ROBOT, name="far-0", model="panda", node="10.0.0.7", found_by="tunnel")
        )
        registry.acquire("far-0", "edge on cart")
        yield folder.path


def registry_of(folder: Path, *args: Any, **options: Any) -> Registry:
    """The registry of the run in `folder`, without leases."""
    state, overrides = StateDatabase(folder / STATE_FILE), overrides_of_run(folder)
    return Registry(LeaseTable(StateDatabase(None)), state, *args, overrides=overrides, **options)


def output(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    assert main(["hardware", *map(str, argv)]) == status
    return capsys.readouterr().out


def json_output(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> Any:
    return json.loads(output(capsys, *argv, "--json", status=status))


def test_list_has_this_computer_config_and_run(job: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json_output(capsys, "list", job, "--run", run)}
    assert rows["left"]["health"] == "ready" and rows["left"]["labels"]["site"] == "lab"
    assert (rows["right"]["health"], rows["right"]["trouble"]) == (
        "lost",
        "nothing answers at 127.0.0.1:1: Connection refused",
    )
    assert (rows["far-0"]["health"], rows["far-0"]["note"], rows["far-0"]["node"]) == (
        "leased",
        "by edge on cart",
        "10.0.0.7",
    )
    assert any(row["kind"] == "compute" and row["cores"] >= 1 for row in rows.values())
    assert "left" in output(capsys, "list", job)


def test_driven_robot_is_listed_as_leased(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with robot_lock("left", "for runs/other/edge/left", simulated=True):
        rows = {row["name"]: row for row in json_output(capsys, "list", job)}
        left, right = json_output(capsys, "plan", job, status=1)["rows"]
    assert rows["left"]["health"] == "leased" and rows["left"]["note"].endswith("for runs/other/edge/left")
    assert left["there"][0].startswith("left leased by pid") and right["there"][0].startswith("right lost")


def test_plan_is_a_table_with_what_is_missing(job: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = json_output(capsys, "plan", job, status=1)
    assert [(row["asked"], row["there"], row["missing"]) for row in refused["rows"]] == [
        ("robot left", ["left free"], ""),
        ("robot right", ["right lost (nothing answers at 127.0.0.1:1: Connection refused)"], "missing"),
    ]
    assert refused["possible"] is False
    table = output(capsys, "plan", job, status=1)
    assert "The job cannot run now" in table and "missing" in table
    job.write_text("robots: [{name: left, driver: fake, task: reach}]\nresources: [{kind: compute, cores: 1}]\n")
    placed = json_output(capsys, "plan", job)
    assert placed["possible"] is True
    assert [(row["asked"], bool(row["gets"])) for row in placed["rows"]] == [
        ("robot left", True),
        ("compute, 1 processors", True),
    ]
    assert "The job can run now" in output(capsys, "plan", job)
    job.write_text("robots: [{name: far-0, driver: fake, task: reach}]\nresources: [{kind: robot, model: panda}]\n")
    (row,) = json_output(capsys, "plan", job, "--run", run, status=1)["rows"]
    assert row["there"] == ["far-0 leased by edge on cart"]


def test_plan_of_the_fleet_of_four_lacks_a_driver_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = (Path(__file__).parents[2] / "configs" / "fleet-of-four.yaml").read_text()
    (tmp_path / "fleet.yaml").write_text(fleet)
    panda, point = json_output(capsys, "plan", tmp_path / "fleet.yaml", status=1)["rows"]
    assert (panda["missing"], point["missing"]) == ("", "missing") and "no driver 'point'" in point["there"][0]
    (tmp_path / "fleet.yaml").write_text(
        fleet.replace("driver: point", "driver: fake").replace("options: {rate_hz: 10, reach: {max_steps: 40}}", "")
    )
    placed = json_output(capsys, "plan", tmp_path / "fleet.yaml")
    assert [row["gets"] for row in placed["rows"]] == [["panda-0"], ["point-0"]]
    assert set(placed["remote_robots"]) == {"ur5e-0", "so101-0"}


def test_remote_robots_are_listed_with_time_of_loss(job: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote_robots = (
        "remote_robots: [{name: far-0, driver: nowhere, task: reach}, {name: far-1, driver: nowhere, task: reach}]\n"
    )
    job.write_text("robots: [{name: left, driver: fake, task: reach}]\n" + remote_robots)
    rows = {row["name"]: row for row in json_output(capsys, "list", job, "--run", run)}
    assert (rows["far-0"]["health"], rows["far-0"]["labels"]["driver"]) == ("leased", "nowhere")
    began = format_time(read_run_metadata(run).started_unix_s)
    never = f"a remote robot, which has not connected since the run began, {began}"
    assert (rows["far-1"]["health"], rows["far-1"]["trouble"]) == ("lost", never)
    assert json_output(capsys, "plan", job, "--run", run)["remote_robots"] == {
        "far-0": "leased by edge on cart",
        "far-1": f"lost ({never})",
    }
    assert json_output(capsys, "plan", job)["remote_robots"]["far-1"] == (
        "lost (a remote robot, which connects from its own computer)"
    )
    lose(run, "far-0", last_there_unix_s=1_000_000_000.0)
    gone = f"lost since {format_time(1_000_000_000.0)}"
    assert json_output(capsys, "plan", job, "--run", run)["remote_robots"]["far-0"] == gone
    (row,) = [row for row in json_output(capsys, "list", "--run", run) if row["name"] == "far-0"]
    assert (row["health"], row["seen_unix_s"]) == ("lost", 1_000_000_000.0)
    with robot_lock("left", "for runs/other/edge/left", simulated=True):
        refused = json_output(capsys, "plan", job, "--run", run, status=1)
    assert refused["remote_robots"]["far-0"] == gone, "for a job that cannot run now too"


def test_records_of_killed_gateway_are_lost(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = create_run_folder(RunConfig(runs=tmp_path / "runs"), "killed", "tcp://127.0.0.1:5999")
    registry = registry_of(folder.path)
    for name in ("far-0", "far-1", "left"):
        registry.announce(ResourceRecord(kind=Kind.ROBOT, name=name, model="panda", node="10.0.0.7"))
        registry.acquire(name, "run killed")
    overrides_of_run(folder.path).set_override("far-1", "quarantined", "ana", "oil")
    registry.poll()
    StoreWriter.open(folder.store).close()
    rows = {row["name"]: row for row in json_output(capsys, "list", job, "--run", folder.path)}
    assert (rows["far-0"]["health"], rows["far-0"]["trouble"]) == ("lost", "the run's gateway is not running")
    assert (rows["far-1"]["health"], rows["far-1"]["note"]) == ("quarantined", "by ana: oil"), "overrides stay in force"
    assert rows["left"]["health"] == "ready", "this computer has newer facts on local robots"


def lose(run: Path, name: str, last_there_unix_s: float) -> None:
    """The time at which the run's gateway lost the robot."""
    clock_ns = 0
    registry = registry_of(run, lambda: clock_ns, wall_clock=lambda: last_there_unix_s)
    registry.announce(registry.record(name))
    clock_ns = 60 * 10**9
    assert registry.poll() == (name,)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["head", "--port", "0"], "'--port': 0 is not in the range 1<=x<=65535"),
        (["head", "--robot", "arm"], "--robot arm: give the CONFIG with this robot"),
        (["head", "--ip", "203.0.113.7"], "--ip 203.0.113.7: this computer has no such address"),
        (["join", "10.0.0.2:6379", "--ip", f"{'a' * 70}.example"], "this computer has no such address"),
        (["join", "nowhere"], "'nowhere' is not an address: write HOST:PORT, such as 10.0.0.2:6379"),
        (["join", "10.0.0.2:6379", "--label", "site="], "--label site=: write NAME=VALUE, such as site=lab"),
        (["join", "10.0.0.2:6379", "--label", "site=lab (2nd floor)"], "Ray refuses 'lab (2nd floor)'"),
    ],
)
def test_invalid_node_arguments_are_refused(
    argv: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["node", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err
    assert not list(tmp_path.iterdir()), "no token is written either"


def test_watch_prints_changes_until_interrupted(job: Path, tmp_path: Path) -> None:
    with user_sys(tmp_path, "hardware", "watch", job, "--json") as launch:
        until(
            lambda: all(f'"name":"{name}"' in launch.out for name in ("left", "right")), "both are json_output of", 120
        )
        launch.interrupt()
        assert launch.wait() == 130
        events = {(e["record"] or {}).get("name"): e for e in map(json.loads, launch.out.splitlines())}
    assert (events["left"]["change"], events["right"]["change"]) == ("appeared", "absent")


def test_doctor_prints_problems_and_fixes(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = json_output(capsys, "doctor", job, status=1)
    (problem,) = [finding for finding in findings if finding["check"] == "robots" and finding["status"] == "problem"]
    assert problem["message"] == "right: nothing answers at 127.0.0.1:1: Connection refused"
    assert "-> install what is missing" in output(capsys, "doctor", job, status=1)


def test_doctor_checks_rendering(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent")  # the library loads without a driver
    (found,) = [f for f in json_output(capsys, "doctor", status=1) if f["check"] == "rendering"]
    assert found["status"] == "problem" and "libegl-mesa0" in found["fix"]


def test_doctor_reports_unbuildable_robot(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("task: reach, labels: {site: lab}", "task: reach, options: {rate: 5}"))
    messages = [f["message"] for f in json_output(capsys, "doctor", job, status=1) if f["check"] == "robots"]
    assert messages[0] == "left: rate: unknown key; did you mean 'rate_hz'?" and "nothing answers" in messages[1]


def test_missing_driver_hides_no_other_robot(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = "{name: crane, driver: nowhere, task: reach, address: '127.0.0.1:1', labels: {site: yard}}"
    job.write_text(f"robots: [{nowhere}, {{name: left, driver: fake, task: reach}}]\n")
    rows = {row["name"]: row for row in json_output(capsys, "list", job)}
    assert rows["left"]["health"] == "ready"
    crane = rows["crane"]
    assert (crane["health"], crane["labels"]) == ("lost", {"driver": "nowhere", "site": "yard"})
    assert crane["trouble"].startswith("no driver 'nowhere'; known are fake, franka, ")
    (missing, _) = json_output(capsys, "plan", job, status=1)["rows"]
    assert missing["there"][0].startswith("crane lost (no driver ")
    job.write_text("robots: [{name: e, driver: sim, task: nonsense}]\n")
    (problem,) = [f for f in json_output(capsys, "doctor", job, status=1) if f["check"] == "robots"]
    assert problem["message"].startswith("e: no task 'nonsense'"), "also if its name occurs in other messages"


def test_missing_library_is_reported_with_install_command(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some drivers import their vendor's library only when they connect."""
    absent = OptionalLibrary("no_such_library", "the driver fake", "pip install it")
    monkeypatch.setattr(compose, "OPTIONAL_LIBRARIES", (absent,))
    job.write_text("robots: [{name: left, driver: fake, task: reach}]\n")
    (row,) = json_output(capsys, "plan", job, status=1)["rows"]
    assert row["there"] == [
        "left lost (the driver fake needs no_such_library, which is not installed here: pip install it)"
    ]
    (problem,) = [f for f in json_output(capsys, "doctor", job, status=1) if f["check"] == "robots"]
    assert problem["message"].startswith("left: the driver fake needs no_such_library, which is not installed")
    assert problem["message"].endswith("pip install it")


def test_unreadable_locks_do_not_stop_list(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "file"))
    rows = {row["name"]: row for row in json_output(capsys, "list", job)}
    assert rows["left"]["trouble"].startswith("whether this computer uses it is unknown: ")
    (problem,) = [f for f in json_output(capsys, "doctor", status=1) if f["check"] == "machine folder"]
    assert problem["status"] == "problem" and problem["message"].startswith("the check failed")


def test_override_of_nameless_user_has_uid(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert f"far-0 is quarantined by uid {os.getuid()}" in output(capsys, "quarantine", "far-0", "--run", run)


def test_doctor_checks_ports_of_run(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job.write_text(f"gateway: {{endpoint: 'tcp://127.0.0.1:{port}'}}\nconsole: {{port: 0}}\n")
        (found,) = [each for each in json_output(capsys, "doctor", job, status=1) if each["check"] == "ports"]
    assert (found["status"], found["message"]) == ("advice", f"port {port} is in use (the gateway)")


def test_found_robot_may_have_any_name() -> None:
    record = ResourceRecord(kind=Kind.ROBOT, name="ros2/0/arm", model="arm", node="desk", found_by="crane")
    assert with_local_lease(record) == record


def test_operator_quarantines_and_restores_robot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--run", run, "--by", "carol")
    assert "far-0 is quarantined by carol: oil" in output(capsys, "quarantine", "far-0", *given, "--reason", "oil")
    registry = registry_of(run)
    assert registry.record("far-0").note == "by carol: oil"
    assert output(capsys, "restore", "far-0", *given) == "far-0 is in use again; it was quarantined by carol: oil\n"
    registry.poll()
    assert registry.record("far-0").note == ""
    output(capsys, "drain", "far-0", *given)
    registry.poll()
    assert registry.record("far-0").health == "draining"


def test_override_of_unknown_robot_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far = RobotConfig(name="far-7", driver="nowhere")
    folder, _ = create_run_folder(RunConfig(runs=tmp_path, remote_robots=(far,)), "fresh", "tcp://127.0.0.1:5999")
    assert main(["hardware", "quarantine", "fra-7", "--run", str(folder.path)]) == 2
    assert "has no robot fra-7; did you mean 'far-7'?" in capsys.readouterr().err, "also before it has connected"
    given = ("--run", folder.path, "--by", "ana\nmaria", "--reason", f"oil\n on  the floor {'x' * 600}")
    assert output(capsys, "quarantine", "far-7", *given).startswith(
        "far-7 is quarantined by ana maria: oil on the floor [...]: no session gets it"
    )


def test_audit_lists_leases_of_robot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = json_output(capsys, "audit", "--run", run)
    assert (entry["robot"], entry["event"], entry["peer"], entry["token"]) == (
        "far-0",
        "granted",
        "edge on cart",
        1,
    )
    assert "edge on cart" in output(capsys, "audit", "far-0", "--run", run)


def test_audit_without_entries_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = create_run_folder(
        RunConfig(runs=tmp_path, remote_robots=(RobotConfig(name="far-7"),)), "new", "tcp://127.0.0.1:5999"
    )
    assert output(capsys, "audit", "far-7", "--run", folder.path).endswith("state.db has no entry of far-7\n")
    assert json_output(capsys, "audit", "far-7", "--run", folder.path) == []
    assert output(capsys, "audit", "--run", folder.path).endswith("state.db has no entry\n")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["quarantine", "far-9", "--run", "{run}"], "has no robot far-9; did you mean 'far-0'?"),
        (["audit", "near-0", "--run", "{run}"], "has no robot near-0; did you mean 'far-0'?"),
        (["restore", "far-0", "--run", "{run}"], "far-0 is neither quarantined nor draining"),
        (["drain", "far-0", "--run", "nowhere"], "nowhere is not a run folder"),
        (["list", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_invalid_arguments_fail_with_one_line(
    argv: list[str], why: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hardware", *(word.format(run=run) for word in argv)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err


def test_invalid_resource_requests_are_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text("resources: [{kind: gpu, count: 0}]\n")
    assert main(["hardware", "plan", str(job)]) == 2
    assert "resources.0.count: expected a whole number >= 1, got 0" in capsys.readouterr().err
    assert msgspec.json.encode(RunConfig().requests()) == b"[]"
