"""What `user-sys status` says of each fault, and what a debug bundle leaves out."""

from __future__ import annotations

import json
import math
import socket
import tarfile
import time
from pathlib import Path

import msgspec
import pytest
from run_folder_kit import make_run

from hal.process_supervisor import ProcessState, ProcessStatus
from hal.resource import Health
from user_sys.commands.main import main
from user_sys.commands.status import redact, write_debug_bundle
from user_sys.console.progress import RobotView, RunView
from user_sys.edge.robot_processes import EDGE_IDENTITY_FILE, EDGE_STATUS_FILE, EdgeRobot, EdgeStatus, EdgeStatusFile
from user_sys.messages import RobotStatus
from user_sys.run.status import RunStatus, StatusFile, find_faults, read_status
from user_sys.tunnel.keys import new_keypair, save_keypair

REPORT = RobotStatus(
    robot="an-arm-with-a-long-name-0",
    authority="policy",
    operator="",
    phase="policy",
    episode="an-arm-with-a-long-name-0-1795425401985-d8e6ebfea2",
    step=3,
    policy_version=2,
    real_time=False,
    outbox_chunks=0,
    control_hz=20.0,
    safety_interventions=0,
)


def robot(silent_s: float = 0.1, lost: bool = False, health: Health = Health.READY, **report: object) -> RobotView:
    shown = msgspec.structs.replace(REPORT, **report)
    return RobotView(shown.robot, shown, lost, (), None, silent_s, health=health, health_note="gripper slips")


def ended(state: ProcessState, last_exit: int = -9, error: str = "") -> ProcessStatus:
    return ProcessStatus(state=state, restarts=1, last_exit=last_exit, error=error)


def status(
    *robots: RobotView, stage: str = "training", gateway: ProcessStatus | None = None, **run: object
) -> RunStatus:
    file = StatusFile(Path("/nonexistent"))
    processes = {} if gateway is None else {"gateway": gateway}
    view = RunView(run="r", robots=robots, **run)  # type: ignore[arg-type]
    file.write(stage, view, processes, {})
    assert file.newest is not None
    return file.newest


def test_status_with_numbers_that_json_lacks_can_be_read(tmp_path: Path) -> None:
    shown = robot(control_hz=float("nan"), state=(1.0, float("inf")))
    StatusFile(tmp_path).write("training", RunView(run="r", robots=(shown,)), {}, {})
    found = read_status(tmp_path).run.robots[0].status
    assert found is not None and (found.control_hz, found.state) == (0.0, (1.0, 0.0))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (status(robot(lost=True, silent_s=7)), "has reported nothing for 7 s; it holds if its session ended"),
        (status(robot(authority="stopped")), "has a pressed e-stop; it stays stopped until a person re-arms it"),
        (status(robot(health=Health.QUARANTINED)), "is quarantined: gripper slips; no session drives it"),
        (status(robot(lost=True, health=Health.DRAINING)), "is draining: gripper slips; no session drives it"),
        (status(robot(note="no policy", authority="hold")), "reports: no policy; it holds meanwhile"),
        (status(robot(dropped_episodes=3)), "has deleted 3 episodes, because its outbox was full; it keeps the newest"),
        (status(robot(refused_realtime="SCHED_FIFO")), "SCHED_FIFO; its control rate may vary"),
        (status(gateway=ended(ProcessState.WAITING)), "gateway ended by signal 9 and is being restarted; robots"),
        (status(gateway=ProcessStatus(state=ProcessState.WAITING), elapsed_s=20.0), "gateway has not started yet, or"),
        (status(gateway=ended(ProcessState.RUNNING, 1)), "gateway ended with exit status 1 and was restarted "),
        (status(gateway=ended(ProcessState.FAILED, error="no disk")), "is not started again: no disk; robots"),
        (status(metrics={"gateway": {"peers_refused": 2.0}}), "gateway refused 2 connections by key, version or"),
        (status(metrics={"learner": {"checkpoints_unreadable": 1.0}}), "it continued from an older one"),
        (status(warning="waiting for disk space in x; robots wait"), "waiting for disk space in x; robots wait"),
    ],
)  # fmt: skip
def test_each_fault_is_a_sentence_with_a_reaction(found: RunStatus, words: str) -> None:
    (fault,) = find_faults(found, Path("run"), found.written_unix_s)
    assert words in str(fault)


def test_learner_that_is_left_out_is_continued_by_a_resume() -> None:
    file = StatusFile(Path("/nonexistent"))
    file.write("training", RunView(run="r"), {"learner-b": ended(ProcessState.FAILED, 2, "no camera")}, {})
    assert file.newest is not None
    (fault,) = find_faults(file.newest, Path("runs/r"))
    assert fault.problem.endswith("is not started again: no camera") and "its checkpoint" not in fault.reaction
    assert "without new weights" in fault.reaction and "`user-sys train --resume runs/r`" in fault.reaction


