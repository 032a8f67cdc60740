"""Devices are locked once, a library that hangs blocks no caller, and capture times follow a device's clock."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.errors import HalError, HardwareLost
from hal.spec import CameraSpec
from robots.cameras import CameraConfig, LocalCamera
from robots.device import DeviceClock, DeviceLock, DeviceThread
from robots.lerobot_plugins import device_lock_names

DEADLINE_S = 60.0
MS = 1_000_000


def test_links_to_one_device_share_its_lock(tmp_path: Path) -> None:
    port, link = tmp_path / "ttyACM0", tmp_path / "by-id"
    port.touch()
    link.symlink_to(port)
    first, second, other = DeviceLock(str(port)), DeviceLock(str(link)), DeviceLock("127.0.0.10", "")
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


def test_host_name_and_address_share_a_lock_and_tests_refuse_real_ones() -> None:
    named, numbered = DeviceLock("localhost"), DeviceLock("127.0.0.1")
    named.acquire()
    with pytest.raises(HardwareLost, match="127.0.0.1 is already in use"):
        numbered.acquire()
    named.release()
    with pytest.raises(HardwareLost, match="USER_SYS_TEST_FOLDER is set for simulated devices"):
        DeviceLock("192.168.0.10").acquire()


def test_several_devices_are_locked_all_or_none() -> None:
    camera = LocalCamera(CameraSpec(name="top", height=48, width=64, rate_hz=30), CameraConfig(device=61))
    video, arm, other = (
        DeviceLock("/dev/video61"),
        DeviceLock("/dev/ttyACM61", "/dev/video61"),
        DeviceLock("/dev/ttyACM61"),
    )
    video.acquire()
    for refused in (arm.acquire, camera.connect):
        with pytest.raises(HardwareLost, match="/dev/video61 is already in use"):
            refused()
    other.acquire()
    for lock in (video, other):
        lock.release()
    arm.acquire()
    arm.release()


def test_ports_in_plugin_settings_are_found() -> None:
    settings = {"left_arm_port": "/dev/ttyACM1", "id": "left", "port": 5555, "gripper": {"device": "/dev/ttyUSB0"}}
    assert list(device_lock_names(settings)) == ["/dev/ttyACM1", "/dev/ttyUSB0"]


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_check_stop_abandons_the_device(let_go: threading.Event) -> None:
    thread, asked = DeviceThread("arm"), [0]

    def check_stop() -> None:
        asked[0] += 1
        if asked[0] == 3:
            raise HalError("the driver is to end")

    with pytest.raises(HalError, match="the driver is to end"):
        thread.call("connecting", lambda: let_go.wait(DEADLINE_S), DEADLINE_S, check_stop)
    with pytest.raises(HardwareLost, match="arm has hung since connecting"):
        thread.call("disconnecting", lambda: None, DEADLINE_S)
    thread.close()


def test_last_calls_run_once_an_abandoned_call_returns(let_go: threading.Event) -> None:
    thread, ended = DeviceThread("arm"), threading.Event()
    with pytest.raises(HardwareLost, match="reading took longer"):
        thread.call("reading", lambda: let_go.wait(DEADLINE_S), 0.01)
    thread.close(lambda: 1 // 0, ended.set)
    assert not ended.wait(0.1)
    let_go.set()
    assert ended.wait(DEADLINE_S)


def test_call_returns_raises_or_times_out(let_go: threading.Event) -> None:
    thread = DeviceThread("arm")
    assert thread.call("connecting", lambda: let_go.wait(0.2), DEADLINE_S, lambda: None) is False
    with pytest.raises(HardwareLost, match="connecting failed: ZeroDivisionError"):
        thread.call("connecting", lambda: 1 // 0, DEADLINE_S)
    with pytest.raises(HardwareLost, match="connecting took longer than 0.1 s"):
        thread.call("connecting", lambda: let_go.wait(DEADLINE_S), 0.1)
    thread.close()


def test_capture_times_follow_device_clock() -> None:
    clock, started_ns = DeviceClock(), 10_000 * MS
    assert clock.captured_ns(5 * MS, started_ns) == started_ns
    assert clock.captured_ns(15 * MS, started_ns + 40 * MS) == started_ns + 10 * MS, "30 ms longer on its way"
    assert clock.captured_ns(15 * MS, started_ns + 90 * MS) == started_ns + 10 * MS, "the same reading, again"
    assert clock.captured_ns(160 * MS, started_ns + 142 * MS) == started_ns + 142 * MS, "quicker than any before"


@pytest.mark.parametrize("drift", [-1e-4, 1e-4])
def test_drift_of_device_clock_is_followed(drift: float) -> None:
    clock, started_ns, newest_ns = DeviceClock(), 10_000 * MS, 0
    for tenth in range(36_000):
        sent_ns = tenth * 100 * MS
        now_ns = started_ns + sent_ns + (2 + 5 * (tenth % 3)) * MS  # the delay
        captured_ns = clock.captured_ns(1 + round(sent_ns * (1 + drift)), now_ns)
        assert newest_ns <= captured_ns <= now_ns and captured_ns > now_ns - 20 * MS
        newest_ns = captured_ns
