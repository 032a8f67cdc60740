"""The learning system's errors, grouped by what the caller should do.

UserSysError
├── ConfigError        mend the configuration; the message names the key and the remedy
├── RunError           mend the run folder or the machine (port, disk, EGL); nothing was lost
│   └── DiskFull       wait for room: nothing that was written before is lost
├── WireError          discard: bytes that do not decode within their bounds
├── StoreError         stop and look: the durable log cannot be used as asked
│   ├── StoreLocked    another process writes this store; the message names it
│   ├── StoreCorrupt   a record is damaged; its neighbours stay readable
│   ├── StoreGone      the record was dropped by retention or compaction
│   ├── StoreFull      the disk is full: free some; nothing that was acknowledged is lost
│   └── StoreVersion   another format version wrote it
├── DataSetError       mend or replace the data set; the message names the file
├── TunnelError        reconnect
│   ├── Refused        do not retry: key, version or identity was refused; the message says which
│   └── LinkDown       retry later: no peer within the deadline
├── PolicyAway         hold the robot, and ask again: a policy that acts elsewhere gives no action now
└── AuthorityError     an illegal transition of control over a robot
"""

from __future__ import annotations

from pathlib import Path


class UserSysError(Exception):
    """Base of every error that this package raises on purpose; the command line prints it as one line."""


class ConfigError(UserSysError):
    """A configuration that cannot be used."""


class RunError(UserSysError):
    """The machine or the run folder does not allow the run."""


class DiskFull(RunError):
    """A disk has no room for what is to be written.

    Attributes:
        path: the folder on that disk.
        needed_bytes, free_bytes: for what is to be written; and what the disk has.
    """

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(disk_full_message(path, needed_bytes, free_bytes))
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes


def disk_full_message(path: Path, needed_bytes: float, free_bytes: float) -> str:
    """What people are told of a full disk."""
    needed, free = needed_bytes / 1e6, free_bytes / 1e6
    return f"waiting for disk space in {path}: needs {needed:.3g} MB, {free:.3g} MB free"


class WireError(UserSysError):
    """Bytes from a peer or a file that do not decode."""


class StoreError(UserSysError):
    """The durable log cannot be used as asked."""


class StoreLocked(StoreError):
    """Another process writes this store."""


class StoreCorrupt(StoreError):
    """A record is damaged."""


class StoreRecordGone(StoreError):
    """The record was dropped by retention or compaction: forget it."""


class StoreFull(StoreError):
    """The disk is full."""


class StoreVersionMismatch(StoreError):
    """The store was written in another format version."""


class DataSetError(UserSysError):
    """A data set in a foreign format cannot be read, or cannot hold what it should."""


class TunnelError(UserSysError):
    """The tunnel cannot deliver now."""


class SessionRefused(TunnelError):
    """The peer refused us for good."""


class LinkDown(TunnelError):
    """No peer answered within the deadline."""


class PolicyUnavailable(UserSysError):
    """A policy that acts in another process gives no action now; the message is for the robot's people."""


class AuthorityError(UserSysError):
    """An illegal transition of control over a robot."""
