from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hal.errors import HardwareLost
from hal.spec import CameraSpec
from robots.cameras import CameraConfig, LocalCamera
from robots.device_lock import DeviceLock, camera_lock_name, device_lock_names


def test_one_device_is_had_once_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    port, link = tmp_path / "ttyACM0", tmp_path / "by-id"
    port.touch()
    link.symlink_to(port)
    first, second, other = DeviceLock(str(port)), DeviceLock(str(link)), DeviceLock("127.0.0.10")
    first.acquire()
    first.acquire()
    other.acquire()
    with pytest.raises(HardwareLost, match=f"{link} is in use already, on this machine by pid"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    for lock in (second, other):
        lock.release()


def test_a_device_is_had_once_by_programs_that_keep_their_locks_in_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    node = os.ttyname(theirs)
    first, second = DeviceLock(node), DeviceLock(node)
    first.acquire()
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "another"))
    with pytest.raises(HardwareLost, match=f"{node} is in use already, by another process that locked the device"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    for handle in (ours, theirs):
        os.close(handle)


def test_a_device_and_a_copy_of_its_node_are_one(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root makes nodes, as a container does")
    for name in ("a", "b"):
        os.mknod(tmp_path / name, 0o600 | stat.S_IFCHR, os.makedev(188, 7))
    first, second = DeviceLock(str(tmp_path / "a")), DeviceLock(str(tmp_path / "b"))
    first.acquire()
    with pytest.raises(HardwareLost, match="b is in use already"):
        second.acquire()
    first.release()


def test_a_process_of_tests_reaches_no_real_controller() -> None:
    with pytest.raises(HardwareLost, match="USER_SYS_TEST_FOLDER is set, which is for simulated devices"):
        DeviceLock("192.168.0.10").acquire()
    for name in ("localhost", "127.0.0.1"):
        lock = DeviceLock(name)
        lock.acquire()
        lock.release()


def test_a_host_name_and_its_address_are_one_controller() -> None:
    named, numbered = DeviceLock("localhost"), DeviceLock("127.0.0.1")
    named.acquire()
    with pytest.raises(HardwareLost, match="127.0.0.1 is in use already"):
        numbered.acquire()
    named.release()


def test_a_robot_without_a_port_needs_no_lock() -> None:
    locks = [DeviceLock(""), DeviceLock("")]
    for lock in locks:
        lock.acquire()
        lock.release()


def test_of_several_devices_all_are_had_or_none() -> None:
    camera, arm = DeviceLock("/dev/video61"), DeviceLock("/dev/ttyACM61", "/dev/video61")
    other = DeviceLock("/dev/ttyACM61")
    camera.acquire()
    with pytest.raises(HardwareLost, match="/dev/video61 is in use already"):
        arm.acquire()
    other.acquire()
    for lock in (camera, other):
        lock.release()
    arm.acquire()
    arm.acquire()
    arm.release()


def test_two_names_do_not_have_one_camera() -> None:
    numbered = LocalCamera(CameraSpec(name="top", height=48, width=64, rate_hz=30), CameraConfig(device=61))
    lock = DeviceLock(camera_lock_name("opencv", "/dev/video61"))
    lock.acquire()
    try:
        with pytest.raises(HardwareLost, match="/dev/video61 is in use already"):
            numbered.connect()
    finally:
        lock.release()
        numbered.close()
    assert (camera_lock_name("opencv", "http://10.0.0.9/stream.mjpg"), camera_lock_name("realsense", "")) == ("", "")


def test_the_devices_that_a_plugins_settings_name() -> None:
    settings = {
        "left_arm_port": "/dev/ttyACM1",
        "id": "left",
        "port": 5555,
        "cameras": {
            "top": {"type": "opencv", "index_or_path": 2, "fps": 30},
            "wrist": {"type": "intelrealsense", "serial_number_or_name": "839112060123"},
        },
        "gripper": {"device": "/dev/ttyUSB0"},
    }
    assert list(device_lock_names(settings)) == [
        "/dev/ttyACM1",
        "/dev/video2",
        "realsense-839112060123",
        "/dev/ttyUSB0",
    ]
