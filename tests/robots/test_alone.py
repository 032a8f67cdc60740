from __future__ import annotations

from pathlib import Path

import pytest

from hal.errors import HardwareLost
from robots.alone import DeviceLock


def test_one_device_is_had_once_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    port, link = tmp_path / "ttyACM0", tmp_path / "by-id"
    port.touch()
    link.symlink_to(port)
    first, second, other = DeviceLock(str(port)), DeviceLock(str(link)), DeviceLock("192.168.0.10")
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


def test_a_robot_without_a_port_needs_no_lock() -> None:
    locks = [DeviceLock(""), DeviceLock("")]
    for lock in locks:
        lock.acquire()
        lock.release()
