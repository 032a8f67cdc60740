"""Who drove what when: an append-only file of JSON lines for the people who answer for it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from hal.undecodable import UNDECODABLE

logger = logging.getLogger(__name__)

DIARY = "drivers.jsonl"  # in the folder of a registry
What = Literal["granted", "reinstated", "released", "lapsed", "revoked", "quarantined", "draining", "restored"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `unix_s` are seconds since 1970; `holder` and `token` are those of the lease; `why` is for people."""

    unix_s: float
    what: What
    resource: str
    holder: str = ""
    token: int = 0
    why: str = ""


class Diary:
    """Entries are appended in one write each, so that a killed process leaves whole lines; a power cut may take the
    newest. An entry that cannot be written is logged: a full disk must not end a lease. One thread calls it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock

    def write(self, what: What, resource: str, *, holder: str = "", token: int = 0, why: str = "") -> None:
        entry = Entry(unix_s=round(self._clock(), 3), what=what, resource=resource, holder=holder, token=token, why=why)
        line = msgspec.json.encode(entry) + b"\n"
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            logger.error("diary.not_written %s: %s", error, line.decode().strip())


def read_diary(path: Path) -> list[Entry]:
    """Every entry, oldest first; none where there is no file. A damaged line is logged and left out. Raises OSError."""
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except UNDECODABLE as error:
            logger.warning("diary.damaged_line file=%s line=%d: %s", path, number, error)
    return entries
