"""What keeps this computer from driving robots well, and how to mend it.

It looks only: it opens no device and changes nothing.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import enum
import errno
import grp
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

from hal.errors import LeaseError
from hal.machine import (
    COMMAND,
    FOLDER,
    GROUP_COMMAND,
    TEST_FOLDER,
    require_own,
    runtime_folder,
    test_folder,
    unfit,
)
from hal.station import installed_drivers, load_driver

MIN_FREE_BYTES = 5_000_000_000
MIN_SHARED_BYTES = 200_000_000  # Ray's object store lies there
MIN_RTPRIO = 20
MAX_PORT = 65535
MAX_CLOCK_ERROR_S = 0.05
MAX_DRAWING_S = 60.0
MAX_DEVICES = 64  # of one sort
_STA_UNSYNC = 0x40  # adjtimex(2)
_UNLIMITED = resource.RLIM_INFINITY


class Verdict(enum.StrEnum):
    """OK; ADVICE: it works, and could work better, or something optional is missing; PROBLEM: it does not work."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found. `mend` says what to do; empty where there is nothing to do."""

    check: str
    verdict: Verdict
    says: str
    mend: str = ""


@dataclass(frozen=True)
class Library:
    """A vendor's library: the module to import, what it is for, and how it is installed."""

    module: str
    purpose: str
    install: str


def installed_torch() -> Path | None:
    """The folder of the installed torch, which is not imported; None where there is none."""
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).parent


@dataclass(frozen=True)
class Machine:
    """Where to look.

    Attributes:
        root: of the file system; a test looks elsewhere.
        may_use: whether this user may read and write a device.
        folder: where runs are to be written.
        ports: to be listened on, by what for.
        libraries: of the drivers, optional each.
        torch: the folder of an installed torch; None where there is none.
        drawing: a command that tries to draw without a screen, for simulated cameras. It ends with status 0 if that
            works; otherwise it prints what is wrong. Empty: nothing is to be drawn here.
    """

    root: Path = Path("/")
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    folder: Path = Path(".")
    ports: Mapping[str, int] = field(default_factory=dict)
    libraries: Sequence[Library] = ()
    torch: Path | None = field(default_factory=installed_torch)
    drawing: Sequence[str] = ()


def examine(machine: Machine) -> Iterator[Finding]:
    """Every check, in the order in which a person would look. Takes a second or two."""
    checks = (_drivers, _libraries, _gpus, _devices, _cameras, _clock, _realtime, _drawing, _ports, _disk, _place)
    for check in checks:
        try:
            yield from check(machine)
        except OSError as error:  # as of a device that is pulled out just now
            yield _problem(check.__name__.strip("_"), f"it could not be looked at: {error}", "look again")


def _ok(check: str, says: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, says=says)


def _advice(check: str, says: str, mend: str) -> Finding:
    return Finding(check=check, verdict=Verdict.ADVICE, says=says, mend=mend)


def _problem(check: str, says: str, mend: str) -> Finding:
    return Finding(check=check, verdict=Verdict.PROBLEM, says=says, mend=mend)


def _drivers(_: Machine) -> Iterator[Finding]:
    for name in installed_drivers():
        try:
            load_driver(name)
            yield _ok("drivers", f"the installed driver {name} loads")
        except Exception as error:  # a foreign package may fail in any way
            yield _problem("drivers", str(error), "reinstall or update the package that brings it")


def _libraries(machine: Machine) -> Iterator[Finding]:
    for library in machine.libraries:
        if importlib.util.find_spec(library.module) is not None:
            yield _ok("libraries", f"{library.module} is there, for {library.purpose}")
        else:
            says = f"{library.module} is not there; it is needed for {library.purpose}"
            yield _advice("libraries", says, library.install)


def _gpus(machine: Machine) -> Iterator[Finding]:
    """Also where the driver shows no file of its own, as under WSL, its library may answer."""
    driver = (machine.root / "proc/driver/nvidia/version").exists()
    if importlib.util.find_spec("pynvml") is None:
        if driver:
            yield _problem("gpu", "there is an NVIDIA driver, and nvidia-ml-py is missing", "pip install nvidia-ml-py")
        else:
            yield _ok("gpu", _NO_DRIVER)
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
            yield _ok("gpu", _NO_DRIVER)
            return
        mend = "restart the computer after an update of the driver; in a container, pass the GPU through (--gpus all)"
        yield _problem("gpu", f"the NVIDIA driver does not answer: {error}", mend)


