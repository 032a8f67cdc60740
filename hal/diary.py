"""Who drove what when: an append-only file of JSON lines for the people who answer for it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hal.undecodable import UNDECODABLE

logger = logging.getLogger(__name__)

DIARY = "drivers.jsonl"  # in the folder of a registry
MAX_FILE_BYTES = 8 << 20
FILES_KEPT = 8  # besides the newest, numbered from it backwards: drivers.jsonl.1 and so on
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
    newest. An entry that cannot be written is logged: a full disk must not end a lease. A file that is full is put
    aside for a new one, and the oldest of those is dropped. One thread calls it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path, self._clock, self._max_bytes = path, clock, max_bytes

    def write(self, what: What, resource: str, *, holder: str = "", token: int = 0, why: str = "") -> None:
        entry = Entry(unix_s=round(self._clock(), 3), what=what, resource=resource, holder=holder, token=token, why=why)
        line = msgspec.json.encode(entry) + b"\n"
        try:
            self._make_room(len(line))
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            logger.error("diary.not_written %s: %s", error, line.decode().strip())

    def _make_room(self, size: int) -> None:
        if not self._path.exists() or self._path.stat().st_size + size <= self._max_bytes:
            return
        files = _files(self._path)
        for newer, older in zip(files[1:], files, strict=False):
            if newer.exists():
                newer.replace(older)


def read_diary(path: Path) -> list[Entry]:
    """Every entry that is kept, oldest first; none where there is no file. A damaged line is logged and left out.
    Raises OSError."""
    return [entry for file in _files(path) for entry in _entries(file)]


def _files(path: Path) -> list[Path]:
    """Oldest first, whether or not they are there."""
    return [*(path.with_name(f"{path.name}.{number}") for number in range(FILES_KEPT, 0, -1)), path]


def _entries(path: Path) -> Iterator[Entry]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=Entry)
        except UNDECODABLE as error:
            logger.warning("diary.damaged_line file=%s line=%d: %s", path, number, error)
