"""One process to a device, whatever the robots are called that have its port or address in their options."""

from __future__ import annotations

import os
import re

from hal.errors import HardwareLost, LeaseHeld
from hal.lease import MachineLock

_UNFIT = re.compile(r"[^A-Za-z0-9.-]+")
_MAX_CHARS = 100


class DeviceLock:
    """Keeps other processes of this machine off the device at `place`, from `acquire` to `release` or this one's end.
    `MachineLock` does the same for a robot's name; two names may have one arm."""

    def __init__(self, place: str) -> None:
        """`place`: a device's path, of which links are followed, or an address; empty is no device, and no lock."""
        self._place = place
        where = os.path.realpath(place) if place.startswith("/") else place
        self._lock = MachineLock(f"at{_UNFIT.sub('_', where)[-_MAX_CHARS:]}") if place else None

    def acquire(self) -> None:
        """Harmless where this object has it. Raises HardwareLost: somebody else has it, of this process or another."""
        if self._lock is None:
            return
        try:
            self._lock.acquire()
        except LeaseHeld:
            owner = self._lock.owner() or "another process"
            raise HardwareLost(f"{self._place} is in use already, on this machine by {owner}") from None

    def release(self) -> None:
        """Harmless where it is not taken."""
        if self._lock is not None:
            self._lock.release()
