"""Who may drive a robot: leases with fencing tokens, and the lock that guards a robot on its own computer.

A robot is FREE, HELD or LAPSED. `acquire` leads to HELD with a new token; `renew` keeps it HELD; `expire` and `lapse`
lead from HELD to LAPSED; `release` and `revoke` lead to FREE; everything else raises. LAPSED is free for everybody,
but where nobody took it, `renew` with the newest token leads back to HELD: a session that was cut off for long goes
on where it stood. Tokens of a robot only grow, and a token is on the disk before it is handed out, so that no restart
can hand it out again. The driver's `Fence` refuses every token older than the newest that it has seen: a session that
lost its lease without noticing can do nothing.

A restarted table gives each lease that it finds a full time to live anew, so that a session outlives the restart.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hal.durable import replace_durably
from hal.errors import LeaseError, LeaseHeld, SpecError, StaleToken
from hal.undecodable import UNDECODABLE

logger = logging.getLogger(__name__)

DEFAULT_TTL_S = 10.0
MAX_NAME_CHARS = 128
DEVICE = "device."  # how the names of locks begin that keep a device, and not a robot; no robot is called so
CHOSEN = "chosen."  # and of those that keep a robot for a run, while a driver process of it may have the robot's own
_NS = 1_000_000_000
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to drive `robot`. It ends `ttl_s` after it was acquired or renewed."""

    robot: str
    holder: str
    token: int
    ttl_s: float


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A robot's row on the disk: the newest token ever given out, its holder while HELD, its last one while LAPSED."""

    token: int
    holder: str | None
    lapsed: str | None = None


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    robots: dict[str, _Entry] = {}


