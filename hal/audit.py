"""The audit log: operators' actions, sign-ins, refusals, connections, and the sessions that drove each robot.

One JSON object a line, in UTC, with mode 0600. All processes of a run on one computer write `AUDIT_FILE` in its folder;
this user's other programs write `machine_audit_path`. The files are bounded: a full file is renamed, and the oldest of
`MAX_OLD_FILES` is removed. Equal events within `REPEAT_WINDOW_S` become one more line with their count. The rate of
different events is limited for each kind, so that a flood neither fills the disk nor displaces other events.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hal.decode_errors import DECODE_ERRORS

logger = logging.getLogger(__name__)

AUDIT_FILE = "audit.jsonl"
MAX_FILE_BYTES = 8 << 20
MAX_OLD_FILES = 8  # besides the newest; audit.jsonl.1 is the newest of them
MAX_FIELD_CHARS = 500
REPEAT_WINDOW_S = 10.0
MAX_REPEATED_EVENTS = 1024  # different events whose repetitions are counted at the same time

AuditEvent = Literal[
    "order", "authority", "sign-in", "sign-out", "opened", "closed", "refused",
    "granted", "reinstated", "released", "lapsed", "revoked", "quarantined", "draining", "restored", "lost", "returned",
]  # fmt: skip
"""`order`: an operator's action. `authority`: the robot's driver changed. `opened` to `refused`: a connection to the
tunnel or to the console. The others concern a robot or another resource, see `hal.registry`."""


class EventRateLimit(msgspec.Struct, frozen=True):
    """A token bucket for the different events of one kind: `burst` at once, and `per_s`."""

    burst: float
    per_s: float


REFUSED_RATE_LIMIT = EventRateLimit(50, 2)  # anyone can cause `refused`: it needs no key
DEFAULT_RATE_LIMIT = EventRateLimit(1000, 20)


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log. Texts are cut off at `MAX_FIELD_CHARS`.

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
        count: the number of equal events that this line adds to the earlier lines.
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

    No method raises, waits for another process or for a sync. After a killed process the file has whole lines; a power
    cut may remove the newest ones. A line that cannot be written is logged.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Args:
        path: the newest file.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
        max_bytes: of one file.
        """
        self.path = path
        self._clock, self._wall, self._max_bytes = clock, wall_clock, max_bytes
        self._lock = threading.Lock()
        self._open: dict[AuditEntry, tuple[float, int]] = {}  # the time of its last line, and its repetitions since
        self._allowances: dict[AuditEvent, tuple[float, float]] = {}  # allowed lines, and the time of that count
        self._unlisted: Counter[AuditEvent] = Counter()

    def write(self, entry: AuditEntry) -> None:
        """Writes `entry` with the present time, or counts it; see `AuditSink`."""
        entry = _truncated(entry)
        with self._lock:
            self._flush(everything=False)
            since_s, count = self._open.get(entry, (0.0, -1))
            if count >= 0:
                self._open[entry] = (since_s, count + 1)
            elif len(self._open) >= MAX_REPEATED_EVENTS or not self._may_write(entry.event):
                self._unlisted[entry.event] += 1
            else:
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

    def _flush(self, *, everything: bool) -> None:
        now = self._clock()
        due = [entry for entry, (since_s, _) in self._open.items() if everything or now - since_s >= REPEAT_WINDOW_S]
        for entry in due:
            _, count = self._open.pop(entry)
            if count:
                self._append(msgspec.structs.replace(entry, count=count))
                if not everything:
                    self._open[entry] = (now, 0)
        for event in list(self._unlisted):
            if everything or self._may_write(event):
                reason = "events beyond the rate limit"
                self._append(AuditEntry(event=event, reason=reason, count=self._unlisted.pop(event)))

    def _may_write(self, event: AuditEvent) -> bool:
        rate, now = REFUSED_RATE_LIMIT if event == "refused" else DEFAULT_RATE_LIMIT, self._clock()
        left, counted_s = self._allowances.get(event, (rate.burst, now))
        left = min(rate.burst, left + (now - counted_s) * rate.per_s)
        allowed = left >= 1
        self._allowances[event] = (left - allowed, now)
        return allowed

    def _append(self, entry: AuditEntry) -> None:
        line = msgspec.json.encode(msgspec.structs.replace(entry, time=_utc(self._wall()))) + b"\n"
        try:
            handle = self._open_with_room(len(line))
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            logger.error("audit.write_failed %s: %s", error, line.decode().strip())

    def _open_with_room(self, size: int) -> int:
        """The newest file, with room for `size` bytes. If another process is rotating the files, the full one."""
        handle = _open_for_append(self.path)
        try:
            if os.fstat(handle).st_size + size <= self._max_bytes:
                return handle
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.lstat(self.path)):  # else another process has rotated the files
                files = _log_files(self.path)
                for newer, older in zip(files[1:], files, strict=False):
                    if newer.exists():
                        newer.replace(older)
        except BlockingIOError:
            return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)
        return _open_for_append(self.path)


def machine_audit_path() -> Path:
    """The audit log of this user's programs on this computer outside of runs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "user-sys" / AUDIT_FILE


def audit_operator_action(
    person: str, action: str, outcome: str = "done", *, run: Path | None = None, robot: str = "", reason: str = ""
) -> None:
    """Records a person's command in a terminal: in the folder of the run `run`, else in `machine_audit_path`."""
    path = machine_audit_path() if run is None else run / AUDIT_FILE
    log = AuditLog(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.error("audit.folder_not_created path=%s: %s", path.parent, error)
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0] or "this computer"
    log.write(
        AuditEntry(
            event="order", person=person, address=address, robot=robot, order=action, outcome=outcome, reason=reason
        )
    )
    log.close()


def read_audit_log(path: Path) -> list[AuditEntry]:
    """All entries of the files that exist, oldest first. A damaged line is logged and skipped.

    Raises:
        OSError: a file cannot be read.
    """
    return [entry for file in _log_files(path) for entry in _read_entries(file)]


def _truncated(entry: AuditEntry) -> AuditEntry:
    texts = {name: getattr(entry, name) for name in entry.__struct_fields__}
    long = {n: t[:MAX_FIELD_CHARS] for n, t in texts.items() if isinstance(t, str) and len(t) > MAX_FIELD_CHARS}
    return msgspec.structs.replace(entry, **long) if long else entry


def _open_for_append(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _log_files(path: Path) -> list[Path]:
    """Oldest first; some may not exist."""
    return [*(path.with_name(f"{path.name}.{number}") for number in range(MAX_OLD_FILES, 0, -1)), path]


def _read_entries(path: Path) -> Iterator[AuditEntry]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=AuditEntry)
        except DECODE_ERRORS as error:
            logger.warning("audit.damaged_line file=%s line=%d: %s", path, number, error)


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s * 1000) % 1000:03d}Z"
