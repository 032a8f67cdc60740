"""The doctor's checks on computers with missing or broken parts."""

from __future__ import annotations

import grp
import os
import resource
import socket
import sys
from pathlib import Path

import pynvml
import pytest

from hal import machine_folder
from hal.doctor import CheckResult, CheckStatus, DoctorConfig, OptionalLibrary, run_checks

MINE = grp.getgrgid(os.getgid()).gr_name


def findings(machine: DoctorConfig, check: str) -> list[CheckResult]:
    return [finding for finding in run_checks(machine) if finding.check == check]


def make(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("HD Webcam\n")


def test_inaccessible_devices_are_named_with_their_group(tmp_path: Path) -> None:
    make(tmp_path, "dev/ttyUSB0", "dev/ttyACM0", "dev/video0", "dev/hidraw0")
    machine = DoctorConfig(root=tmp_path, can_access=lambda path: path.name in ("video0", "ttyACM0"))
    (serial,) = findings(machine, "serial")
    assert (
        serial.status is CheckStatus.PROBLEM
        and serial.message == "/dev/ttyUSB0 may not be used by this user (motor buses)"
    )
    assert MINE == "root" or serial.fix == f"sudo usermod -aG {MINE} $USER, then log in again"
    (video,) = findings(machine, "video")
    assert (video.status, video.message) == (CheckStatus.OK, "/dev/video0 are accessible")
    (entered,) = findings(machine, "input")
    assert entered.status is CheckStatus.ADVICE and "/dev/hidraw0" in entered.message, (
        "built-in keyboards belong to root"
    )


def test_used_port_missing_library_and_power_saving_are_advice(tmp_path: Path) -> None:
    make(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").write_text("powersave\n")
    libraries = (
        OptionalLibrary("no_such_module", "the driver x", "pip install 'x'"),
        OptionalLibrary("json", "everything", "python"),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        machine = DoctorConfig(root=tmp_path, ports={"the console": port}, libraries=libraries)
        found = {(f.check, f.message): f for f in run_checks(machine)}
    assert (
        found["ports", f"port {port} is in use (the console)"].fix == f"end what uses it (ss -ltnp 'sport = :{port}')"
    )
    missing = found["libraries", "no_such_module is not installed; it is for the driver x"]
    assert (missing.status, missing.fix) == (CheckStatus.ADVICE, "pip install 'x'")
    assert found["libraries", "json is installed, for everything"].status is CheckStatus.OK
    assert found["real time", "processors save power, so they wake up late"].status is CheckStatus.ADVICE


def test_tests_folder_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "r"))
    (found,) = findings(DoctorConfig(root=tmp_path), "machine folder")
    assert found.status is CheckStatus.PROBLEM and found.fix.startswith("unset USER_SYS_TEST_FOLDER")


def test_missing_machine_folder_is_advice_with_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USER_SYS_TEST_FOLDER", raising=False)
    monkeypatch.setattr(machine_folder, "MACHINE_FOLDER", tmp_path / "absent")
    (found,) = findings(DoctorConfig(root=tmp_path), "machine folder")
    assert found.status is CheckStatus.ADVICE and found.fix.startswith("sudo install -d -m 1777 ")
    (found,) = findings(DoctorConfig(root=tmp_path, has_real_robots=True), "machine folder")
    assert found.status is CheckStatus.PROBLEM


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('no display'); exit(1)", "no display"),
        ("import sys; print('noise', file=sys.stderr); sys.exit('no driver')", "no driver"),
        ("import os; os.abort()", "status -6"),
    ],
    ids=["reason", "traceback", "crash"],
)
def test_failed_rendering_is_a_problem(program: str, message: str) -> None:
    (found,) = findings(DoctorConfig(render_command=(sys.executable, "-c", program)), "rendering")
    assert found.status is CheckStatus.PROBLEM and found.message.endswith(message)
    assert "libegl1 libegl-mesa0" in found.fix


def test_every_problem_of_this_computer_has_a_fix(tmp_path: Path) -> None:
    found = list(run_checks(DoctorConfig(runs_folder=tmp_path)))
    assert {"gpu", "serial", "video", "clock", "real time", "rendering", "disk", "machine folder"} <= {
        f.check for f in found
    }
    assert all(finding.message and (finding.fix or finding.status is CheckStatus.OK) for finding in found)


def test_device_removed_during_check_is_a_problem(tmp_path: Path) -> None:
    make(tmp_path, "dev/ttyUSB0")
    (tmp_path / "dev/ttyUSB1").symlink_to("gone")
    found = list(run_checks(DoctorConfig(root=tmp_path, can_access=lambda path: False)))
    (gone,) = [finding for finding in found if "the check failed" in finding.message]
    assert (gone.check, gone.status, gone.fix) == ("devices", CheckStatus.PROBLEM, "run it again")
    assert {"clock", "disk"} <= {finding.check for finding in found}


@pytest.mark.parametrize(("capabilities", "allowed"), [("0000000000804000", True), ("0000000000000400", False)])
def test_root_without_capabilities_has_real_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str, allowed: bool
) -> None:
    make(tmp_path, "proc/self/status")
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nCapPrm:\t{'f' * 16}\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, 0))
    found = findings(DoctorConfig(root=tmp_path), "real time")
    assert [finding.message.endswith("is allowed") for finding in found] == [allowed, allowed]
    assert allowed or [finding.fix.rpartition("--")[2] for finding in found] == ["cap-add=SYS_NICE", "cap-add=IPC_LOCK"]


@pytest.mark.parametrize(
    ("built_for", "status", "message", "fix"),
    [
        ("None", CheckStatus.ADVICE, "torch was built without CUDA", "install a torch for CUDA 12.4 or older"),
        (
            "'13.0'",
            CheckStatus.PROBLEM,
            "for CUDA 13.0; the driver supports 12.4 at most",
            "update the driver, or install",
        ),
        ("'12.8'", CheckStatus.OK, "torch was built for CUDA 12.8, which the driver supports", ""),
    ],
)
def test_torch_for_another_cuda_is_reported(
    built_for: str, status: CheckStatus, message: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = {"Init": None, "Shutdown": None, "DeviceGetCount": 1, "SystemGetDriverVersion": "550.54.14"}
    for name, answer in {**driver, "SystemGetCudaDriverVersion_v2": 12040}.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda answer=answer: answer)
    (tmp_path / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {built_for}\n")
    gpu, torch = findings(DoctorConfig(root=tmp_path, torch_folder=tmp_path), "gpu")
    assert gpu.message == "1 NVIDIA GPU(s), driver 550.54.14"
    assert (torch.status, message in torch.message, torch.fix.startswith(fix)) == (status, True, True)
    assert findings(DoctorConfig(root=tmp_path, torch_folder=None), "gpu") == [gpu]