class LeaseTable:
    """The leases of all robots. One thread calls it; `acquire`, `release`, `expire` and `revoke` sync to the disk."""

    def __init__(
        self, path: Path | None, ttl_s: float = DEFAULT_TTL_S, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Args:
            path: the table's file; None keeps it in memory, for tests.
            ttl_s: how long a lease lasts without a renewal.
            clock: nanoseconds that only grow.

        Raises:
            LeaseError: the file cannot be read; tokens must not start over, so a person has to look.
        """
        self._path = path
        self._clock = clock
        self.ttl_s = ttl_s
        self._entries = _read_table(path).robots
        held = [robot for robot, entry in self._entries.items() if entry.holder is not None]
        self._deadline_ns = dict.fromkeys(held, self._next_deadline())

    def acquire(self, robot: str, holder: str, floor: int = 0) -> Lease:
        """Gives `robot` to `holder` under a new token, greater than all before it and than `floor`.

        `floor` is the newest token that the robot's driver has seen, from another table perhaps: a robot that goes
        from one run to another is fenced against the first one's sessions too.

        `holder` names one session for a person to read and stays the same when that session restarts: a holder that
        acquires again takes over from its former self at once.

        Raises:
            LeaseHeld: another session drives it; names the holder and the seconds left.
            SpecError: a name that is empty, too long or not printable.
            OSError: the table cannot be written; nothing was given out.
        """
        _check_name(robot)
        if not holder.strip() or len(holder) > MAX_NAME_CHARS or not holder.isprintable():
            raise SpecError(f"a lease's holder must be a printable name, got {holder[:80]!r}")
        self.expire()
        entry = self._entries.get(robot, _Entry(token=0, holder=None))
        if entry.holder is not None and entry.holder != holder:
            raise LeaseHeld(f"{robot} is driven by {entry.holder} for at least {self._seconds_left(robot):.1f} s more")
        fresh = _Entry(token=max(entry.token, floor) + 1, holder=holder)
        self._store(robot, fresh)
        self._deadline_ns[robot] = self._next_deadline()
        logger.info("lease.acquired robot=%s holder=%s token=%d", robot, holder, fresh.token)
        return Lease(robot=robot, holder=holder, token=fresh.token, ttl_s=self.ttl_s)

    def renew(self, robot: str, token: int) -> Lease:
        """Extends the lease by its time to live, from now; one that ran out comes back where nobody else had the robot.

        Raises:
            StaleToken: a newer session drives the robot.
            LeaseError: the lease was released or revoked; acquire it again.
            OSError: a lease that ran out cannot be written down again.
        """
        self.expire()
        entry = self._entries.get(robot)
        if entry is not None and entry.lapsed is not None and entry.token == token:
            self._store(robot, _Entry(token=token, holder=entry.lapsed))
            logger.info("lease.reinstated robot=%s holder=%s token=%d", robot, entry.lapsed, token)
        holder = self._require(robot, token)
        self._deadline_ns[robot] = self._next_deadline()
        return Lease(robot=robot, holder=holder, token=token, ttl_s=self.ttl_s)

    def release(self, robot: str, token: int) -> None:
        """Ends the lease. Raises as `renew` does."""
        self.expire()
        self._require(robot, token)
        self.revoke(robot)

    def revoke(self, robot: str) -> None:
        """Ends the robot's lease for good, whoever holds or held it; harmless where it is FREE."""
        entry = self._entries.get(robot)
        if entry is None or (entry.holder is None and entry.lapsed is None):
            return
        self._store(robot, _Entry(token=entry.token, holder=None))
        self._deadline_ns.pop(robot, None)
        logger.info("lease.ended robot=%s holder=%s token=%d", robot, entry.holder, entry.token)

    def expire(self) -> tuple[str, ...]:
        """Ends the leases whose time is over; returns their robots."""
        now = self._clock()
        over = tuple(robot for robot, deadline in self._deadline_ns.items() if deadline <= now)
        for robot in over:
            self.lapse(robot)
        return over

    def lapse(self, robot: str) -> None:
        """Ends the robot's lease as running out does: its holder may have it back. Harmless where nobody holds it."""
        entry = self._entries.get(robot)
        if entry is None or entry.holder is None:
            return
        self._store(robot, _Entry(token=entry.token, holder=None, lapsed=entry.holder))
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
            raise LeaseError(f"token {token} for {robot} was never given out here")
        if token < entry.token:
            raise StaleToken(f"{robot} is driven under token {entry.token} by now; {token} is too old")
        if entry.holder is None:
            raise LeaseError(f"the lease on {robot} with token {token} has ended; acquire it again")
        return entry.holder

    def _store(self, robot: str, entry: _Entry) -> None:
        entries = {**self._entries, robot: entry}
        if self._path is not None:
            replace_durably(self._path, msgspec.json.encode(_Table(robots=entries)))
        self._entries = entries

    def _next_deadline(self) -> int:
        return self._clock() + round(self.ttl_s * _NS)

    def _seconds_left(self, robot: str) -> float:
        return max(0.0, (self._deadline_ns[robot] - self._clock()) / _NS)


class Fence:
    """The driver process's memory of the newest token; survives its restart. One thread calls it."""

    def __init__(self, *paths: Path) -> None:
        """Args:
            paths: files that hold the token, each written at every new one: one that lasts, and one that the drivers
                of this robot share on this machine, whichever run they belong to. None keep the token in memory.

        Raises:
            LeaseError: a file cannot be read.
        """
        self._paths = paths
        self._newest = max(map(_read_token, paths), default=0)

    @property
    def newest(self) -> int:
        """The newest token seen; 0 before the first."""
        return self._newest

    def admit(self, token: int) -> None:
        """Lets a command pass. A token newer than all before is on the disk before this returns.

        Raises:
            StaleToken: a newer session has driven this robot; the command must be refused.
        """
        if token == self._newest and token > 0:
            return
        if token <= self._newest:
            raise StaleToken(f"token {token} is too old: this robot has been driven under token {self._newest}")
        for path in self._paths:
            replace_durably(path, str(token).encode())
        self._newest = token


class MachineLock:
    """Keeps two driver processes of one machine off the same robot. The lock ends with the process, however it ends."""

    def __init__(self, robot: str, holder: str = "", runtime_dir: Path | None = None) -> None:
        """`holder` tells the one who is refused what holds the robot; `runtime_dir` defaults to `runtime_folder()`."""
        _check_name(robot)
        self._robot = robot
        self._holder = holder
        self._folder = runtime_dir
        self._handle: int | None = None

    def acquire(self) -> None:
        """Takes the lock; harmless where it is already taken by this object. Never waits.

        Raises:
            LeaseHeld: another process has it; names its pid and holder.
            LeaseError: the runtime folder is not ours alone.
        """
        if self._handle is not None:
            return
        folder = self._folder or runtime_folder()
        _make_private(folder)
        handle = os.open(folder / f"{self._robot}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _lock(handle):
            owner = os.pread(handle, 4096, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise LeaseHeld(f"{self._robot} is driven on this machine by {owner}")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} {self._holder}".strip().encode(), 0)
        self._handle = handle

    def held(self) -> bool:
        """Whether some living process has the lock, this one included. Never waits, takes nothing."""
        if self._handle is not None:
            return True
        try:
            handle = os.open((self._folder or runtime_folder()) / f"{self._robot}.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)

    def owner(self) -> str:
        """Who has it, in words, e.g. ``pid 4711 for runs/demo/edge/panda-0``; empty where nobody does. Never waits."""
        if not self.held():
            return ""
        try:
            said = ((self._folder or runtime_folder()) / f"{self._robot}.lock").read_text(errors="replace").strip()
        except OSError:  # released, and removed by a person
            return ""
        return said or "another process"

    def release(self) -> None:
        """Gives the lock back; harmless where it is not taken. The file stays, or two could lock two files."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _lock(handle: int) -> bool:
    """Takes the lock exclusively. Tried three times, since `MachineLock.held` has it for some microseconds."""
    for _ in range(3):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.005)
    return False


def runtime_folder() -> Path:
    """Where this user's locks and sockets live: USER_SYS_RUNTIME_DIR, else under XDG_RUNTIME_DIR, else under /tmp."""
    if chosen := os.environ.get("USER_SYS_RUNTIME_DIR"):
        return Path(chosen)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "user-sys"
    return Path(f"/tmp/user-sys-{os.getuid()}")


def driven(runtime_dir: Path | None = None) -> dict[str, str]:
    """The robots that programs of this machine, and user, drive now, and by whom; see `MachineLock.owner`."""
    names = [path.name.removesuffix(".lock") for path in (runtime_dir or runtime_folder()).glob("*.lock")]
    robots = [name for name in names if _NAME.fullmatch(name) and not name.startswith((DEVICE, CHOSEN))]
    owners = {name: MachineLock(name, runtime_dir=runtime_dir).owner() for name in robots}
    return {name: owner for name, owner in owners.items() if owner}


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise LeaseError(f"{folder} must be a folder that only this user may write; set USER_SYS_RUNTIME_DIR")


def _check_name(robot: str) -> None:
    if not _NAME.fullmatch(robot):
        raise SpecError(f"{robot[:80]!r} is not a robot's name (letters, digits, '.', '_', '-')")


def _read_table(path: Path | None) -> _Table:
    if path is None or not path.exists():
        return _Table()
    try:
        table = msgspec.json.decode(path.read_bytes(), type=_Table)
    except (OSError, *UNDECODABLE) as error:
        raise LeaseError(f"the lease table {path} cannot be read ({error}); tokens must not start over") from error
    if table.version != 1:
        raise LeaseError(f"the lease table {path} has version {table.version}; this program knows 1")
    return table


def _read_token(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        return int(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LeaseError(f"the fencing token in {path} cannot be read ({error}); see who drives the robot") from error
