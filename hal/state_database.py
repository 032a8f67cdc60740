"""The SQLite file of a gateway: the leases of its robots, operators' overrides, known resources and the audit log.

The file is `STATE_FILE` in the folder of a run or relay. The one in a folder of runs has the overrides of real robots.
`machine_state_path` is the one of this user's other programs. Several processes use a file at a time, also those of
several users: those who may write the folder may write the file.

The journal is a write-ahead log. With `synced`, a change is synced before `change` returns, so it survives a power cut
(``synchronous=FULL``). Without it, a power cut may undo the newest changes, but never damages the file (``NORMAL``).
A killed process loses no change that had returned. A trigger refuses a lease's token that shrinks.

E-stop latches, robot locks and the drivers' fencing tokens are plain files (`hal.machine_folder`).

The audit log has operators' actions, sign-ins, refusals, connections, and the sessions that drove each robot. It is
bounded: the oldest entries are removed beyond `MAX_BYTES`. Equal events within `REPEAT_WINDOW_S` become one more entry
with their count. The rate of different events is limited for each kind and source, so that a flood neither fills the
disk nor displaces other events.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from hal.context import ClosedAtExit
from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably, open_or_create
from hal.errors import StateError
from hal.pacing import TokenBucket

logger = logging.getLogger(__name__)

STATE_FILE = "state.db"
VERSION = 1
BUSY_TIMEOUT_S = 5.0  # for another process's change

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE lease (robot TEXT PRIMARY KEY, token INTEGER NOT NULL, holder TEXT, lapsed TEXT);
CREATE TRIGGER token_grows BEFORE UPDATE ON lease WHEN NEW.token < OLD.token
    BEGIN SELECT RAISE(ABORT, 'a token must not shrink'); END;
CREATE TRIGGER token_stays BEFORE DELETE ON lease BEGIN SELECT RAISE(ABORT, 'a token must not be removed'); END;
CREATE TABLE override (resource TEXT PRIMARY KEY, content BLOB NOT NULL, cleared_by TEXT);
CREATE TABLE resource (name TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE audit (end_byte INTEGER PRIMARY KEY, entry BLOB NOT NULL);
PRAGMA user_version = {VERSION};
COMMIT;
"""

MAX_BYTES = 64 << 20
MAX_FIELD_CHARS = 500
REPEAT_WINDOW_S = 10.0
MAX_REPEATED_EVENTS = 1024  # different events whose repetitions are counted at the same time
AUDIT_BUSY_TIMEOUT_S = 1.0
# Different events of one kind and source: so many each second, and so many at once. All sources of `refused` share one
# allowance, since anyone can cause it: it needs no key.
REFUSED_RATE_LIMIT, DEFAULT_RATE_LIMIT = (2, 50), (20, 1000)
MAX_SOURCES = 256  # with an allowance of their own; further ones share that of their kind

AuditEvent = Literal[
    "order", "authority", "sign-in", "sign-out", "opened", "closed", "refused",
    "granted", "reinstated", "released", "lapsed", "revoked", "quarantined", "draining", "restored", "lost", "returned",
]  # fmt: skip
"""`order`: an operator's action. `authority`: the robot's driver changed. `opened` to `refused`: a connection to the
tunnel or to the console. The others concern a robot or another resource, see `hal.registry`."""
_Source = tuple[AuditEvent, str, str, str]  # kind of the event, robot, peer, address


