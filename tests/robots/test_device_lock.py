from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hal.errors import HardwareLost
from hal.spec import CameraSpec
from robots.cameras import CameraConfig, LocalCamera
from robots.device_lock import DeviceLock, camera_lock_name, device_lock_names


def test_links_to_one_device_share_its_lock(tmp_path: Path) -> None:
    port, link = tmp_path / "ttyACM0", tmp_path / "by-id"
    port.touch()
    link.symlink_to(port)
    first, second, other = DeviceLock(str(port)), DeviceLock(str(link)), DeviceLock("127.0.0.10")
    first.acquire()
    first.acquire()
    other.acquire()
    with pytest.raises(HardwareLost, match=f"{link} is already in use by pid"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    for lock in (second, other):
        lock.release()


def test_node_lock_holds_across_machine_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    node = os.ttyname(theirs)
    first, second = DeviceLock(node), DeviceLock(node)
    first.acquire()
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "another"))
    with pytest.raises(HardwareLost, match=f"{node} is already in use by a process that locked the device"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    for handle in (ours, theirs):
        os.close(handle)


def test_copied_node_shares_the_lock(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root makes nodes, as a container does")
    for name in ("a", "b"):
        os.mknod(tmp_path / name, 0o600 | stat.S_IFCHR, os.makedev(188, 7))
    first, second = DeviceLock(str(tmp_path / "a")), DeviceLock(str(tmp_path / "b"))
    first.acquire()
    with pytest.raises(HardwareLost, match="b is already in use"):
        second.acquire()
    first.release()


def test_test_process_refuses_real_address() -> None:
    with pytest.raises(HardwareLost, match="USER_SYS_TEST_FOLDER is set for simulated devices"):
        DeviceLock("192.168.0.10").acquire()
    for name in ("localhost", "127.0.0.1"):
        lock = DeviceLock(name)
        lock.acquire()
        lock.release()


def test_host_name_and_address_share_a_lock() -> None:
    named, numbered = DeviceLock("localhost"), DeviceLock("127.0.0.1")
    named.acquire()
    with pytest.raises(HardwareLost, match="127.0.0.1 is already in use"):
        numbered.acquire()
    named.release()


def test_empty_place_needs_no_lock() -> None:
    locks = [DeviceLock(""), DeviceLock("")]
    for lock in locks:
        lock.acquire()
        lock.release()


def test_several_devices_are_locked_all_or_none() -> None:
    camera, arm = DeviceLock("/dev/video61"), DeviceLock("/dev/ttyACM61", "/dev/video61")
    other = DeviceLock("/dev/ttyACM61")
    camera.acquire()
    with pytest.raises(HardwareLost, match="/dev/video61 is already in use"):
        arm.acquire()
    other.acquire()
    for lock in (camera, other):
        lock.release()
    arm.acquire()
    arm.acquire()
    arm.release()


def test_camera_is_locked_once() -> None:
    numbered = LocalCamera(CameraSpec(name="top", height=48, width=64, rate_hz=30), CameraConfig(device=61))
    lock = DeviceLock(camera_lock_name("opencv", "/dev/video61"))
    lock.acquire()
    try:
        with pytest.raises(HardwareLost, match="/dev/video61 is already in use"):
            numbered.connect()
    finally:
        lock.release()
        numbered.close()
    assert (camera_lock_name("opencv", "http://10.0.0.9/stream.mjpg"), camera_lock_name("realsense", "")) == ("", "")


def test_devices_in_plugin_settings_are_found() -> None:
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
