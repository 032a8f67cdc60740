"""Leases with fencing tokens, and the lock of a robot on its own computer.

A robot is FREE, HELD or LAPSED. `acquire` leads to HELD with a new token. `renew` keeps it HELD. `expire` and `lapse`
lead from HELD to LAPSED. `release` and `revoke` lead to FREE. Every other step raises. A LAPSED robot can be acquired
by any session; until then, `renew` with the newest token leads back to HELD, so that a session continues after a long
interruption.

A robot's tokens only grow. A token is synced before it is returned, so that no restart returns it again. The driver's
`Fence` refuses every token older than the newest that it has seen, so that a session with a lost lease has no effect.

After a restart each lease lasts for its full time to live, so that sessions outlive the restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pwd
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably
from hal.errors import LeaseError, LeaseHeld, SpecError, StaleToken
from hal.machine_folder import (
    MAX_NAME_CHARS,
    TEST_FOLDER_VARIABLE,
    RobotFiles,
    known_robot_files,
    open_locked,
    open_shared_file,
    overwrite,
    require_robot_name,
    robot_files,
    tests_folder,
    try_lock,
)
from hal.state_database import StateDatabase

logger = logging.getLogger(__name__)

DEFAULT_TTL_S = 10.0
MAX_HOLDER_CHARS = 500
MAX_MIN_TOKEN = 1 << 40  # two leases a second for 17,000 years
_HOLDER_BYTES = 4096
_TOKEN_BYTES = 32
_ACQUIRE_TIMEOUT_S = 0.01
_NS = 1_000_000_000


def lease_clock_ns() -> int:
    """Nanoseconds that ignore changes of the system clock and include suspend."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to drive `robot`. It ends `ttl_s` after the last acquisition or renewal."""

    robot: str
    holder: str
    token: int
    ttl_s: float


class _Entry(NamedTuple):
    """A robot's row in the table: its newest token, the holder while HELD, and the last holder while LAPSED."""

    token: int
    holder: str | None = None
    lapsed: str | None = None


