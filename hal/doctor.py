"""Checks of this computer: problems for driving robots, and their fixes.

The checks open no device and change nothing.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import enum
import errno
import importlib.util
import os
import resource
import runpy
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hal.discovery import UDEV_FIX, can_use_device, device_group
from hal.driver import installed_drivers, load_driver
from hal.errors import LeaseError
from hal.machine_folder import (
    CREATE_COMMAND,
    CREATE_GROUP_COMMAND,
    MACHINE_FOLDER,
    TEST_FOLDER_VARIABLE,
    machine_folder_problem,
    require_private_folder,
    runtime_folder,
    tests_folder,
)
from hal.resource import MAX_PORT

MIN_FREE_BYTES = 5_000_000_000
MIN_SHARED_BYTES = 200_000_000  # of /dev/shm, for Ray's object store
MIN_RTPRIO = 20
MAX_CLOCK_ERROR_S = 0.05
RENDER_TIMEOUT_S = 60.0
MAX_DEVICES = 64  # of one sort
_STA_UNSYNC = 0x40  # adjtimex(2)
_UNLIMITED = resource.RLIM_INFINITY


class CheckStatus(enum.StrEnum):
    """OK; ADVICE: it could work better, or an optional part is missing; PROBLEM: it does not work."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. `fix` is the remedy, empty if none is needed."""

    check: str
    status: CheckStatus
    message: str
    fix: str = ""


@dataclass(frozen=True)
class OptionalLibrary:
    """A vendor's library: its module, its purpose, and the command that installs it."""

    module: str
    purpose: str
    install: str


def torch_folder() -> Path | None:
    """The folder of the installed torch, which is not imported; None if it is missing."""
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).parent


@dataclass(frozen=True)
class DoctorConfig:
    """The subjects of the checks.

    Attributes:
        root: of the file system, for tests.
        can_access: whether this user may open a device as its driver does.
        runs_folder: the folder for runs.
        ports: that a run will listen on, by purpose.
        libraries: the drivers' optional libraries.
        torch_folder: the folder of an installed torch; None without one.
        render_command: renders without a screen, for simulated cameras. It exits with status 0, or prints the problem.
            Empty: no rendering is needed.
        has_real_robots: robots are to be driven that are not simulated.
    """

    root: Path = Path("/")
    has_real_robots: bool = False
    can_access: Callable[[Path], bool] = can_use_device
    runs_folder: Path = Path(".")
    ports: Mapping[str, int] = field(default_factory=dict)
    libraries: Sequence[OptionalLibrary] = ()
    torch_folder: Path | None = field(default_factory=torch_folder)
    render_command: Sequence[str] = ()


def run_checks(machine: DoctorConfig) -> Iterator[CheckResult]:
    """Runs all checks. Takes a second or two."""
    checks = (
        _drivers,
        _libraries,
        _gpus,
        _devices,
        _clock,
        _realtime,
        _rendering,
        _ports,
        _disk,
        _machine_folder,
    )
    for check in checks:
        try:
            yield from check(machine)
        except OSError as error:  # e.g. a device is being unplugged
            yield _problem(check.__name__.strip("_").replace("_", " "), f"the check failed: {error}", "run it again")


def _ok(check: str, message: str) -> CheckResult:
    return CheckResult(check=check, status=CheckStatus.OK, message=message)


def _advice(check: str, message: str, fix: str, status: CheckStatus = CheckStatus.ADVICE) -> CheckResult:
    return CheckResult(check=check, status=status, message=message, fix=fix)


def _problem(check: str, message: str, fix: str) -> CheckResult:
    return _advice(check, message, fix, CheckStatus.PROBLEM)


def _drivers(_: DoctorConfig) -> Iterator[CheckResult]:
    for name in installed_drivers():
        try:
            load_driver(name)
            yield _ok("drivers", f"the installed driver {name} loads")
        except Exception as error:  # another package may fail in any way
            yield _problem("drivers", str(error), "reinstall or update the package of the driver")


def _libraries(machine: DoctorConfig) -> Iterator[CheckResult]:
    for library in machine.libraries:
        if importlib.util.find_spec(library.module) is not None:
            yield _ok("libraries", f"{library.module} is installed, for {library.purpose}")
        else:
            message = f"{library.module} is not installed; it is for {library.purpose}"
            yield _advice("libraries", message, library.install)


def _gpus(machine: DoctorConfig) -> Iterator[CheckResult]:
    """The library may answer without the driver's file too, e.g. under WSL."""
    driver = (machine.root / "proc/driver/nvidia/version").exists()
    if importlib.util.find_spec("pynvml") is None:
        if driver:
            yield _problem(
                "gpu", "there is an NVIDIA driver, but nvidia-ml-py is not installed", "pip install nvidia-ml-py"
            )
        else:
            yield _ok("gpu", _NO_NVIDIA_DRIVER)
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        yield _ok("gpu", f"{pynvml.nvmlDeviceGetCount()} NVIDIA GPU(s), driver {pynvml.nvmlSystemGetDriverVersion()}")
        if pynvml.nvmlDeviceGetCount():
            yield from _torch(machine, pynvml.nvmlSystemGetCudaDriverVersion_v2())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if not driver:
            yield _ok("gpu", _NO_NVIDIA_DRIVER)
            return
        fix = "restart the computer after an update of the driver; in a container, pass the GPU through (--gpus all)"
        yield _problem("gpu", f"the NVIDIA driver does not answer: {error}", fix)


