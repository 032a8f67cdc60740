"""The folder of this computer that holds its robots' locks, fencing tokens and e-stop latches.

The folder is `MACHINE_FOLDER`. An administrator creates it once (`CREATE_COMMAND`, or `CREATE_GROUP_COMMAND` for the
members of one group). No setting names another folder, so services, shells, all users and containers that mount it find
the same files. Without it, real robots are refused.

A simulated robot belongs to the user who started it. Its files carry the user's id. They are in `MACHINE_FOLDER`, or
without it in the system's folder for locks.

Tests set the variable `TEST_FOLDER_VARIABLE`. The process then logs a warning, `doctor` reports a problem, and devices
refuse it unless they are simulated (`robots.device`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hal.errors import LeaseError, SpecError

logger = logging.getLogger(__name__)

MACHINE_FOLDER = Path("/var/lib/user-sys")
CREATE_COMMAND = f"sudo install -d -m 1777 {MACHINE_FOLDER}"
CREATE_GROUP_COMMAND = f"sudo install -d -m 3770 -g GROUP {MACHINE_FOLDER}"
TEST_FOLDER_VARIABLE = "USER_SYS_TEST_FOLDER"
MAX_NAME_CHARS = 128
FILE_LOCK_TIMEOUT_S = 0.2

_SYSTEM_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_STICKY_WORLD_WRITABLE = stat.S_ISVTX | stat.S_IWOTH
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_SIMULATED = re.compile(r"([0-9]+)\.([A-Za-z0-9_-]+)")  # user id and name
_REAL = re.compile(r"[A-Za-z0-9_-]+")
_OPEN_TRIES = 5
_RETRY_INTERVAL_S = 0.005


@dataclass(frozen=True)
class RobotFiles:
    """The paths of one robot's files.

    Attributes:
        name: of the robot.
        stem: their common path without suffix.
        uid: the user who simulates it; None for a real robot, which all users share.
    """

    name: str
    stem: Path
    uid: int | None

    @property
    def lock_path(self) -> Path:
        return Path(f"{self.stem}.lock")

    @property
    def fence_path(self) -> Path:
        return Path(f"{self.stem}.fence")

    @property
    def latch_path(self) -> Path:
        return Path(f"{self.stem}.stop")

    @property
    def is_known(self) -> bool:
        """Whether the robot was driven or stopped on this computer."""
        return self.lock_path.exists() or self.latch_path.exists()


def robot_files(name: str, *, simulated: bool) -> RobotFiles:
    """The files of robot `name`.

    Raises:
        SpecError: not a robot's name.
        LeaseError: the robot is real, and this computer has no usable `MACHINE_FOLDER`.
    """
    require_robot_name(name)
    if simulated:
        return RobotFiles(name, shared_file(f"{os.getuid()}.{name}"), os.getuid())
    return RobotFiles(name, find_machine_folder() / name, None)


def known_robot_files() -> list[RobotFiles]:
    """The robots with files that this user can see, by name: real ones, and simulated ones of all users."""
    folder, prefix = _shared_folder()
    found: dict[str, RobotFiles] = {}
    for path in [*folder.glob(f"{prefix}*.lock"), *folder.glob(f"{prefix}*.stop")]:
        key = path.stem.removeprefix(prefix)
        stem = folder / (prefix + key)
        if simulated := _SIMULATED.fullmatch(key):
            found[key] = RobotFiles(simulated[2], stem, int(simulated[1]))
        elif not prefix and _REAL.fullmatch(key):
            found[key] = RobotFiles(key, stem, None)
    return [found[key] for key in sorted(found)]


def require_robot_name(name: str) -> None:
    """Raises SpecError unless `name` is a valid robot name."""
    if not _NAME.fullmatch(name):
        raise SpecError(f"{name[:80]!r} is not a robot's name: use letters, digits, '.', '_' and '-'")


def find_machine_folder() -> Path:
    """`MACHINE_FOLDER`, or the folder of the tests.

    Raises:
        LeaseError: it is missing or not usable; the message has the command that creates it.
    """
    if (chosen := tests_folder()) is not None:
        return chosen
    if reason := machine_folder_problem():
        raise LeaseError(f"{reason}. It holds the locks and e-stops of real robots. Create it: {CREATE_COMMAND}")
    return MACHINE_FOLDER


def machine_folder_problem() -> str:
    """Why this user cannot use `MACHINE_FOLDER`; empty if it is usable."""
    try:
        found = MACHINE_FOLDER.lstat()
    except FileNotFoundError:
        return f"{MACHINE_FOLDER} is missing"
    except OSError as error:
        return f"{MACHINE_FOLDER} cannot be read ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{MACHINE_FOLDER} is not a folder"
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        return f"in {MACHINE_FOLDER} each user can remove the files of others (mode {stat.S_IMODE(found.st_mode):04o})"
    if not os.access(MACHINE_FOLDER, os.R_OK | os.W_OK | os.X_OK):
        return f"{MACHINE_FOLDER} is not writable for this user (join its group) or is mounted read-only"
    return ""


def tests_folder() -> Path | None:
    """The folder in `TEST_FOLDER_VARIABLE`, created if it is missing; None outside of tests."""
    chosen = os.environ.get(TEST_FOLDER_VARIABLE)
    if not chosen:
        return None
    folder = Path(chosen)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def runtime_folder() -> Path:
    """The path of this user's private folder for sockets; `make_runtime_folder` creates it."""
    return tests_folder() or shared_file(str(os.getuid()))


