"""One process to a device, whatever the robots are called that have its port or address in their options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hal.errors import HardwareLost, LeaseHeld
from hal.lease import DEVICE, MachineLock

_UNFIT = re.compile(r"[^A-Za-z0-9.-]+")
_MAX_CHARS = 100


class DeviceLock:
    """Keeps others off some devices, all of them or none, from `acquire` to `release` or the end of this process.
    `MachineLock` does the same for a robot's name; two names may have one arm, or one camera."""

    def __init__(self, *places: str) -> None:
        """`places`: devices' paths, of which links are followed, or addresses; an empty one is no device."""
        found = {os.path.realpath(place) if place.startswith("/") else place: place for place in places if place}
        self._locks = [
            (place, MachineLock(f"{DEVICE}{_UNFIT.sub('_', where)[-_MAX_CHARS:]}")) for where, place in found.items()
        ]

    def acquire(self) -> None:
        """Harmless where this object has them. Raises HardwareLost: another process, or another part of this one, has
        one of them; none is taken then."""
        for place, lock in self._locks:
            try:
                lock.acquire()
            except LeaseHeld:
                self.release()
                owner = lock.owner() or "another process"
                raise HardwareLost(f"{place} is in use already, on this machine by {owner}") from None

    def release(self) -> None:
        """Harmless where they are not taken."""
        for _, lock in self._locks:
            lock.release()


def camera_place(kind: str, device: str | int) -> str:
    """Where a camera is, for a `DeviceLock`; empty for a stream, which many may read, and where nobody says it."""
    if kind == "realsense":
        return f"realsense-{device}" if device != "" else ""
    return f"/dev/video{device}" if isinstance(device, int) else device if device.startswith("/dev/") else ""


def devices_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """The devices that the settings of a LeRobot plugin name, however deep: what they call a port (``left_arm_port``
    too; a number is one of a network), paths below ``/dev``, and cameras by number or serial number."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from devices_in(value)
        elif name == "serial_number_or_name":
            yield camera_place("realsense", value)
        elif name == "index_or_path":
            yield camera_place("opencv", value)
        elif isinstance(value, str) and (name.endswith("port") or value.startswith("/dev/")):
            yield value
