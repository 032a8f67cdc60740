"""A log's folder: the names of its segment files, which of them count, and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from user_sys.errors import StoreLocked
from user_sys.store.files import NO_SPACE, REAL, Files
from user_sys.store.frame import SEGMENT_HEADER_BYTES, SegmentHeader, decode_segment_header

SUFFIX = ".seg"
FOOTER_SUFFIX = ".footer"
TEMPORARY = ".tmp"
_NAME = re.compile(r"(\d{10})(?:-(\d{5})\.(\d{5}))?\.seg")
_logger = logging.getLogger(__name__)


class SegmentName(NamedTuple):
    """A segment file, as its name tells: it holds the records of `span` segment numbers from `number` on."""

    number: int
    span: int = 1
    generation: int = 0

    @property
    def stop(self) -> int:
        """The number after the last that it stands for."""
        return self.number + self.span

    @property
    def footer_copy(self) -> str:
        """The name of the file that holds its footer once more."""
        return str(self).removesuffix(SUFFIX) + FOOTER_SUFFIX

    def __str__(self) -> str:
        rewritten = f"-{self.span:05d}.{self.generation:05d}" if self.generation else ""
        return f"{self.number:010d}{rewritten}{SUFFIX}"


def parse_name(name: str) -> SegmentName | None:
    """What a file's name says; None where it is no segment's."""
    match = _NAME.fullmatch(name)
    return SegmentName(int(match[1]), int(match[2] or 1), int(match[3] or 0)) if match else None


def choose(names: Iterable[SegmentName]) -> tuple[list[SegmentName], list[SegmentName]]:
    """The files that make up the log, in order, and those whose place a later generation has taken.

    A rewritten file gets its name only once it is whole and durable, so the highest generation always counts: with the
    manifest, with an old one, and with none.
    """
    owned: set[int] = set()
    chosen, shadowed = [], []
    for name in sorted(names, key=lambda name: -name.generation):
        numbers = range(name.number, name.stop)
        if owned.isdisjoint(numbers):
            owned.update(numbers)
            chosen.append(name)
        else:
            shadowed.append(name)
    return sorted(chosen), shadowed


def list_segments(path: Path, files: Files = REAL) -> list[SegmentName]:
    """Every segment file in the folder, in no order; none where `path` is no folder."""
    try:
        names = files.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [parsed for name in names if (parsed := parse_name(name)) is not None]


def remove_segment(files: Files, path: Path, name: SegmentName) -> None:
    """Deletes a segment's file and the copy of its footer. Raises OSError."""
    files.unlink(path / str(name))
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path / name.footer_copy)


def segment_numbers(path: Path, files: Files = REAL) -> list[int]:
    """The number of each of the log's segments, ascending; empty where `path` is no log."""
    return [name.number for name in choose(list_segments(path, files))[0]]


def segment_path(path: Path, number: int, span: int = 1, generation: int = 0) -> Path:
    """The file of a segment of the log at `path`."""
    return path / str(SegmentName(number, span, generation))


def read_header(files: Files, fd: int) -> SegmentHeader | None:
    return decode_segment_header(files.pread(fd, SEGMENT_HEADER_BYTES, 0))


class WriterLock:
    """An exclusive lock on ``<log>/LOCK``, which names its holder; the kernel lets go of it when the process dies."""

    def __init__(self, path: Path, files: Files) -> None:
        self._files = files
        self._fd = files.open(path / "LOCK", os.O_RDWR | os.O_CREAT)
        try:
            self._take(path)
        except BaseException:
            self.release()
            raise

    def _take(self, path: Path) -> None:
        if not self._files.lock(self._fd):
            holder = self._files.pread(self._fd, 64, 0).decode(errors="replace").strip()
            raise StoreLocked(f"{path} is being written by process {holder or 'unknown'}; stop it first")
        try:
            self._files.ftruncate(self._fd, 0)
            self._files.pwritev(self._fd, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            _logger.warning("store.lock-unnamed path=%s: %s", path, error.strerror)  # the lock itself holds

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def is_written(path: Path) -> bool:
    """Whether a living process has the lock of the log at `path`. Never waits; a writer that starts within the same
    microseconds is refused."""
    try:
        fd = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