class StateDatabase(ClosedAtExit):
    """A connection to one file. Any thread may use it. It is opened at its first use."""

    def __init__(self, path: Path | None, *, synced: bool = True, timeout_s: float = BUSY_TIMEOUT_S) -> None:
        """Args:
        path: of the file; None keeps the state in memory, for tests.
        synced: see the module's docstring.
        timeout_s: the longest wait for another process's change.
        """
        self.path, self._synced, self._timeout_s = path, synced, timeout_s
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a query; none if the file does not exist. Raises StateError: it cannot be read."""
        with self._lock:
            if self._connection is None and self.path is not None and not self.path.exists():
                return []
            with self._translated("read"):
                return self._open().execute(query, values).fetchall()

    @contextlib.contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all changes of the block, or none after an exception. Blocks for the sync.

        Raises:
            StateError: the file is damaged, read-only or locked by another process, or the disk is full.
        """
        with self._lock, self._translated("written"):
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def __del__(self) -> None:
        self.close()  # Python 3.13 warns of connections that were not closed

    def close(self) -> None:
        """Closes the file; a later use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        if self.path is not None:
            make_folder_durably(self.path.parent)
            with contextlib.suppress(OSError):  # a read-only file can be read; SQLite reports the rest
                _create(self.path)
        target = ":memory:" if self.path is None else _uri(self.path)
        connection = sqlite3.connect(
            target, timeout=self._timeout_s, isolation_level=None, check_same_thread=False, uri=True
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA synchronous={'FULL' if self._synced else 'NORMAL'}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(_SCHEMA)
            except sqlite3.OperationalError:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if not connection.execute("PRAGMA user_version").fetchone()[0]:
                    raise  # else another process has just created the tables
        elif version != VERSION:
            raise StateError(f"{self.path} has version {version}; this program reads version {VERSION}")

    @contextlib.contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StateError(f"{self.path} cannot be {verb}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StateError(f"{self.path} is damaged ({error}): a person has to repair it") from error
        except OSError as error:
            raise StateError(f"{self.path} cannot be {verb}: {error.strerror or error}") from error


def _create(path: Path) -> None:
    """Creates the file if it is missing. Those who may write its folder may read and write the file."""
    opened = open_or_create(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        mode, writers = stat.S_IMODE(os.fstat(opened).st_mode), path.parent.stat().st_mode & 0o022
        os.fchmod(opened, mode | writers | writers << 1)
    finally:
        os.close(opened)


def _uri(path: Path) -> str:
    """SQLite's URI of the file at `path`. A file without a log, in a folder that this user may not write, counts as
    unchangeable: its last user has closed it, and SQLite could not create the log that it needs to read it."""
    is_closed = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
    return f"{path.absolute().as_uri()}{'?mode=ro&immutable=1' if is_closed else ''}"


def machine_state_path() -> Path:
    """The file of this user's programs on this computer outside of runs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "user-sys" / STATE_FILE


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. Texts are cut off at `MAX_FIELD_CHARS`.

    Attributes:
        time: UTC, ISO 8601, set by the log; the time of the last event if `count` is above 1.
        person, address: of the operator, and of the operator's computer.
        robot: or another resource.
        order: the operator's action; or the new driver of an `authority` event.
        outcome: ``done``, or the reason of the failure.
        peer, role, key: of a connection, as authenticated by its key or claimed without one; `key` is a fingerprint. Of
            a lease, `peer` is the holder.
        token: of a lease.
        reason: of the event.
        count: the number of equal events that this entry adds to the earlier ones.
    """

    time: str = ""
    event: AuditEvent
    person: str = ""
    address: str = ""
    robot: str = ""
    order: str = ""
    outcome: str = ""
    peer: str = ""
    role: str = ""
    key: str = ""
    token: int = 0
    reason: str = ""
    count: int = 1


AuditSink = Callable[[AuditEntry], None]
"""Takes an event; returns soon, raises nothing. `AuditLog.write` is one."""


def discard_audit_event(entry: AuditEntry) -> None:
    """An `AuditSink` that writes nothing."""


class AuditLog:
    """Writes one log. Any thread may write, and any number of processes to one file.

    No method raises or waits for a sync; a write waits for at most `AUDIT_BUSY_TIMEOUT_S` for another process's. A
    killed process loses no entry; a power cut may remove the newest ones. An entry that cannot be written is logged.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Args:
        path: of the database; None keeps the log in memory, for tests.
        clock: monotonic seconds.
        max_bytes: of all entries.
        """
        self._database = StateDatabase(path, synced=False, timeout_s=AUDIT_BUSY_TIMEOUT_S)
        self._clock, self._max_bytes = clock, max_bytes
        self._lock = threading.Lock()
        self._open: dict[AuditEntry, tuple[float, int]] = {}  # the time of its last entry, and its repetitions since
        self._allowances: dict[_Source, TokenBucket] = {}
        self._unlisted: Counter[_Source] = Counter()

    def write(self, entry: AuditEntry) -> None:
        """Writes `entry` with the present time, or counts it; see `AuditSink`."""
        entry = _truncated(entry)
        with self._lock:
            self._flush(everything=False)
            since_s, count = self._open.get(entry, (0.0, -1))
            if count >= 0:
                self._open[entry] = (since_s, count + 1)
            elif not self._may_write(source := self._source(entry)):
                self._unlisted[source] += 1
            else:
                if len(self._open) < MAX_REPEATED_EVENTS:
                    self._open[entry] = (self._clock(), 0)
                self._append(entry)

    def flush(self) -> None:
        """Writes the repetition counts that are `REPEAT_WINDOW_S` old. Call it every few seconds."""
        with self._lock:
            self._flush(everything=False)

    def close(self) -> None:
        """Writes all counts. Later writes are still possible."""
        with self._lock:
            self._flush(everything=True)
            self._database.close()

    def _flush(self, *, everything: bool) -> None:
        now = self._clock()
        due = [entry for entry, (since_s, _) in self._open.items() if everything or now - since_s >= REPEAT_WINDOW_S]
        for entry in due:
            _, count = self._open.pop(entry)
            if count:
                self._append(msgspec.structs.replace(entry, count=count))
                if not everything:
                    self._open[entry] = (now, 0)
        for source in list(self._unlisted):
            if everything or self._may_write(source):
                event, robot, peer, address = source
                reason, count = "events beyond the rate limit", self._unlisted.pop(source)
                self._append(
                    AuditEntry(event=event, robot=robot, peer=peer, address=address, reason=reason, count=count)
                )

    def _source(self, entry: AuditEntry) -> _Source:
        """Whose allowance the event uses up."""
        shared, source = (entry.event, "", "", ""), (entry.event, entry.robot, entry.peer, entry.address)
        if entry.event == "refused":
            return shared
        if source not in self._allowances and len(self._allowances) >= MAX_SOURCES:
            burst = DEFAULT_RATE_LIMIT[1]
            self._allowances = {old: each for old, each in self._allowances.items() if each.wait_s(burst) > 0}
        return source if source in self._allowances or len(self._allowances) < MAX_SOURCES else shared

    def _may_write(self, source: _Source) -> bool:
        if source not in self._allowances:
            limit = REFUSED_RATE_LIMIT if source[0] == "refused" else DEFAULT_RATE_LIMIT
            self._allowances[source] = TokenBucket(*limit, clock=self._clock)
        is_allowed = self._allowances[source].wait_s(1) <= 0
        if is_allowed:
            self._allowances[source].consume()
        return is_allowed

    def _append(self, entry: AuditEntry) -> None:
        content = msgspec.json.encode(msgspec.structs.replace(entry, time=_utc(time.time())))
        try:
            with self._database.change() as connection:
                (newest,) = connection.execute("SELECT coalesce(max(end_byte), 0) FROM audit").fetchone()
                end = newest + len(content)
                connection.execute("INSERT INTO audit VALUES (?, ?)", (end, content))
                connection.execute("DELETE FROM audit WHERE end_byte <= ?", (end - self._max_bytes,))
        except StateError as error:
            logger.error("audit.write_failed %s: %s", error, content.decode())


def audit_operator_action(
    person: str, action: str, outcome: str = "done", *, run: Path | None = None, robot: str = "", reason: str = ""
) -> None:
    """Records a person's command in a terminal: in the log of the run `run`, else in `machine_state_path`."""
    log = AuditLog(machine_state_path() if run is None else run / STATE_FILE)
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0] or "this computer"
    log.write(
        AuditEntry(
            event="order", person=person, address=address, robot=robot, order=action, outcome=outcome, reason=reason
        )
    )
    log.close()


def read_audit_log(path: Path) -> list[AuditEntry]:
    """All entries of the database at `path`, oldest first; none if it does not exist. A damaged one is skipped.

    Raises:
        StateError: the database cannot be read.
    """
    entries = []
    with StateDatabase(path) as database:
        rows = database.rows("SELECT entry FROM audit ORDER BY end_byte")
    for (content,) in rows:
        try:
            entries.append(msgspec.json.decode(content, type=AuditEntry))
        except DECODE_ERRORS as error:
            logger.warning("audit.damaged_entry file=%s: %s", path, error)
    return entries


def _truncated(entry: AuditEntry) -> AuditEntry:
    texts = {name: getattr(entry, name) for name in entry.__struct_fields__}
    long = {n: t[:MAX_FIELD_CHARS] for n, t in texts.items() if isinstance(t, str) and len(t) > MAX_FIELD_CHARS}
    return msgspec.structs.replace(entry, **long) if long else entry


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s * 1000) % 1000:03d}Z"
