"""The machine folder, which no variable moves and whose foreign files are not trusted; and durable files."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hal import machine_folder
from hal.durable import make_folder_durably, remove_durably, replace_durably
from hal.errors import LeaseError, LeaseHeld, SpecError
from hal.estop import EstopLatch, new_emergency_stop
from hal.lease import Fence, MachineLock, driven_robots, driver_process_of, robot_lock
from hal.machine_folder import find_machine_folder, known_robot_files, open_shared_file, robot_files, runtime_folder

NOBODY = 65534
TAKE = "from hal.lease import robot_lock; become(); robot_lock('arm-0', simulated=False).acquire(); print('taken')"
STOP = (
    "from hal.estop import *; become(); files = machine_folder.robot_files('arm-0', simulated=False);"
    "EstopLatch(files.latch_path).press(new_emergency_stop('ben'))"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine folder for this process, with the permissions of an installation for all users."""
    made = tmp_path / "lib"
    made.mkdir()
    made.chmod(0o1777)
    monkeypatch.delenv(machine_folder.TEST_FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(machine_folder, "MACHINE_FOLDER", made)
    return made


def in_another_process(code: str, folder: Path, uid: int | None = None, **environment: str) -> str:
    """The output of `code` in a process with only this environment; `become()` changes to user `uid`."""
    become = "lambda: None" if uid is None else f"lambda: (os.setgid({uid}), os.setuid({uid}))"
    setting = f"machine_folder.MACHINE_FOLDER = Path({str(folder)!r}); become = {become}"
    code = f"import os; from pathlib import Path; from hal import machine_folder; {setting}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path), **environment}, capture_output=True
    )
    return (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "USER_SYS_RUNTIME_DIR", "HOME", "TMPDIR"])
def test_environment_variables_do_not_move_locks(folder: Path, tmp_path: Path, variable: str) -> None:
    with robot_lock("arm-0", "runs/demo", simulated=False):
        output = in_another_process(TAKE, folder, **{variable: str(tmp_path / "elsewhere")})
        assert f"LeaseHeld: arm-0 is driven on this machine by pid {os.getpid()} of " in output
    assert in_another_process(TAKE, folder, **{variable: str(tmp_path / "elsewhere")}) == "taken\n"


def test_missing_folder_refuses_real_robot_and_allows_simulated_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rmdir()
    with pytest.raises(LeaseError, match="lib is missing.* Create it: sudo install -d -m 1777 "):
        robot_lock("arm-0", simulated=False)
    name = f"arm-{os.getpid()}"
    with robot_lock(name, simulated=True):
        assert driver_process_of(name)
    robot_files(name, simulated=True).lock_path.unlink()


def test_folder_without_sticky_bit_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(LeaseError, match=r"remove the files of others \(mode 0777\)"):
        find_machine_folder()


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o1777, 0o666), (0o3770, 0o660), (0o700, 0o600)])
def test_shared_file_has_permissions_of_its_folder(folder: Path, of_folder: int, of_file: int) -> None:
    folder.chmod(of_folder)
    before = os.umask(0o077)
    try:
        os.close(open_shared_file(folder / "arm-0.lock"))
    finally:
        os.umask(before)
    assert (folder / "arm-0.lock").stat().st_mode & 0o777 == of_file


def test_links_and_pipes_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (folder / "link.lock").symlink_to(tmp_path / "precious")
    os.link(tmp_path / "precious", folder / "hard.lock")
    os.mkfifo(folder / "pipe.lock")
    for name in ("link", "hard", "pipe"):
        with pytest.raises(LeaseError):
            robot_lock(name, simulated=False).acquire()
    assert (tmp_path / "precious").read_text() == "kept"


def test_simulated_robots_of_two_users_and_real_robot_share_a_name(folder: Path) -> None:
    with robot_lock("arm-0", simulated=True), robot_lock("arm-0", simulated=False):
        with pytest.raises(LeaseHeld):
            robot_lock("arm-0", simulated=False).acquire()
        MachineLock(folder / "4242.arm-0.lock").acquire()
        assert [(files.name, files.uid) for files in known_robot_files()] == [
            ("arm-0", os.getuid()),
            ("arm-0", 4242),
            ("arm-0", None),
        ]


