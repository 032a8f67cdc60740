"""The latched e-stop of one robot, in a file: the latest press, and the driver that acknowledged it.

The file is written in place and never removed, since users who share it may not remove each other's files. A blank file
means armed. An unreadable file counts as a latched e-stop, since a write may have been cut short.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably, sync_folder
from hal.errors import LeaseError
from hal.machine_folder import open_locked, open_shared_file, overwrite

logger = logging.getLogger(__name__)

FILE_BYTES = 4096
MAX_TEXT_CHARS = 200  # each may take 6 bytes in JSON


class EmergencyStop(msgspec.Struct, frozen=True, kw_only=True):
    """A press of the e-stop: by whom, why and when.

    Attributes:
        presses: the number of presses since the latch was cleared.
        acknowledged: the driver that has stopped the robot for the newest press; empty before that.
    """

    by: str
    why: str
    unix_ns: int
    presses: int = 1
    acknowledged: str = ""

    def is_same_press(self, other: EmergencyStop) -> bool:
        """Whether both are the same press, with or without acknowledgement."""
        return (self.unix_ns, self.presses) == (other.unix_ns, other.presses)


def new_emergency_stop(by: str, why: str = "") -> EmergencyStop:
    """A press at the present time."""
    return EmergencyStop(by=by[:MAX_TEXT_CHARS], why=why[:MAX_TEXT_CHARS], unix_ns=time.time_ns())


class EstopLatch:
    """The latch in one file. Any thread and process may use it at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> EmergencyStop | None:
        """The latched press; None if the robot is armed. Takes microseconds. Never raises."""
        try:
            handle = open_shared_file(self.path, create=False)
        except FileNotFoundError:
            return None
        except (OSError, LeaseError) as error:
            return self._unreadable(error)
        try:
            return self._decode(os.pread(handle, FILE_BYTES, 0))
        except OSError as error:
            return self._unreadable(error)
        finally:
            os.close(handle)

    def press(self, stop: EmergencyStop) -> EmergencyStop:
        """Latches `stop` and returns the latched press: a second press keeps the first person and adds to `presses`.

        Blocks until the file is synced; drivers see the press before that.

        Raises:
            OSError, LeaseError: the file cannot be written.
        """
        new = not self.path.exists()
        if new:
            make_folder_durably(self.path.parent)  # not for a prepared file: its syncs would delay the press
        with open_locked(self.path) as (handle, _):
            latched = self._decode(os.pread(handle, FILE_BYTES, 0))
            if latched is not None:
                stop = msgspec.structs.replace(latched, presses=latched.presses + 1, acknowledged="")
            overwrite(handle, msgspec.json.encode(stop), FILE_BYTES)
        if new:
            sync_folder(self.path.parent)
        return stop

    def acknowledge(self, stop: EmergencyStop, driver: str) -> EmergencyStop:
        """Records that `driver` has stopped the robot for `stop`, unless a newer press is latched. Returns what `stop`
        is then.

        Raises:
            OSError, LeaseError: the file cannot be written.
        """
        with open_locked(self.path) as (handle, _):
            if self._decode(os.pread(handle, FILE_BYTES, 0)) == stop:
                stop = msgspec.structs.replace(stop, acknowledged=driver[:MAX_TEXT_CHARS])
                overwrite(handle, msgspec.json.encode(stop), FILE_BYTES, sync=False)
        return stop

    def clear(self, expected: EmergencyStop | None) -> bool:
        """Re-arms; harmless if nothing is latched. If another press than `expected` is latched, it returns False and
        keeps the latch.

        Blocks until the file is synced.

        Raises:
            OSError, LeaseError: the file cannot be written or stays locked by another process; the latch is kept.
        """
        if not self.path.exists():
            return True
        with open_locked(self.path, timeout_s=1.0) as (handle, alone):
            if not alone:
                raise LeaseError(f"{self.path} is locked by another process: try again")
            latched = self._decode(os.pread(handle, FILE_BYTES, 0))
            if latched is not None and (expected is None or not latched.is_same_press(expected)):
                return False
            overwrite(handle, b"", FILE_BYTES)
        return True

    def prepare(self) -> None:
        """Creates the file, armed and with the size of a press, so that a full disk cannot refuse a later press."""
        if not self.path.exists():
            make_folder_durably(self.path.parent)
            with open_locked(self.path) as (handle, _):
                if not os.pread(handle, 1, 0):
                    overwrite(handle, b"", FILE_BYTES)
            sync_folder(self.path.parent)  # `press` syncs it only for a file that is new

    def _decode(self, raw: bytes) -> EmergencyStop | None:
        if not raw.strip():
            return None
        try:
            return msgspec.json.decode(raw, type=EmergencyStop)
        except DECODE_ERRORS as error:
            return self._unreadable(error)

    def _unreadable(self, error: Exception) -> EmergencyStop:
        logger.debug("estop.latch_unreadable path=%s error=%s", self.path, error)
        return EmergencyStop(by="unknown", why=f"the latch in {self.path} cannot be read ({error})", unix_ns=0)
