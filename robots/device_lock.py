"""One process to a device, whatever the robots are called that have its port or address in their options."""

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
    """Keeps others off some devices, all of them or none, from `acquire` to `release` or the end of this process.
    `hal.lease.robot_lock` does the same for a robot's name; two names may have one arm, or one camera.

    A device's node is locked itself, which no setting changes, and besides by its number in the computer's folder of
    locks: a container that mounts the folder has a node of its own. An address is locked in the folder.
    """

    def __init__(self, *places: str) -> None:
        """`places`: devices' paths, of which links are followed, or addresses; an empty one is no device."""
        found = {os.path.realpath(place) if place.startswith("/") else place: place for place in places if place}
        self._places = found
        self._taken: list[MachineLock] = []
        self._nodes: list[int] = []

    def acquire(self) -> None:
        """Harmless where this object has them. Raises HardwareLost: another process, or another part of this one, has
        one of them, or a process of tests would reach a real controller; none is taken then."""
        if self._taken:
            return
        try:
            for where, place in self._places.items():
                self._take(where, place)
        except BaseException:
            self.release()
            raise

    def _take(self, where: str, place: str) -> None:
        lock = MachineLock(shared_file(f"device.{_lock_key(where)}.lock"), "", place)
        try:
            lock.acquire()
            self._taken.append(lock)
            if where.startswith("/"):
                self._lock_node(where)
        except LeaseHeld:
            raise HardwareLost(
                f"{place} is in use already, on this machine by {lock.owner() or 'another process'}"
            ) from None
        except BlockingIOError:
            raise HardwareLost(f"{place} is in use already, by another process that locked the device") from None

    def _lock_node(self, path: str) -> None:
        """A node that cannot be opened is left to its driver, which says why. Raises BlockingIOError."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return
        self._nodes.append(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Harmless where they are not taken."""
        for handle in self._nodes:
            os.close(handle)
        for lock in self._taken:
            lock.release()
        self._nodes.clear()
        self._taken.clear()


def _lock_key(where: str) -> str:
    """The name of the lock: a node's number, or the address that a host name stands for. Raises HardwareLost."""
    if where.startswith("/"):
        with contextlib.suppress(OSError):
            found = os.stat(where)
            if stat.S_ISCHR(found.st_mode):
                return f"char-{os.major(found.st_rdev)}-{os.minor(found.st_rdev)}"
    elif not where.startswith(_LOCAL_PREFIXES):
        where = _resolve_address(where)
    return _UNSAFE_CHARACTERS.sub("_", where)[-_MAX_KEY_CHARS:]


def _resolve_address(host: str) -> str:
    """Its IP address, if it has one. Raises HardwareLost in a process of tests, unless it is this computer's own."""
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if tests_folder() is not None:
        try:
            simulated = ipaddress.ip_address(host).is_loopback
        except ValueError:
            simulated = False
        if not simulated:
            raise HardwareLost(
                f"{host} is not used: {TEST_FOLDER_VARIABLE} is set, which is for simulated devices; unset it"
            )
    return host


def camera_lock_name(kind: str, device: str | int) -> str:
    """Where a camera is, for a `DeviceLock`; empty for a stream, which many may read, and where nobody says it."""
    if kind == "realsense":
        return f"realsense-{device}" if device != "" else ""
    return f"/dev/video{device}" if isinstance(device, int) else device if device.startswith("/dev/") else ""


def device_lock_names(settings: Mapping[str, Any]) -> Iterator[str]:
    """The devices that the settings of a LeRobot plugin name, however deep: what they call a port (``left_arm_port``
    too; a number is one of a network), paths below ``/dev``, and cameras by number or serial number."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from device_lock_names(value)
        elif name == "serial_number_or_name":
            yield camera_lock_name("realsense", value)
        elif name == "index_or_path":
            yield camera_lock_name("opencv", value)
        elif isinstance(value, str) and (name.endswith("port") or value.startswith("/dev/")):
            yield value