class LeaseTable:
    """The leases of all robots. One thread calls it. Each change is synced before the method returns."""

    def __init__(
        self, database: StateDatabase, ttl_s: float = DEFAULT_TTL_S, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Args:
            database: of which only this table writes the leases.
            ttl_s: the duration of a lease without renewal.
            clock: monotonic nanoseconds.

        Raises:
            StateError: the table cannot be read. Tokens must not start over, so a person has to repair the file.
        """
        self._database, self._clock = database, clock
        self.ttl_s = ttl_s
        rows = database.rows("SELECT robot, token, holder, lapsed FROM lease")
        self._entries = {robot: _Entry(*entry) for robot, *entry in rows}
        held = [robot for robot, entry in self._entries.items() if entry.holder is not None]
        self._deadline_ns = dict.fromkeys(held, self._next_deadline())

    def acquire(self, robot: str, holder: str, min_token: int = 0) -> Lease:
        """Gives `robot` to `holder` under a new token, greater than all earlier ones and than `min_token`.

        `min_token` is the newest token that the robot's driver has seen, possibly from another table. It fences a robot
        that changes runs against the sessions of its first run.

        `holder` identifies one session for people and stays the same when that session restarts: a holder that acquires
        again replaces its own lease at once.

        Raises:
            LeaseHeld: another session holds the lease; the message names it and the seconds left.
            LeaseError: `min_token` is above `MAX_MIN_TOKEN` and every token of this table; it would use up the numbers.
            SpecError: a name that is empty, too long or not printable.
            StateError: the table cannot be written; no lease was given.
        """
        require_robot_name(robot)
        if not holder.strip() or len(holder) > MAX_NAME_CHARS or not holder.isprintable():
            raise SpecError(f"a lease's holder must be a printable name of 1 to {MAX_NAME_CHARS} characters")
        entry, held = self._entries.get(robot, _Entry(0)), self.lease(robot)
        if held is not None and held.holder != holder:
            raise LeaseHeld(f"{robot} is driven by {held.holder} for at least {self._seconds_left(robot):.1f} s more")
        if min_token > max(entry.token, MAX_MIN_TOKEN):
            raise LeaseError(
                f"no session got the token {min_token} that the driver of {robot} has seen: rotate the robot's key, "
                f"stop its driver, and remove {robot}.fence on its computer"
            )
        fresh = _Entry(max(entry.token, min_token) + 1, holder)
        self._store(robot, fresh)
        self._deadline_ns[robot] = self._next_deadline()
        logger.info("lease.acquired robot=%s holder=%s token=%d", robot, holder, fresh.token)
        return Lease(robot=robot, holder=holder, token=fresh.token, ttl_s=self.ttl_s)

    def renew(self, robot: str, token: int) -> Lease:
        """Extends the lease by its time to live. Restores a lapsed lease if no other session has acquired the robot.

        Only a lapsed lease is written, so that a full disk ends no other.

        Raises:
            StaleToken: a newer session drives the robot.
            LeaseError: the lease was released or revoked; acquire it again.
            StateError: a lapsed lease cannot be written to the file.
        """
        entry = self._entries.get(robot)
        if entry is not None and entry.lapsed is not None and entry.token == token:
            self._store(robot, _Entry(token, entry.lapsed))
            logger.info("lease.reinstated robot=%s holder=%s token=%d", robot, entry.lapsed, token)
        holder = self._require(robot, token)
        self._deadline_ns[robot] = self._next_deadline()
        return Lease(robot=robot, holder=holder, token=token, ttl_s=self.ttl_s)

    def release(self, robot: str, token: int) -> None:
        """Ends the lease. Raises as `renew` does."""
        self._require(robot, token)
        self.revoke(robot)

    def revoke(self, robot: str) -> None:
        """Ends the robot's lease, held or lapsed, for good; harmless if it is FREE."""
        entry = self._entries.get(robot)
        if entry is None or (entry.holder is None and entry.lapsed is None):
            return
        self._store(robot, _Entry(entry.token))
        self._deadline_ns.pop(robot, None)
        logger.info("lease.ended robot=%s holder=%s token=%d", robot, entry.holder, entry.token)

    def expire(self) -> tuple[str, ...]:
        """Lapses the leases whose time is over; returns their robots. Raises StateError: one cannot be written."""
        now = self._clock()
        over = tuple(robot for robot, deadline_ns in self._deadline_ns.items() if deadline_ns <= now)
        for robot in over:
            self.lapse(robot)
        return over

    def lapse(self, robot: str) -> None:
        """Ends the robot's lease so that its holder may renew it. Harmless if no session holds it."""
        entry = self._entries.get(robot)
        if entry is None or entry.holder is None:
            return
        self._store(robot, _Entry(entry.token, lapsed=entry.holder))
        del self._deadline_ns[robot]
        logger.info("lease.lapsed robot=%s holder=%s token=%d", robot, entry.holder, entry.token)

    def lease(self, robot: str) -> Lease | None:
        """The lease in force, or None while the robot is FREE."""
        entry = self._entries.get(robot)
        if entry is None or entry.holder is None or self._deadline_ns[robot] <= self._clock():
            return None
        return Lease(robot=robot, holder=entry.holder, token=entry.token, ttl_s=self.ttl_s)

    def _require(self, robot: str, token: int) -> str:
        entry = self._entries.get(robot)
        if entry is None or token > entry.token:
            raise LeaseError(f"token {token} for {robot} is not from this lease table; acquire the lease")
        if token < entry.token:
            raise StaleToken(f"{robot} is driven under token {entry.token}; token {token} is too old")
        if entry.holder is None:
            raise LeaseError(f"the lease on {robot} with token {token} has ended; acquire it again")
        return entry.holder

    def _store(self, robot: str, entry: _Entry) -> None:
        with self._database.change() as connection:
            connection.execute(
                "INSERT INTO lease VALUES (?, ?, ?, ?) ON CONFLICT (robot) DO UPDATE"
                " SET token = excluded.token, holder = excluded.holder, lapsed = excluded.lapsed",
                (robot, *entry),
            )
        self._entries[robot] = entry

    def _next_deadline(self) -> int:
        return self._clock() + round(self.ttl_s * _NS)

    def _seconds_left(self, robot: str) -> float:
        return max(0.0, (self._deadline_ns[robot] - self._clock()) / _NS)


class Fence:
    """The newest token that a robot's drivers on this computer have seen. They share one file, which survives restarts.
    One thread calls it."""

    def __init__(self, path: Path | None) -> None:
        """Args:
            path: `hal.machine_folder.RobotFiles.fence_path`; None keeps the token in memory, for tests.

        Raises:
            LeaseError: the file cannot be read.
        """
        self._path = path
        self._newest = _read_token(path)

    @property
    def newest(self) -> int:
        """The newest token seen; 0 before the first."""
        return self._newest

    def check_token(self, token: int) -> None:
        """Accepts a command's token. A token newer than all earlier ones is synced before this returns.

        Raises:
            StaleToken: a newer session has driven this robot; refuse the command.
        """
        if token == self._newest and token > 0:
            return
        if token <= self._newest:
            raise StaleToken(f"token {token} is too old: this robot has been driven under token {self._newest}")
        if self._path is not None:
            make_folder_durably(self._path.parent)
            with open_locked(self._path) as (handle, _):
                overwrite(handle, f"{token}\n".encode(), _TOKEN_BYTES)
        self._newest = token


class _Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lock's file: the process that holds the lock, or held it last."""

    pid: int
    user: str
    what: str


class MachineLock:
    """A lock that one process of this computer holds at a time. It ends with the process, also after a kill."""

    def __init__(self, path: Path, holder: str = "", label: str = "") -> None:
        """Args:
        path: the lock's file, in a folder of `hal.machine_folder`.
        holder: the purpose of the lock, for other processes' messages.
        label: the name of the locked thing, for messages; by default the file's name.
        """
        self._path, self._holder, self._label = path, holder, label or path.stem
        self._handle: int | None = None

    def acquire(self) -> None:
        """Takes the lock; harmless if this object holds it. Never waits.

        Raises:
            LeaseHeld: another process holds it; the message has its pid, user and purpose.
            LeaseError: the file cannot serve as a lock.
        """
        if self._handle is not None:
            return
        try:
            handle = self._locked_file()
        except OSError as error:
            raise LeaseError(f"the lock {self._path} cannot be opened: {error.strerror}") from error
        holder = _Holder(pid=os.getpid(), user=_user_name(), what=self._holder[:MAX_HOLDER_CHARS])
        try:
            overwrite(handle, msgspec.json.encode(holder), _HOLDER_BYTES, sync=False)
        except OSError as error:  # a full disk: the lock is valid without its content
            logger.warning("lock.unsigned path=%s error=%s", self._path, error)
        self._handle = handle

    def _locked_file(self) -> int:
        """The open and locked file. If the file was removed meanwhile, it is opened again: two files are two locks."""
        while True:
            handle = open_shared_file(self._path)
            if not try_lock(handle, _ACQUIRE_TIMEOUT_S):  # `is_held` of another process locks for microseconds
                os.close(handle)
                raise LeaseHeld(f"{self._label} is driven on this machine by {self.owner() or 'another process'}")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(self._path)):
                    return handle
            os.close(handle)

    def is_held(self) -> bool:
        """Whether a living process, this one included, holds the lock. Never waits and never takes it."""
        if self._handle is not None:
            return True
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:  # no permission to look: assume that it is held
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)

    def owner(self) -> str:
        """The holding process, e.g. ``pid 4711 of ana for runs/demo/edge/panda-0``; empty if none. Never waits."""
        if not self.is_held():
            return ""
        try:
            holder = msgspec.json.decode(self._path.read_bytes(), type=_Holder)
        except (OSError, *DECODE_ERRORS):  # another user's file, or its content is not yet written
            return "another process"
        return f"pid {holder.pid} of {holder.user} {holder.what}".strip()

    def release(self) -> None:
        """Releases the lock; harmless if it is not held. The file stays, since two files would be two locks."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def robot_lock(robot: str, holder: str = "", *, simulated: bool) -> MachineLock:
    """The lock of a robot on this computer; raises as `hal.machine_folder.robot_files` does."""
    if (folder := tests_folder()) is not None:
        _warn_of_tests_folder(folder)
    return MachineLock(robot_files(robot, simulated=simulated).lock_path, holder, robot)


def driver_process_of(robot: str, *, simulated: bool | None = None) -> str:
    """The process that drives `robot` on this computer, for people; empty if none.

    A simulated robot is this user's. By default the robot may be real or simulated.
    """
    uids = {None: (None, os.getuid()), False: (None,), True: (os.getuid(),)}[simulated]
    found = [files for files in known_robot_files() if files.name == robot and files.uid in uids]
    return next((owner for files in found if (owner := MachineLock(files.lock_path).owner())), "")


def driven_robots() -> list[RobotFiles]:
    """The robots that are driven on this computer now: real ones, and simulated ones of all users."""
    return [files for files in known_robot_files() if MachineLock(files.lock_path).is_held()]


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


@cache
def _warn_of_tests_folder(folder: Path) -> None:
    logger.warning("machine.test_folder %s=%s: for tests only", TEST_FOLDER_VARIABLE, folder)


def _read_token(path: Path | None) -> int:
    if path is None:
        return 0
    try:
        handle = open_shared_file(path, create=False)
        try:
            return int(os.pread(handle, _TOKEN_BYTES, 0).strip() or b"0")
        finally:
            os.close(handle)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise LeaseError(f"the fencing token in {path} cannot be read ({error}); check who drives the robot") from error