def test_other_files_are_not_listed_as_robots(folder: Path) -> None:
    for name in ("device.char-188-0.lock", "chosen.0.arm-0.lock", "chosen.arm-0.lock", "x.sock", "0.lock.d"):
        (folder / name).touch()
    assert known_robot_files() == [] and driven_robots() == []
    with pytest.raises(SpecError, match="is not a robot's name"):
        robot_files("../arm", simulated=False)


def test_removed_lock_file_is_replaced(folder: Path) -> None:
    first = MachineLock(folder / "arm-0.lock")
    first.acquire()
    handle = os.open(folder / "arm-0.lock", os.O_RDONLY)
    (folder / "arm-0.lock").unlink()
    second = MachineLock(folder / "arm-0.lock")
    second.acquire()
    assert os.fstat(handle).st_nlink == 0 and second.is_held()
    os.close(handle)


def test_token_and_latch_are_in_machine_folder(folder: Path) -> None:
    files = robot_files("arm-0", simulated=False)
    Fence(files.fence_path).check_token(7)
    EstopLatch(files.latch_path).press(new_emergency_stop("ada", "smoke"))
    assert files.fence_path.parent == files.latch_path.parent == folder
    assert Fence(files.fence_path).newest == 7 and EstopLatch(files.latch_path).read() is not None


def test_latch_of_a_new_robot_survives_a_power_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    latch = EstopLatch(robot_files("arm-0", simulated=False).latch_path)
    latch.prepare()
    latch.press(new_emergency_stop("ada"))
    assert synced == {str(folder.parent), str(folder), str(latch.path)}


def test_empty_fence_file_has_no_token(folder: Path) -> None:
    (folder / "arm-0.fence").touch()
    assert Fence(folder / "arm-0.fence").newest == 0


def test_runtime_folder_is_private(folder: Path) -> None:
    made = machine_folder.make_runtime_folder()
    assert made == runtime_folder() == folder / str(os.getuid()) and made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with pytest.raises(LeaseError, match="that only user"):
        machine_folder.make_runtime_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_other_user_cannot_lock_robot_and_can_stop_it(folder: Path, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.parent == parent or parent.stat().st_mode & 0o001:
            break
        parent.chmod(0o755)
    with robot_lock("arm-0", "runs/demo", simulated=False):
        assert "LeaseHeld: arm-0 is driven on this machine by pid" in in_another_process(TAKE, folder, NOBODY)
        assert in_another_process(STOP, folder, NOBODY) == ""
    latched = EstopLatch(robot_files("arm-0", simulated=False).latch_path).read()
    assert latched is not None and latched.by == "ben"
    assert in_another_process(TAKE, folder, NOBODY) == "taken\n", "though root made the file"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []
    really = os.fsync

    def fsync(handle: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{handle}"))
        really(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_new_file_is_synced_with_each_created_folder(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "runs" / "edge" / "latch.json"
    replace_durably(path, b"pressed")
    assert path.read_bytes() == b"pressed" and [each.name for each in path.parent.iterdir()] == ["latch.json"]
    (content,) = [each for each in synced if Path(each).name.startswith(".latch.json.")]
    folders = [each for each in synced if each != content]
    assert set(folders) == {str(tmp_path), str(tmp_path / "runs"), str(path.parent)} and synced[-1] == str(path.parent)
    synced.clear()
    replace_durably(path, b"again")
    assert synced[0] == str(path.parent.parent), "a killed process may have created the folder without a sync"
    assert synced[2:] == [str(path.parent)]
    remove_durably(path)
    assert synced[3:] == [str(path.parent)] and not path.exists()


def test_existing_folder_whose_parent_cannot_be_synced_is_accepted() -> None:
    make_folder_durably(Path("/proc/self"))


def test_failed_replacement_names_the_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "robot.yaml"
    replace_durably(path, b"old")

    def full(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        patch.setattr(os, "fsync", full)
        replace_durably(path, b"new")
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"old"