def _torch(machine: Machine, cuda: int) -> Iterator[Finding]:
    """Whether torch can compute on the GPUs of a driver that speaks this CUDA, as 12080 is 12.8. Of one major version a
    program may be newer than the driver (CUDA Compatibility, "Minor Version Compatibility")."""
    file = machine.torch / "version.py" if machine.torch else None
    if file is None or not file.exists():
        return
    built_for: str | None = runpy.run_path(str(file)).get("cuda")
    most = f"{cuda // 1000}.{cuda % 1000 // 10}"
    if built_for is None:
        mend = f"install a torch for CUDA {most} or older: https://pytorch.org/get-started/locally"
        yield _advice("gpu", "torch was built without CUDA: what learns here does so on the processors", mend)
    elif int(built_for.partition(".")[0]) > cuda // 1000:
        mend = f"update the driver, or install a torch for CUDA {most}: https://pytorch.org/get-started/locally"
        yield _problem("gpu", f"torch was built for CUDA {built_for}, and the driver speaks {most} at most", mend)
    else:
        yield _ok("gpu", f"torch was built for CUDA {built_for}, which the driver speaks")


_NO_DRIVER = "no NVIDIA driver is loaded: this computer computes on its processors"


_DEVICES = {
    "serial": (("ttyUSB*", "ttyACM*"), "motor buses", _problem),
    "video": (("video*",), "cameras", _problem),
    "input": (("input/event*", "hidraw*"), "keyboards, gamepads and SpaceMice", _advice),  # a desk's own are root's
}


def _devices(machine: Machine) -> Iterator[Finding]:
    for check, (patterns, purpose, tell) in _DEVICES.items():
        found = [path for pattern in patterns for path in sorted((machine.root / "dev").glob(pattern))][:MAX_DEVICES]
        refused = [path for path in found if not machine.may_use(path)]
        if not found:
            yield _ok(check, f"none is attached ({purpose})")
        elif not refused:
            yield _ok(check, f"{_names(machine, found)} may be used")
        for group in sorted({_group(path) for path in refused}):
            mine = [path for path in refused if _group(path) == group]
            yield tell(check, f"{_names(machine, mine)} may not be used by you ({purpose})", _permit(group))


def _names(machine: Machine, paths: Sequence[Path]) -> str:
    return ", ".join(f"/{path.relative_to(machine.root)}" for path in paths)


def _group(path: Path) -> str:
    gid = path.stat().st_gid
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _permit(group: str) -> str:
    if group == "root":
        return 'let the person at the desk use it with a udev rule, such as KERNEL=="hidraw*", TAG+="uaccess"'
    return f"sudo usermod -aG {group} $USER, then log in again"


def _cameras(machine: Machine) -> Iterator[Finding]:
    names = sorted((machine.root / "sys/class/video4linux").glob("video*/name"))
    cameras = [f"/dev/{path.parent.name} ({path.read_text(errors='replace').strip()})" for path in names[:MAX_DEVICES]]
    yield _ok("cameras", ", ".join(cameras) or "the kernel knows no camera (V4L2)")
    for path in names[:MAX_DEVICES]:
        if not (machine.root / "dev" / path.parent.name).exists():
            says = f"the kernel knows {path.parent.name}, and /dev/{path.parent.name} is missing"
            yield _problem("cameras", says, f"in a container, pass it through: --device /dev/{path.parent.name}")


class _Timex(ctypes.Structure):
    """The head of struct timex, and room for the rest; adjtimex(2)."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


def read_clock() -> tuple[bool, float]:
    """Whether the kernel's clock is kept by a time server, and its greatest error, s. Raises OSError."""
    timex, libc = _Timex(), ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return not timex.status & _STA_UNSYNC, timex.maxerror / 1e6


def _clock(_: Machine) -> Iterator[Finding]:
    mend = "let a time server keep it: sudo timedatectl set-ntp true, or install chrony"
    try:
        kept, error_s = read_clock()
    except OSError as error:
        yield _advice("clock", f"whether a time server keeps the clock is not known: {error.strerror}", mend)
        return
    if kept and error_s <= MAX_CLOCK_ERROR_S:
        yield _ok("clock", f"kept by a time server, at most {error_s * 1e3:.0f} ms off")
    elif kept:
        yield _advice("clock", f"kept by a time server, and up to {error_s * 1e3:.0f} ms off", "give it a few minutes")
    else:
        says = "no time server keeps the clock: times of robots at several computers will not agree"
        yield _advice("clock", says, mend)


_CAP_IPC_LOCK, _CAP_SYS_NICE = 14, 23  # linux/capability.h


