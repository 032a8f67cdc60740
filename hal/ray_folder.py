"""The folder of a Ray cluster that a program starts for itself.

Ray opens all that it makes to every user of the machine (mode 0777, without the sticky bit). Its folder lies in one
that only this user can enter. The program locks that folder for as long as it lives; the next start removes those that
killed programs left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

BASE = Path("/tmp")  # a socket's path has at most 107 bytes
PREFIX = "user-sys-cluster-"


class RayFolder:
    """A new folder, which only this user can enter. `path` is the part of it that is Ray's."""

    def __init__(self) -> None:
        """Removes what killed programs left, too. Raises OSError: there is no room."""
        _remove_left()
        while (handle := _locked(home := Path(tempfile.mkdtemp(prefix=PREFIX, dir=BASE)))) is None:
            pass
        self._home, self._handle = home, handle
        self.path = home / "r"

    def remove(self) -> None:
        """Calling it twice is harmless."""
        if self._handle >= 0:
            shutil.rmtree(self._home, ignore_errors=True)
            os.close(self._handle)
            self._handle = -1


def _locked(home: Path) -> int | None:
    """The handle that keeps the lock of a folder that was just made; None if another start took it for a leftover."""
    try:
        handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(handle, fcntl.LOCK_EX)
    if home.exists():
        return handle
    os.close(handle)
    return None


def _remove_left() -> None:
    """Removes this user's folders that no living process has locked."""
    for home in BASE.glob(f"{PREFIX}*"):
        try:
            handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone
            continue
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