def _torch(machine: DoctorConfig, cuda: int) -> Iterator[CheckResult]:
    """Whether torch can use the GPUs of a driver for this CUDA version (12080 is 12.8). Within one major version a
    program may be newer than the driver (CUDA Compatibility, "Minor Version Compatibility")."""
    file = machine.torch_folder / "version.py" if machine.torch_folder else None
    if file is None or not file.exists():
        return
    built_for: str | None = runpy.run_path(str(file)).get("cuda")
    most = f"{cuda // 1000}.{cuda % 1000 // 10}"
    if built_for is None:
        fix = f"install a torch for CUDA {most} or older: https://pytorch.org/get-started/locally"
        yield _advice("gpu", "torch was built without CUDA: learners use the processors", fix)
    elif int(built_for.partition(".")[0]) > cuda // 1000:
        fix = f"update the driver, or install a torch for CUDA {most}: https://pytorch.org/get-started/locally"
        yield _problem("gpu", f"torch was built for CUDA {built_for}; the driver supports {most} at most", fix)
    else:
        yield _ok("gpu", f"torch was built for CUDA {built_for}, which the driver supports")


_NO_NVIDIA_DRIVER = "no NVIDIA driver is loaded: this computer computes on its processors"


# A computer's built-in input devices belong to root, so they are advice.
_DEVICES: dict[str, tuple[tuple[str, ...], str, Callable[[str, str, str], CheckResult]]] = {
    "serial": (("ttyUSB*", "ttyACM*"), "motor buses", _problem),
    "video": (("video*",), "cameras", _problem),
    "input": (("input/event*", "hidraw*"), "gamepads and SpaceMice", _advice),
}


def _devices(machine: DoctorConfig) -> Iterator[CheckResult]:
    def names(paths: Sequence[Path]) -> str:
        return ", ".join(f"/{path.relative_to(machine.root)}" for path in paths)

    for check, (patterns, purpose, result) in _DEVICES.items():
        found = [path for pattern in patterns for path in sorted((machine.root / "dev").glob(pattern))][:MAX_DEVICES]
        refused: dict[str, list[Path]] = {}
        for path in found:
            if not machine.can_access(path):
                refused.setdefault(device_group(path), []).append(path)
        if not found:
            yield _ok(check, f"none is attached ({purpose})")
        elif not refused:
            yield _ok(check, f"{names(found)} are accessible")
        for group, paths in sorted(refused.items()):
            fix = UDEV_FIX if group == "root" else f"sudo usermod -aG {group} $USER, then log in again"
            yield result(check, f"{names(paths)} may not be used by this user ({purpose})", fix)


class _Timex(ctypes.Structure):
    """The first fields of struct timex, and padding for the rest; adjtimex(2)."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


def read_clock_sync() -> tuple[bool, float]:
    """Whether a time server synchronizes the kernel's clock, and its greatest error, s. Raises OSError."""
    timex, libc = _Timex(), ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return not timex.status & _STA_UNSYNC, timex.maxerror / 1e6


def _clock(_: DoctorConfig) -> Iterator[CheckResult]:
    fix = "synchronize it: sudo timedatectl set-ntp true, or install chrony"
    try:
        kept, error_s = read_clock_sync()
    except OSError as error:
        yield _advice("clock", f"the state of the clock is unknown: {error.strerror}", fix)
        return
    if kept and error_s <= MAX_CLOCK_ERROR_S:
        yield _ok("clock", f"synchronized by a time server, error at most {error_s * 1e3:.0f} ms")
    elif kept:
        yield _advice(
            "clock", f"synchronized by a time server, error up to {error_s * 1e3:.0f} ms", "wait a few minutes"
        )
    else:
        message = "no time server synchronizes the clock: times of robots on several computers will differ"
        yield _advice("clock", message, fix)


_CAP_IPC_LOCK, _CAP_SYS_NICE = 14, 23  # linux/capability.h