def _realtime(machine: Machine) -> Iterator[Finding]:
    for name, which, least, entry, capability, container in (
        ("real-time priority", resource.RLIMIT_RTPRIO, MIN_RTPRIO, f"rtprio {MIN_RTPRIO}", _CAP_SYS_NICE, "SYS_NICE"),
        ("locked memory", resource.RLIMIT_MEMLOCK, _UNLIMITED, "memlock unlimited", _CAP_IPC_LOCK, "IPC_LOCK"),
    ):
        limit, _ = resource.getrlimit(which)
        if _capable(machine, capability) or limit == _UNLIMITED or (least != _UNLIMITED and limit >= least):
            yield _ok("real time", f"{name} may be claimed")
        else:
            mend = (
                f"add '@realtime - {entry}' to /etc/security/limits.d/realtime.conf, join that group, log in again; "
                f"in a container: --cap-add={container}"
            )
            yield _advice("real time", f"{name} is limited to {limit}; the control rate may waver under load", mend)
    governors = {path.read_text().strip() for path in (machine.root / "sys").glob(_GOVERNORS)}
    if "powersave" in governors:
        mend = "sudo cpupower frequency-set -g performance, while robots work"
        yield _advice("real time", "processors save power, and wake up late", mend)


_GOVERNORS = "devices/system/cpu/cpu*/cpufreq/scaling_governor"


def _capable(machine: Machine, capability: int) -> bool:
    """Whether this process has it: the root of a container may not."""
    status = machine.root / "proc/self/status"
    lines = status.read_text().splitlines() if status.exists() else []
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> capability & 1)


def _drawing(machine: Machine) -> Iterator[Finding]:
    """A process of its own tries: a graphics driver that is broken may end the process that loads it."""
    if not machine.drawing:
        yield _ok("drawing", "no simulated robots are installed whose cameras would be drawn")
        return
    try:
        done = subprocess.run(machine.drawing, capture_output=True, text=True, timeout=MAX_DRAWING_S)
    except subprocess.TimeoutExpired:
        yield _problem("drawing", f"drawing without a screen was not over after {MAX_DRAWING_S:g} s", _EGL_MEND)
        return
    if done.returncode == 0:
        yield _ok("drawing", "simulated cameras can be drawn without a screen")
    else:
        words = done.stdout.splitlines()[:1] or done.stderr.splitlines()[-1:] or [f"status {done.returncode}"]
        yield _problem(
            "drawing", f"EGL is missing or broken, so no simulated camera can be drawn: {words[0]}", _EGL_MEND
        )


_EGL_MEND = "on Debian or Ubuntu: sudo apt-get install libegl1 libegl-mesa0"


def _ports(machine: Machine) -> Iterator[Finding]:
    for purpose, port in machine.ports.items():
        if not 0 < port <= MAX_PORT:
            yield _problem("ports", f"there is no port {port} ({purpose})", f"choose one from 1 to {MAX_PORT}")
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
            yield _ok("ports", f"port {port} is free ({purpose})")
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
            yield _advice("ports", f"port {port} {why} ({purpose})", f"end what uses it (ss -ltnp 'sport = :{port}')")


def _disk(machine: Machine) -> Iterator[Finding]:
    folder = machine.folder.resolve()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        yield _problem("disk", f"{there} may not be written", "choose another folder with --runs")
    elif free < MIN_FREE_BYTES:
        yield _problem("disk", f"{free / 1e9:.1f} GB are free in {there}", "make room, or choose another with --runs")
    else:
        yield _ok("disk", f"{free / 1e9:.0f} GB are free in {there}")
    shared = machine.root / "dev/shm"
    if shared.exists() and shutil.disk_usage(shared).total < MIN_SHARED_BYTES:
        size = shutil.disk_usage(shared).total / 1e6
        yield _problem("disk", f"/dev/shm has {size:.0f} MB; Ray needs more", "in a container: --shm-size=1g")


def _place(_: Machine) -> Iterator[Finding]:
    """Where locks and e-stops of this computer's robots are kept."""
    if (folder := test_folder()) is not None:
        says = f"{TEST_FOLDER} is set: locks and e-stops lie in {folder}, where nothing else finds them"
        yield _problem("place", says, f"unset {TEST_FOLDER}, which is for tests")
    elif reason := unfit():
        says = f"{reason}: simulated robots work, real ones are refused"
        yield _advice("place", says, f"{COMMAND}; for one group only: {GROUP_COMMAND}")
    elif _in_container() and FOLDER.stat().st_dev == Path("/").stat().st_dev:
        says = f"this is a container, and {FOLDER} is its own: programs outside do not find its locks and e-stops"
        yield _problem("place", says, f"mount the computer's: -v {FOLDER}:{FOLDER}")
    else:
        yield _ok("place", f"locks and e-stops of this computer's robots are kept in {FOLDER}")
    try:
        require_own(runtime_folder())
    except FileNotFoundError:  # it is made when it is needed
        return
    except LeaseError as error:
        yield _problem("sockets", f"local sockets cannot be made: {error}", f"remove {runtime_folder()}")


def _in_container() -> bool:
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
