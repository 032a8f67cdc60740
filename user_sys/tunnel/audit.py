"""Who connected, from where, with which key, and who was refused: an append-only file for the people who answer for it.

One JSON line an event. The file is bounded: it is rotated by size, and refusals, which strangers can cause at will, are
held back when they come too fast; the next one that is written says how many were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from user_sys.tunnel.keys import fingerprint

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 8 << 20
FILES_KEPT = 8
REFUSALS_PER_S = 2.0
REFUSALS_AT_ONCE = 50.0

Event = Literal["opened", "closed", "refused"]


class Audit(Protocol):
    """Takes an event; returns soon, raises nothing."""

    def __call__(
        self, event: Event, *, public: str = "", peer: str = "", role: str = "", address: str = "", reason: str = ""
    ) -> None: ...


def unaudited(event: Event, **facts: str) -> None:
    """For servers that nobody has to answer for."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        time: UTC, ISO 8601.
        peer, role: as the key says, or as the stranger claimed; empty where it said nothing.
        key: fingerprint of the public key (`keys.fingerprint`); empty where there was none.
        reason: why the session ended or was refused.
        held_back: refusals before this one that were not written.
    """

    time: str
    event: Event
    peer: str = ""
    role: str = ""
    key: str = ""
    address: str = ""
    reason: str = ""
    held_back: int = 0


class AuditLog:
    """Any thread may write; nothing here raises or waits for the disk's sync. A full disk is logged, once an event."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Raises OSError: the file cannot be opened."""
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._file = _File(path, maxBytes=max_bytes, backupCount=FILES_KEPT, encoding="utf-8")
        self._allowance, self._counted_s = REFUSALS_AT_ONCE, clock()
        self._held_back = 0

    def write(
        self, event: Event, *, public: str = "", peer: str = "", role: str = "", address: str = "", reason: str = ""
    ) -> None:
        with self._lock:
            if event == "refused" and not self._may_refuse():
                self._held_back += 1
                return
            held_back, self._held_back = (self._held_back, 0) if event == "refused" else (0, self._held_back)
            entry = AuditEntry(
                time=_utc(),
                event=event,
                peer=peer[:128],
                role=role,
                key=fingerprint(public) if public else "",
                address=address,
                reason=reason[:500],
                held_back=held_back,
            )
            line = msgspec.json.encode(entry).decode()
            self._file.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            logger.error("audit.not_written %s", error)

    def _may_refuse(self) -> bool:
        now = self._clock()
        self._allowance = min(REFUSALS_AT_ONCE, self._allowance + (now - self._counted_s) * REFUSALS_PER_S)
        self._counted_s = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        logger.exception("audit.not_written %s", record.getMessage())


def _utc() -> str:
    now_ns = time.time_ns()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9)) + f".{now_ns // 10**6 % 1000:03d}Z"
