"""The learning system's errors, grouped by what the caller should do.

UserSysError
├── ConfigError                  change the configuration; the message names the key and the remedy
├── RunError                     mend the run folder or the machine (port, disk, EGL); no data was lost
│   └── DiskFull                 wait for disk space; no written data was lost
├── WireError                    discard: bytes that do not decode within their limits
├── StoreError                   stop and inspect: the store cannot be used as requested
│   ├── StoreLocked              another process writes this store; the message names it
│   ├── StoreCorrupt             a record is damaged; other records stay readable
│   ├── StoreRecordGone          retention or compaction has deleted the record
│   ├── StoreFull                the disk is full: free some space; no acknowledged data was lost
│   └── StoreVersionMismatch     another format version wrote it
├── DataSetError                 mend or replace the data set; the message names the file
├── TunnelError                  reconnect
│   ├── SessionRefused           do not retry: key, version or identity was refused; the message says which
│   └── LinkDown                 retry later: no peer within the deadline
├── PolicyUnavailable            hold the robot and retry: a remote policy gives no action now
└── AuthorityError               an illegal transition of control over a robot

Also how a program of ours ends: its exit status, and an immediate exit if nothing else ends it.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from pathlib import Path

EXIT_DEADLINE_S = 9.5
"""A program that drives robots has ended by then after the first signal."""
_PRINT_TIMEOUT_S = 0.2


class UserSysError(Exception):
    """Base of every error that this package raises on purpose; the command line prints it as one line."""


class ConfigError(UserSysError):
    """A configuration that cannot be used."""


class RunError(UserSysError):
    """The machine or the run folder does not allow the run."""


class DiskFull(RunError):
    """A disk has no space for the data to write.

    Attributes:
        path: a folder on that disk.
        needed_bytes, free_bytes: the bytes to write, and the free bytes of the disk.
    """

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(disk_full_message(path, needed_bytes, free_bytes))
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes


def disk_full_message(path: Path, needed_bytes: float, free_bytes: float) -> str:
    """The message to people about a full disk. With enough free bytes it lacks something else."""
    needed, free = needed_bytes / 1e6, free_bytes / 1e6
    other = "" if free_bytes < needed_bytes else ", but it has no free files (inodes), or a quota is used up"
    return f"waiting for disk space in {path}: needs {needed:.3g} MB, {free:.3g} MB free{other}"


class WireError(UserSysError):
    """Bytes from a peer or a file do not decode."""


class StoreError(UserSysError):
    """The store cannot be used as requested."""


class StoreLocked(StoreError):
    """Another process writes this store."""


class StoreCorrupt(StoreError):
    """A record is damaged."""


class StoreRecordGone(StoreError):
    """Retention or compaction has deleted the record."""


class StoreFull(StoreError):
    """The disk is full."""


class StoreVersionMismatch(StoreError):
    """Another format version wrote the store."""


class DataSetError(UserSysError):
    """A data set in a foreign format cannot be read, or cannot represent the data."""


class TunnelError(UserSysError):
    """The tunnel cannot deliver now."""


class SessionRefused(TunnelError):
    """The gateway refused the session for good."""


class LinkDown(TunnelError):
    """No peer answered within the deadline."""


class PolicyUnavailable(UserSysError):
    """A policy in another process gives no action now; the message is for the robot's operators."""


class AccountError(UserSysError):
    """A console's account, or a sign-in, was refused."""


class AuthorityError(UserSysError):
    """An illegal transition of control over a robot."""


class ExitStatus(enum.IntEnum):
    """The exit status of ``user-sys``. `NOT_REACHED`: the run ended normally, below its target."""

    REACHED = 0
    NOT_REACHED = 1
    FAILED = 2
    INTERRUPTED = 128 + 2  # what shells report for an end by SIGINT


def exit_now(text: str, status: int = ExitStatus.INTERRUPTED) -> None:
    """Ends this process without clean-up; any thread may call it. A blocked terminal delays it by 0.2 s at most."""
    printing = threading.Thread(target=_print_error, args=(text,), daemon=True)
    printing.start()
    printing.join(_PRINT_TIMEOUT_S)
    os._exit(status)


def _print_error(text: str) -> None:
    show_cursor = "\x1b[?25h\n" if sys.__stderr__ is not None and sys.__stderr__.isatty() else ""
    os.write(2, f"{show_cursor}user-sys: {text}\n".encode())
