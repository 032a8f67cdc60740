"""The one place of a computer for what all programs share that drive its robots: locks, fencing tokens, e-stop latches.

The place is `MACHINE_FOLDER`. An administrator makes it once (`CREATE_COMMAND`, or `CREATE_GROUP_COMMAND` for the
members of one group), and it survives a reboot. No setting and no environment variable names another place, so a
service, a shell, another user and a container that mounts the folder all find the same files. Without the folder no
real robot is driven.

A simulated robot belongs to the user who started it. Its files carry the user's id, and lie in `MACHINE_FOLDER`, or
without that in a folder for locks that the system has for all users.

Tests set the variable `TEST_FOLDER_VARIABLE`. Such a process logs a warning, `doctor` reports a problem, and devices
refuse it unless they are simulated (`robots.device_lock`).
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
FILE_LOCK_TIMEOUT_S = 0.2  # for a change of a shared file

_SYSTEM_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_STICKY_WORLD_WRITABLE = stat.S_ISVTX | stat.S_IWOTH
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_SIMULATED = re.compile(r"([0-9]+)\.([A-Za-z0-9_-]+)")  # user id and name
_REAL = re.compile(r"[A-Za-z0-9_-]+")
_OPEN_TRIES = 5
_RETRY_INTERVAL_S = 0.005


@dataclass(frozen=True)
class RobotFiles:
    """Where the files of one robot lie.

    Attributes:
        name: of the robot.
        stem: their path without the suffix.
        uid: of the user who simulates it; None for a real robot, which all users share.
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
        """Whether it has been driven, or stopped, on this computer."""
        return self.lock_path.exists() or self.latch_path.exists()


def robot_files(name: str, *, simulated: bool) -> RobotFiles:
    """Where the files of robot `name` lie.

    Raises:
        SpecError: not a robot's name.
        LeaseError: the robot is real, and this computer has no `find_machine_folder`.
    """
    require_robot_name(name)
    if simulated:
        return RobotFiles(name, shared_file(f"{os.getuid()}.{name}"), os.getuid())
    return RobotFiles(name, find_machine_folder() / name, None)


def known_robot_files() -> list[RobotFiles]:
    """The robots whose files this user can see: real ones, and simulated ones of all users; in order of their names."""
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
    """Raises SpecError where `name` is not a robot's name."""
    if not _NAME.fullmatch(name):
        raise SpecError(f"{name[:80]!r} is not a robot's name (letters, digits, '.', '_', '-')")


def find_machine_folder() -> Path:
    """`MACHINE_FOLDER`; for tests, the folder that they name.

    Raises:
        LeaseError: it is missing, or not fit; says what mends that.
    """
    if (chosen := tests_folder()) is not None:
        return chosen
    if reason := machine_folder_problem():
        raise LeaseError(
            f"{reason}. Real robots need it: their locks and e-stops are kept there. Make it: {CREATE_COMMAND}"
        )
    return MACHINE_FOLDER


def machine_folder_problem() -> str:
    """Why `MACHINE_FOLDER` cannot be used by this user; empty if it can."""
    try:
        found = MACHINE_FOLDER.lstat()
    except FileNotFoundError:
        return f"{MACHINE_FOLDER} is missing"
    except OSError as error:
        return f"{MACHINE_FOLDER} cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{MACHINE_FOLDER} is not a folder"
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        return f"in {MACHINE_FOLDER} each user can remove the files of others (mode {stat.S_IMODE(found.st_mode):04o})"
    if not os.access(MACHINE_FOLDER, os.R_OK | os.W_OK | os.X_OK):
        return f"{MACHINE_FOLDER} is not open to this user (join its group), or is read-only here"
    return ""


def tests_folder() -> Path | None:
    """The folder that `TEST_FOLDER_VARIABLE` names, made if it is missing; None outside of tests."""
    chosen = os.environ.get(TEST_FOLDER_VARIABLE)
    if not chosen:
        return None
    folder = Path(chosen)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def runtime_folder() -> Path:
    """This user's own folder for sockets; `make_runtime_folder` makes it."""
    return tests_folder() or shared_file(str(os.getuid()))


def make_runtime_folder() -> Path:
    """Makes `runtime_folder`, which others can neither write nor read.

    Raises:
        LeaseError: another user has it.
    """
    folder = runtime_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    require_private_folder(folder)
    return folder


def require_private_folder(folder: Path) -> None:
    """Raises LeaseError unless `folder` is one that only this user may write."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise LeaseError(f"{folder} must be a folder that only user {os.getuid()} may write; remove what is there")


def shared_file(name: str) -> Path:
    """A path that all users of this computer find under `name`, real robots apart (`robot_files`)."""
    folder, prefix = _shared_folder()
    return folder / (prefix + name)


def _shared_folder() -> tuple[Path, str]:
    """The folder, and how names begin there."""
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
    raise LeaseError(f"locks and sockets need a folder that all users may write, such as {_SYSTEM_FOLDERS[0]}")


def open_shared_file(path: Path, *, create: bool = True) -> int:
    """Opens a file that several users write; returns its descriptor.

    A new file has the permissions of its folder, without the right to execute. An existing one is opened without
    O_CREAT, which Linux refuses for another user's file in a sticky folder (fs.protected_regular).

    Raises:
        FileNotFoundError: it is missing, and not to be created.
        LeaseError: it is a link, or not a plain file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = _open_or_create(path, flags, create)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(handle)
        raise LeaseError(f"{path} must be a plain file with one name; remove it")
    return handle


def _open_or_create(path: Path, flags: int, create: bool) -> int:
    for left in reversed(range(_OPEN_TRIES)):
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if not create:
                raise
        except PermissionError:  # its maker may be about to open it to others
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
    raise LeaseError(f"{path} is removed as fast as it is made, or is a link to nothing")


@contextmanager
def open_locked(path: Path, *, timeout_s: float = FILE_LOCK_TIMEOUT_S) -> Iterator[tuple[int, bool]]:
    """The descriptor of the shared file at `path`, and whether other writers are kept out meanwhile.

    It waits for `within_s` at most, so that no other user can keep an e-stop from being written.
    """
    handle = open_shared_file(path)
    try:
        yield handle, try_lock(handle, timeout_s)
    finally:
        os.close(handle)


def try_lock(handle: int, timeout_s: float) -> bool:
    """Whether this process has locked the file within this time."""
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
    """Puts `content` at the start of the file, filled up with spaces to `size_bytes`.

    Other processes see it at once; with `sync` it blocks until it is on the disk. The file keeps its size, so that a
    full disk does not refuse a later change.
    """
    assert len(content) <= size_bytes
    os.pwrite(handle, content.ljust(size_bytes), 0)
    if sync:
        os.fsync(handle)
