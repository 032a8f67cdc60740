"""The audit log: which person ordered what, who signed in or was refused, which peer connected, who drove which robot.

One JSON object a line, in UTC, with mode 0600. Each run has one file for all of its processes, `AUDIT_FILE` in its
folder; `machine_audit_path` is that of this user's other programs on this computer. The files are bounded: one that is
full is put aside, and the oldest of `MAX_OLD_FILES` is dropped. Equal events within `REPEAT_WINDOW_S` become one more
line with their count, and events that differ are limited by kind, so that a flood neither fills the disk nor displaces
the rest.
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
from typing import Literal, Protocol

import msgspec

from hal.decode_errors import DECODE_ERRORS

logger = logging.getLogger(__name__)

AUDIT_FILE = "audit.jsonl"
MAX_FILE_BYTES = 8 << 20
MAX_OLD_FILES = 8  # besides the newest, numbered from it backwards: audit.jsonl.1 and so on
MAX_FIELD_CHARS = 500
REPEAT_WINDOW_S = 10.0
MAX_REPEATED_EVENTS = 1024  # different events whose repetitions are counted at a time

AuditEvent = Literal[
    "order", "authority", "sign-in", "sign-out", "opened", "closed", "refused",
    "granted", "reinstated", "released", "lapsed", "revoked", "quarantined", "draining", "restored", "lost", "returned",
]  # fmt: skip
"""`order`: of a person. `authority`: the robot changed hands without one. `opened` to `refused`: a connection, to the
tunnel or to the console. The rest: of a robot or another resource, see `hal.registry`."""


class EventRateLimit(msgspec.Struct, frozen=True):
    """So many different events of one kind are written at once, and so many a second."""

    burst: float
    per_s: float


REFUSED_RATE_LIMIT = EventRateLimit(50, 2)  # for `refused`, which needs no key
DEFAULT_RATE_LIMIT = EventRateLimit(1000, 20)


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        time: UTC, ISO 8601; of the last one where `count` is above 1.
        person, address: who gave an order or signed in, and from which computer.
        robot: or another resource.
        order: of a person; or what changed.
        outcome: ``done``, or why not.
        peer, role, key: of a connection, as its key says or as a stranger claims; `key` is a fingerprint. Of a lease,
            `peer` is its holder.
        token: of a lease.
        reason: why it happened.
        count: for how many equal events the line stands, besides those written before it.
    """

    time: str
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


class AuditSink(Protocol):
    """Takes an event; returns soon, raises nothing. The arguments are those of `AuditEntry`."""

    def __call__(
        self,
        event: AuditEvent,
        *,
        person: str = "",
        address: str = "",
        robot: str = "",
        order: str = "",
        outcome: str = "",
        peer: str = "",
        role: str = "",
        key: str = "",
        token: int = 0,
        reason: str = "",
    ) -> None: ...


def discard_audit_event(event: AuditEvent, **facts: object) -> None:
    """An `AuditSink` that writes nothing."""


class AuditLog:
    """Any thread may write, and any number of processes to one file. Nothing here raises, or waits for another process
    or for the disk's sync: a killed process leaves whole lines, a power cut may take the newest. What cannot be written
    is logged."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """`clock` gives seconds that only grow, `wall` those since 1970."""
        self.path = path
        self._clock, self._wall, self._max_bytes = clock, wall_clock, max_bytes
        self._lock = threading.Lock()
        self._open: dict[AuditEntry, tuple[float, int]] = {}  # since when, and how often since it was written
        self._allowances: dict[AuditEvent, tuple[float, float]] = {}  # lines that may be written, as of when
        self._unlisted: Counter[AuditEvent] = Counter()

    def write(
        self,
        event: AuditEvent,
        *,
        person: str = "",
        address: str = "",
        robot: str = "",
        order: str = "",
        outcome: str = "",
        peer: str = "",
        role: str = "",
        key: str = "",
        token: int = 0,
        reason: str = "",
    ) -> None:
        """See `AuditSink`. Fields are cut off at `MAX_FIELD_CHARS`."""
        texts = (person, address, robot, order, outcome, peer, role, key, reason)
        person, address, robot, order, outcome, peer, role, key, reason = (text[:MAX_FIELD_CHARS] for text in texts)
        entry = AuditEntry(
            time="",
            event=event,
            person=person,
            address=address,
            robot=robot,
            order=order,
            outcome=outcome,
            peer=peer,
            role=role,
            key=key,
            token=token,
            reason=reason,
        )
        with self._lock:
            self._flush(everything=False)
            since_s, count = self._open.get(entry, (0.0, -1))
            if count >= 0:
                self._open[entry] = (since_s, count + 1)
            elif len(self._open) >= MAX_REPEATED_EVENTS or not self._may_write(event):
                self._unlisted[event] += 1
            else:
                self._open[entry] = (self._clock(), 0)
                self._append(entry)

    def flush(self) -> None:
        """Writes the counts of repetitions that are `REPEAT_WINDOW_S` old. Call it every few seconds."""
        with self._lock:
            self._flush(everything=False)

    def close(self) -> None:
        """Writes all counts. Writing goes on to be possible."""
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
                reason = "more than can be listed came at once"
                self._append(AuditEntry(time="", event=event, reason=reason, count=self._unlisted.pop(event)))

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
            handle = self._opened(len(line))
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            logger.error("audit.not_written %s: %s", error, line.decode().strip())

    def _opened(self, size: int) -> int:
        """The newest file, with room for `size` bytes unless another process is about to make it."""
        handle = _open_for_append(self.path)
        try:
            if os.fstat(handle).st_size + size <= self._max_bytes:
                return handle
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.lstat(self.path)):  # else another process has put it aside
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
    """The audit log of this user's programs on this computer that belong to no run."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "user-sys" / AUDIT_FILE


def audit_operator_action(
    person: str, action: str, outcome: str = "done", *, run: Path | None = None, **facts: str
) -> None:
    """Audits an order that a person gave in a terminal: in the folder of the run `run`, else in `machine_audit_path`.

    Args:
        facts: more fields of `AuditEntry`, such as `robot` and `reason`.
    """
    path = machine_audit_path() if run is None else run / AUDIT_FILE
    log = AuditLog(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.error("audit.no_folder %s", error)
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0] or "this computer"
    log.write("order", person=person, address=address, order=action, outcome=outcome, **facts)  # type: ignore[arg-type]
    log.close()


def read_audit_log(path: Path) -> list[AuditEntry]:
    """Every entry that is kept, oldest first; none without a file. A damaged line is logged and left out.

    Raises:
        OSError: a file cannot be read.
    """
    return [entry for file in _log_files(path) for entry in _read_entries(file)]


def _open_for_append(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _log_files(path: Path) -> list[Path]:
    """Oldest first, whether or not they are there."""
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