def test_healthy_run_and_an_ended_one_have_no_fault() -> None:
    assert not find_faults(status(robot()), Path("run"))
    assert not find_faults(status(robot(lost=True), stage="ended"), Path("run"))
    assert not find_faults(status(gateway=ProcessStatus(state=ProcessState.WAITING), elapsed_s=2.0), Path("run"))


def test_launcher_that_ended_or_hangs_is_named() -> None:
    found = status(robot(lost=True))
    (stuck,) = find_faults(found, Path("run"), time.time() + 20)
    assert "has reported nothing for 20 s" in stuck.problem
    (dead,) = find_faults(msgspec.structs.replace(found, pid=2**22 + 1), Path("run"))
    assert "has ended before the run was over" in dead.problem and "--resume run" in dead.reaction


def test_gateway_that_hangs_is_named() -> None:
    file = StatusFile(Path("/nonexistent"))
    file.on_report("gateway")
    file.write("training", RunView(run="r"), {"gateway": ProcessStatus(state=ProcessState.RUNNING, pid=1)}, {})
    assert file.newest is not None and not find_faults(file.newest, Path("run"))
    (process,) = file.newest.processes
    silent = msgspec.structs.replace(process, reported_unix_s=process.reported_unix_s - 12)
    (fault,) = find_faults(msgspec.structs.replace(file.newest, processes=(silent,)), Path("run"))
    assert "gateway runs and has reported nothing for 12 s; robots continue and keep their steps" in str(fault)


def test_learner_that_hangs_is_named_while_its_gateway_reports() -> None:
    file = StatusFile(Path("/nonexistent"))
    running = ProcessStatus(state=ProcessState.RUNNING, pid=1)
    for node in ("gateway", "learner"):
        file.on_report(node)
    file.write("training", RunView(run="r"), {"gateway": running, "learner": running}, {})
    assert file.newest is not None and not find_faults(file.newest, Path("run"))
    gateway, learner = file.newest.processes
    hung = msgspec.structs.replace(learner, reported_unix_s=learner.reported_unix_s - 4)
    (fault,) = find_faults(msgspec.structs.replace(file.newest, processes=(gateway, hung)), Path("run"))
    assert "learner runs and has reported nothing for 4 s; robots continue with the weights" in str(fault)
    late = msgspec.structs.replace(gateway, reported_unix_s=hung.reported_unix_s)
    (fault,) = find_faults(msgspec.structs.replace(file.newest, processes=(late, hung)), Path("run"))
    assert fault.subject == "gateway"  # reports of learners pass through it


def test_commands_print_whole_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = StatusFile(tmp_path)
    run = RunView(run="r", robots=(robot(),), metrics={"learner": {"loss": math.nan, "q": 1.0}})
    file.write("training", run, {"gateway": ProcessStatus(state=ProcessState.RUNNING, pid=1)}, {})
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert REPORT.robot in out and REPORT.episode in out and "no fault" in out
    file.write("training", RunView(run="r", robots=(robot(lost=True, silent_s=65.0),)), {}, {})
    assert main(["status", str(tmp_path)]) == 1 and "lost" in (out := capsys.readouterr().out) and "for 1:05" in out
    file.write("training", run, {"gateway": ProcessStatus(state=ProcessState.WAITING, restarts=1, last_exit=-9)}, {})
    assert main(["status", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["faults"][0]["subject"] == "gateway" and found["run"]["metrics"] == {"learner": {"q": 1.0}}
    file.set_stage("ended")
    assert read_status(tmp_path).stage == "ended" and read_status(tmp_path).host == socket.gethostname()
    assert main(["status", str(tmp_path / "missing")]) == 2
    assert main(["top", str(tmp_path / "missing")]) == 2


def test_alive_asks_for_the_program_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = StatusFile(tmp_path)
    file.write("training", RunView(run="r", robots=(robot(authority="stopped"),)), {}, {})
    assert main(["status", str(tmp_path)]) == 1 and main(["status", str(tmp_path), "--alive"]) == 0
    assert file.newest is not None
    gone = msgspec.structs.replace(file.newest, pid=2**22 + 1)
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(gone))
    assert main(["status", str(tmp_path), "--alive"]) == 1
    assert "has ended before the run was over" in capsys.readouterr().out
    file.set_stage("ended")
    assert main(["status", str(tmp_path), "--alive"]) == 0


def test_edge_that_was_killed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = EdgeStatus(time.time(), socket.gethostname(), 2**22 + 1, (EdgeRobot("left", "drives", False),))
    (tmp_path / EDGE_STATUS_FILE).write_bytes(msgspec.json.encode(killed))
    assert main(["status", str(tmp_path), "--alive"]) == 1
    assert "FAULT: `user-sys edge` (process 4194305" in capsys.readouterr().out
    stale = msgspec.structs.replace(killed, host="another", written_unix_s=time.time() - 60)
    (tmp_path / EDGE_STATUS_FILE).write_bytes(msgspec.json.encode(stale))
    assert main(["status", str(tmp_path), "--json"]) == 1


def test_edge_that_has_ended_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / EDGE_IDENTITY_FILE).write_text("0f3a")
    file = EdgeStatusFile(tmp_path)
    file.write(())
    assert main(["status", str(tmp_path)]) == 0
    file.remove()
    assert main(["status", str(tmp_path)]) == 2
    assert f"`user-sys edge` does not run in {tmp_path}, or has not started" in capsys.readouterr().err


