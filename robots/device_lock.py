"""Lock a physical device (port, address, camera), so that two robot configs cannot open it at once."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from hal.errors import HardwareLost, LeaseHeld
from hal.lease import MachineLock
from hal.machine_folder import TEST_FOLDER_VARIABLE, shared_file, tests_folder

_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9.-]+")
_MAX_KEY_CHARS = 100
_LOCAL_PREFIXES = ("realsense-", "gamepad-", "ros2-")


class DeviceLock:
    """An exclusive lock on some devices, from `acquire` to `release` or the end of this process. All are locked, or
    none.

    `hal.lease.robot_lock` locks a robot's name; two names may share an arm or a camera.

    Of a device node, the node itself is locked, and its device number in the machine folder: a container that mounts
    the folder has another node. Of an address, the machine folder has the lock.
    """

    def __init__(self, *places: str) -> None:
        """`places`: device paths, whose links are followed, or addresses. Empty strings are ignored."""
        found = {os.path.realpath(place) if place.startswith("/") else place: place for place in places if place}
        self._places = found
        self._locks: list[MachineLock] = []
        self._nodes: list[int] = []

    def acquire(self) -> None:
        """Lock all devices. Does nothing if this object holds them.

        Raises:
            HardwareLost: another process or another object holds one of them, or a process of tests would open a real
                device. None stays locked.
        """
        if self._locks:
            return
        try:
            for key, place in self._places.items():
                self._lock_place(key, place)
        except BaseException:
            self.release()
            raise

    def _lock_place(self, key: str, place: str) -> None:
        lock = MachineLock(shared_file(f"device.{_lock_name(key)}.lock"), "", place)
        try:
            lock.acquire()
            self._locks.append(lock)
            if key.startswith("/"):
                self._lock_node(key)
        except LeaseHeld:
            raise HardwareLost(
                f"{place} is already in use by {lock.owner() or 'another process'} on this machine; stop that "
                "process first"
            ) from None
        except BlockingIOError:
            raise HardwareLost(
                f"{place} is already in use by a process that locked the device; stop that process first"
            ) from None

    def _lock_node(self, path: str) -> None:
        """Lock the node; a node that cannot be opened is skipped, because its driver reports the reason. Raises
        BlockingIOError."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return
        self._nodes.append(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Release all devices. Does nothing if none is locked."""
        for handle in self._nodes:
            os.close(handle)
        for lock in self._locks:
            lock.release()
        self._nodes.clear()
        self._locks.clear()


def _lock_name(key: str) -> str:
    """The file name of the lock: from the device number, or the resolved address. Raises HardwareLost."""
    if key.startswith("/"):
        with contextlib.suppress(OSError):
            found = os.stat(key)
            if stat.S_ISCHR(found.st_mode):
                return f"char-{os.major(found.st_rdev)}-{os.minor(found.st_rdev)}"
    elif not key.startswith(_LOCAL_PREFIXES):
        key = _resolve_address(key)
    return _UNSAFE_CHARACTERS.sub("_", key)[-_MAX_KEY_CHARS:]


def _resolve_address(host: str) -> str:
    """Resolve a host name to its IP address, if it has one. Raises HardwareLost in a process of tests for an address
    that is not loopback."""
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if tests_folder() is not None:
        try:
            simulated = ipaddress.ip_address(host).is_loopback
        except ValueError:
            simulated = False
        if not simulated:
            raise HardwareLost(
                f"{host} is not a loopback address, and {TEST_FOLDER_VARIABLE} is set for simulated devices; "
                "unset it to use real ones"
            )
    return host


def camera_lock_name(kind: str, device: str | int) -> str:
    """The name of a camera for a `DeviceLock`; empty for a stream, which several processes may read, or an unnamed
    camera."""
    if kind == "realsense":
        return f"realsense-{device}" if device != "" else ""
    return f"/dev/video{device}" if isinstance(device, int) else device if device.startswith("/dev/") else ""


def device_lock_names(settings: Mapping[str, Any]) -> Iterator[str]:
    """The devices in the settings of a LeRobot plugin, at any depth.

    Devices are: strings whose key ends in ``port`` (``left_arm_port`` too), paths below ``/dev``, and cameras by number
    or serial number. A numeric port is a network port and is skipped.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from device_lock_names(value)
        elif name == "serial_number_or_name":
            yield camera_lock_name("realsense", value)
        elif name == "index_or_path":
            yield camera_lock_name("opencv", value)
        elif isinstance(value, str) and (name.endswith("port") or value.startswith("/dev/")):
            yield value