def make_runtime_folder() -> Path:
    """Creates `runtime_folder`, which other users can neither read nor write.

    Raises:
        LeaseError: the path belongs to another user.
    """
    folder = runtime_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    require_private_folder(folder)
    return folder


def require_private_folder(folder: Path) -> None:
    """Raises LeaseError unless `folder` is a folder that only this user may write."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise LeaseError(f"{folder} must be a folder that only user {os.getuid()} may write: remove it")


def shared_file(name: str) -> Path:
    """The path of a file that all users of this computer share under `name`; not for real robots (`robot_files`)."""
    folder, prefix = _shared_folder()
    return folder / (prefix + name)


def _shared_folder() -> tuple[Path, str]:
    """The folder, and the prefix of its files' names."""
    if (chosen := tests_folder()) is not None:
        return chosen, ""
    if not machine_folder_problem():
        return MACHINE_FOLDER, ""
    for folder in _SYSTEM_FOLDERS:
        if (
            folder.is_dir()
            and folder.stat().st_mode & _STICKY_WORLD_WRITABLE == _STICKY_WORLD_WRITABLE
            and os.access(folder, os.W_OK)
        ):
            return folder, "user-sys."
    raise LeaseError(f"locks and sockets need a folder that all users may write: create {_SYSTEM_FOLDERS[0]}")


def open_shared_file(path: Path, *, create: bool = True) -> int:
    """Opens a file that several users write; returns its descriptor.

    A new file has its folder's permissions without execution. An existing file is opened without O_CREAT, which Linux
    refuses for another user's file in a sticky folder (fs.protected_regular).

    Raises:
        FileNotFoundError: the file is missing and `create` is False.
        LeaseError: the path is a link, or not a plain file.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = _open_or_create(path, flags, create)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(handle)
        raise LeaseError(f"{path} must be a plain file with one name: remove it")
    return handle


def _open_or_create(path: Path, flags: int, create: bool) -> int:
    for left in reversed(range(_OPEN_TRIES)):
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if not create:
                raise
        except PermissionError:  # the process that created it may not have set its permissions yet
            if not left:
                raise
            time.sleep(_RETRY_INTERVAL_S)
            continue
        try:
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        os.fchmod(handle, 0o600 | (path.parent.stat().st_mode & 0o066))
        return handle
    raise LeaseError(f"{path} cannot be created: another process keeps removing it, or it is a dangling link")


@contextmanager
def open_locked(path: Path, *, timeout_s: float = FILE_LOCK_TIMEOUT_S) -> Iterator[tuple[int, bool]]:
    """Yields the descriptor of the shared file at `path`, and whether this process has locked it.

    The wait is limited to `timeout_s`, so that another user's lock cannot prevent an e-stop.
    """
    handle = open_shared_file(path)
    try:
        yield handle, try_lock(handle, timeout_s)
    finally:
        os.close(handle)


def try_lock(handle: int, timeout_s: float) -> bool:
    """Locks the file exclusively; False if another process keeps it locked for `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
        time.sleep(_RETRY_INTERVAL_S)


def overwrite(handle: int, content: bytes, size_bytes: int, *, sync: bool = True) -> None:
    """Writes `content` at the start of the file, padded with spaces to `size_bytes`.

    Other processes see it at once; with `sync` this blocks until it is synced. The file keeps its size, so that a full
    disk cannot refuse a later change.
    """
    assert len(content) <= size_bytes
    os.pwrite(handle, content.ljust(size_bytes), 0)
    if sync:
        os.fsync(handle)
