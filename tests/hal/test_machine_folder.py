"""The one place of a computer: no environment variable moves it, and what others put there is not trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hal import machine_folder
from hal.errors import LeaseError, LeaseHeld, SpecError
from hal.estop import EstopLatch, new_emergency_stop
from hal.lease import Fence, MachineLock, driven_robots, driver_process_of, robot_lock
from hal.machine_folder import find_machine_folder, known_robot_files, open_shared_file, robot_files, runtime_folder

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this computer, for this process, as the installation makes it for all users."""
    made = tmp_path / "lib"
    made.mkdir()
    made.chmod(0o1777)
    monkeypatch.delenv(machine_folder.TEST_FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(machine_folder, "MACHINE_FOLDER", made)
    return made


def in_another_process(code: str, folder: Path, uid: int | None = None, **environment: str) -> str:
    """What `code` prints in a process of this environment alone; it becomes user `uid` once it has imported."""
    become = "lambda: None" if uid is None else f"lambda: (os.setgid({uid}), os.setuid({uid}))"
    here = f"machine.FOLDER = Path({str(folder)!r}); become = {become}"
    code = f"import os; from pathlib import Path; from hal import machine; {here}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path), **environment}, capture_output=True
    )
    return (done.stdout + done.stderr).decode()


TAKE = "from hal.lease import robot_lock; become(); robot_lock('arm-0', simulated=False).acquire(); print('taken')"
STOP = (
    "from hal.estop import *; become(); Latch(machine.robot_place('arm-0', simulated=False).latch).press(press('ben'))"
)


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "USER_SYS_RUNTIME_DIR", "HOME", "TMPDIR"])
def test_a_process_with_another_environment_is_refused_the_robot(folder: Path, tmp_path: Path, variable: str) -> None:
    with robot_lock("arm-0", "runs/demo", simulated=False):
        said = in_another_process(TAKE, folder, **{variable: str(tmp_path / "elsewhere")})
        assert f"LeaseHeld: arm-0 is driven on this machine by pid {os.getpid()} of " in said
    assert in_another_process(TAKE, folder, **{variable: str(tmp_path / "elsewhere")}) == "taken\n"


def test_a_real_robot_is_refused_where_the_folder_is_missing_and_a_simulated_one_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rmdir()
    with pytest.raises(LeaseError, match="lib is missing.* Make it: sudo install -d -m 1777 "):
        robot_lock("arm-0", simulated=False)
    name = f"arm-{os.getpid()}"
    with robot_lock(name, simulated=True):
        assert driver_process_of(name)
    robot_files(name, simulated=True).lock_path.unlink()


def test_a_folder_in_which_each_user_can_remove_the_files_of_others_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(LeaseError, match=r"remove the files of others \(mode 0777\)"):
        find_machine_folder()


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o1777, 0o666), (0o3770, 0o660), (0o700, 0o600)])
def test_a_shared_file_is_open_to_those_to_whom_the_folder_is(folder: Path, of_folder: int, of_file: int) -> None:
    folder.chmod(of_folder)
    before = os.umask(0o077)
    try:
        os.close(open_shared_file(folder / "arm-0.lock"))
    finally:
        os.umask(before)
    assert (folder / "arm-0.lock").stat().st_mode & 0o777 == of_file


def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (folder / "link.lock").symlink_to(tmp_path / "precious")
    os.link(tmp_path / "precious", folder / "hard.lock")
    os.mkfifo(folder / "pipe.lock")
    for name in ("link", "hard", "pipe"):
        with pytest.raises(LeaseError):
            robot_lock(name, simulated=False).acquire()
    assert (tmp_path / "precious").read_text() == "kept"


def test_two_names_of_users_are_two_simulated_robots_and_one_real_one(folder: Path) -> None:
    with robot_lock("arm-0", simulated=True), robot_lock("arm-0", simulated=False):
        with pytest.raises(LeaseHeld):
            robot_lock("arm-0", simulated=False).acquire()
        MachineLock(folder / "4242.arm-0.lock").acquire()
        assert [(place.name, place.uid) for place in known_robot_files()] == [
            ("arm-0", os.getuid()),
            ("arm-0", 4242),
            ("arm-0", None),
        ]


def test_files_that_are_no_robots_are_no_robots(folder: Path) -> None:
    for name in ("device.char-188-0.lock", "chosen.0.arm-0.lock", "x.sock", "0.lock.d"):
        (folder / name).touch()
    assert known_robot_files() == [] and driven_robots() == []
    with pytest.raises(SpecError, match="is not a robot's name"):
        robot_files("../arm", simulated=False)


def test_a_lock_whose_file_is_removed_is_not_had_twice_without_notice(folder: Path) -> None:
    first = MachineLock(folder / "arm-0.lock")
    first.acquire()
    handle = os.open(folder / "arm-0.lock", os.O_RDONLY)
    (folder / "arm-0.lock").unlink()
    second = MachineLock(folder / "arm-0.lock")
    second.acquire()
    assert os.fstat(handle).st_nlink == 0 and second.is_held()
    os.close(handle)


def test_token_and_latch_survive_a_reboot_that_empties_the_temporary_folders(folder: Path) -> None:
    place = robot_files("arm-0", simulated=False)
    Fence(place.fence_path).check_token(7)
    EstopLatch(place.latch_path).press(new_emergency_stop("ada", "smoke"))
    assert place.fence_path.parent == place.latch_path.parent == folder
    assert Fence(place.fence_path).newest == 7 and EstopLatch(place.latch_path).read() is not None


def test_a_token_that_was_never_written_is_none(folder: Path) -> None:
    (folder / "arm-0.fence").touch()
    assert Fence(folder / "arm-0.fence").newest == 0


def test_the_sockets_of_a_user_lie_in_a_folder_of_his_own(folder: Path) -> None:
    made = machine_folder.make_runtime_folder()
    assert made == runtime_folder() == folder / str(os.getuid()) and made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with pytest.raises(LeaseError, match="that only user"):
        machine_folder.make_runtime_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_user_is_refused_the_robot_and_may_stop_it(folder: Path, tmp_path: Path) -> None:
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    tmp_path.chmod(0o755)
    with robot_lock("arm-0", "runs/demo", simulated=False):
        assert "LeaseHeld: arm-0 is driven on this machine by pid" in in_another_process(TAKE, folder, NOBODY)
        assert in_another_process(STOP, folder, NOBODY) == ""
    stands = EstopLatch(robot_files("arm-0", simulated=False).latch_path).read()
    assert stands is not None and stands.by == "ben"
    assert in_another_process(TAKE, folder, NOBODY) == "taken\n", "though root made the file"