BUNDLED_CONFIG = """\
robots:
- password: "SECRET0 horse SECRET1 staple"
  aws_secret_access_key: SECRET2/7MDENG/bPxRfiCYKEY
  api-key: SECRET3-0123456789
  keyboard: plain
  token:
    SECRET4-0123456789
  url: rtsp://cam:p@SECRET5@10.0.0.5/stream
"""
BUNDLED_LOG = r"""
connect(host='plain', password=b'SECRET8 0123', token=Rb"SECRET9", a='plain')
['curl', '--user-token', 'SECRETa 0123', 'plain'] {"argv": ["--api-key", "SECRETb", "plain"]}
user-sys --password SECRETc plain --token "SECRETd 0123" plain --private --plain
api_key=sk-abc'SECRETe plain {"url": "http://plain/?token=SECRETf", "b": "plain"}
Authorization: Bearer SECRET0-0123456789
x-api-key: SECRET1-0123456789
PGPASSWORD=SECRET2 plain
{"message": "login with {\"password\": \"SECRET3 \\\" 0123\"}", "a": "plain"}
Cookie: user_sys_console_8088=SECRET4
{"password": "a\" SECRET5", "tokens": 128, "loss": "plain"}
{'authorization': 'Basic SECRET6', 'b': 'plain'} tokens = ['plain']
secret_key : "SECRET7
"""


@pytest.mark.parametrize(("name", "text"), [("config.yaml", BUNDLED_CONFIG), ("logs/a.log", BUNDLED_LOG)])
def test_debug_bundle_masks_each_form_of_a_secret_only(tmp_path: Path, name: str, text: str) -> None:
    run = make_run(tmp_path, "r", [True] * 3).path
    (run / name).write_text(text)
    write_debug_bundle(run, tmp_path / "b.tar.gz", {})
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        file = archive.extractfile(f"b/{name}")
        packed = file.read().decode() if file else ""
    assert "SECRET" not in packed and packed.count("plain") == text.count("plain"), packed


def test_masked_json_is_still_json() -> None:
    text = json.dumps({"token_loss": 0.5, "nested": json.dumps({"key": 3, "b": 2}), "url": "/?token=abc", "a": 1})
    masked = json.loads(redact(text.encode(), frozenset()))
    assert masked == {
        "token_loss": "[REDACTED]", "nested": '{"key": "[REDACTED]", "b": 2}', "url": "/?token=[REDACTED]", "a": 1,
    }  # fmt: skip


@pytest.mark.parametrize("piece", [b"-", b"--token", b"--token ", b"token", b"token=b'", b"'--token', '", b"token=a'"])
def test_masking_takes_linear_time(piece: bytes) -> None:
    """Quadratic time would be hours."""
    started_s = time.process_time()
    redact(piece * 100_000, frozenset())
    assert time.process_time() - started_s < 20


def test_debug_bundle_contains_no_key_and_no_token(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r", [True] * 3).path
    pairs = [new_keypair(), new_keypair()]
    for pair, name in zip(pairs, ("gateway", "arm"), strict=True):
        save_keypair(pair, run / "keys", name)
    secrets = [pair.secret for pair in pairs] + ["tok-0123456789", "wandb-0123456789", "hunter2-pw"]
    (run / "keys" / "learner.sign").write_text(signing := "ef88bf3292f88a87a779b0accf7a434d")
    (run / "logs" / "gateway.log").write_text(
        f"key {pairs[0].secret}\n{json.dumps(pairs[1].secret)}\nsign {signing}\nhttp://127.0.0.1/?token=tok-0123456789&a=1\n"
        "WANDB wandb-0123456789\nrobot options: {password: hunter2-pw}\nrtsp://admin:hunter2-pw@camera/1\nuseful line\n"
    )
    target = tmp_path / "bundle.tar.gz"
    names = write_debug_bundle(run, target, {"WANDB_API_KEY": "wandb-0123456789", "HOME": "/root"})
    assert {"report.json", "config.yaml", "run.json", "logs/gateway.log", "metrics/learner.jsonl"} <= set(names)
    assert target.stat().st_mode & 0o077 == 0
    with tarfile.open(target) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        packed = b"\n".join(file.read() for file in files.values() if file is not None)
    assert b"useful line" in packed and b"&a=1" in packed and b"[REDACTED]" in packed
    for secret in (*secrets, signing):
        assert secret.encode() not in packed and json.dumps(secret)[1:-1].encode() not in packed, secret
    assert not any("keys/" in name or name.endswith(".seg") for name in files)
    assert main(["debug", "bundle", str(run), "--output", str(target)]) == 2