def _realtime(machine: DoctorConfig) -> Iterator[CheckResult]:
    for name, which, least, entry, capability, container in (
        ("real-time priority", resource.RLIMIT_RTPRIO, MIN_RTPRIO, f"rtprio {MIN_RTPRIO}", _CAP_SYS_NICE, "SYS_NICE"),
        ("locked memory", resource.RLIMIT_MEMLOCK, _UNLIMITED, "memlock unlimited", _CAP_IPC_LOCK, "IPC_LOCK"),
    ):
        limit, _ = resource.getrlimit(which)
        if _has_capability(machine, capability) or limit == _UNLIMITED or (least != _UNLIMITED and limit >= least):
            yield _ok("real time", f"{name} is allowed")
        else:
            fix = (
                f"add '@realtime - {entry}' to /etc/security/limits.d/realtime.conf, join that group, log in again; "
                f"in a container: --cap-add={container}"
            )
            yield _advice("real time", f"{name} is limited to {limit}; the control rate may vary under load", fix)
    governors = {path.read_text().strip() for path in (machine.root / "sys").glob(_GOVERNORS)}
    if "powersave" in governors:
        fix = "sudo cpupower frequency-set -g performance, while robots are in use"
        yield _advice("real time", "processors save power, so they wake up late", fix)


_GOVERNORS = "devices/system/cpu/cpu*/cpufreq/scaling_governor"


def _has_capability(machine: DoctorConfig, capability: int) -> bool:
    """Whether this process has the capability, which root in a container may lack."""
    status = machine.root / "proc/self/status"
    lines = status.read_text().splitlines() if status.exists() else []
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> capability & 1)


def _rendering(machine: DoctorConfig) -> Iterator[CheckResult]:
    """Renders in another process, since a broken graphics driver may end the process that loads it."""
    if not machine.render_command:
        yield _ok("rendering", "no installed simulation renders cameras")
        return
    try:
        done = subprocess.run(machine.render_command, capture_output=True, text=True, timeout=RENDER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield _problem("rendering", f"rendering without a screen took more than {RENDER_TIMEOUT_S:g} s", _EGL_FIX)
        return
    if done.returncode == 0:
        yield _ok("rendering", "simulated cameras render without a screen")
    else:
        words = done.stdout.splitlines()[:1] or done.stderr.splitlines()[-1:] or [f"status {done.returncode}"]
        yield _problem(
            "rendering", f"EGL is missing or broken, so simulated cameras cannot render: {words[0]}", _EGL_FIX
        )


_EGL_FIX = "on Debian or Ubuntu: sudo apt-get install libegl1 libegl-mesa0 libopengl0"


def _ports(machine: DoctorConfig) -> Iterator[CheckResult]:
    for purpose, port in machine.ports.items():
        if not 0 < port <= MAX_PORT:
            yield _problem("ports", f"port {port} is invalid ({purpose})", f"choose one from 1 to {MAX_PORT}")
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
            yield _ok("ports", f"port {port} is free ({purpose})")
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            yield _advice("ports", f"port {port} {why} ({purpose})", f"end what uses it (ss -ltnp 'sport = :{port}')")


def _disk(machine: DoctorConfig) -> Iterator[CheckResult]:
    folder = machine.runs_folder.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield _problem("disk", f"{existing} is not writable", "choose another folder with --runs")
    elif free < MIN_FREE_BYTES:
        yield _problem(
            "disk", f"{free / 1e9:.1f} GB are free in {existing}", "make room, or choose another with --runs"
        )
    else:
        yield _ok("disk", f"{free / 1e9:.0f} GB are free in {existing}")
    shared = machine.root / "dev/shm"
    if shared.exists() and shutil.disk_usage(shared).total < MIN_SHARED_BYTES:
        size = shutil.disk_usage(shared).total / 1e6
        yield _problem("disk", f"/dev/shm has {size:.0f} MB; Ray needs more", "in a container: --shm-size=1g")


def _machine_folder(machine: DoctorConfig) -> Iterator[CheckResult]:
    """The folder of locks and e-stops, and the folder of local sockets."""
    if (folder := tests_folder()) is not None:
        message = (
            f"{TEST_FOLDER_VARIABLE} is set: locks and e-stops are in {folder}, where other programs do not find them"
        )
        yield _problem("machine folder", message, f"unset {TEST_FOLDER_VARIABLE}, which is for tests")
    elif reason := machine_folder_problem():
        message = f"{reason}: simulated robots work, real ones are refused"
        result = _problem if machine.has_real_robots else _advice
        yield result("machine folder", message, f"{CREATE_COMMAND}; for one group only: {CREATE_GROUP_COMMAND}")
    elif _in_container() and MACHINE_FOLDER.stat().st_dev == Path("/").stat().st_dev:
        message = (
            f"this is a container, and {MACHINE_FOLDER} is its own: programs outside do not find its locks and e-stops"
        )
        yield _problem("machine folder", message, f"mount the computer's: -v {MACHINE_FOLDER}:{MACHINE_FOLDER}")
    else:
        yield _ok("machine folder", f"locks and e-stops of this computer's robots are in {MACHINE_FOLDER}")
    try:
        require_private_folder(runtime_folder())
    except FileNotFoundError:  # it is created when it is needed
        return
    except LeaseError as error:
        yield _problem("sockets", f"local sockets cannot be created: {error}", f"remove {runtime_folder()}")


def _in_container() -> bool:
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
