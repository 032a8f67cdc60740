"""A log's folder: its segment files, its lock, and the sync that makes a new file's name durable."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

from user_sys.errors import StoreLocked
from user_sys.store.frame import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentScan, decode_segment_header

SUFFIX = ".seg"
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_logger = logging.getLogger(__name__)


def segment_path(path: Path, number: int) -> Path:
    """The file of segment `number` of the log at `path`."""
    return path / f"{number:010d}{SUFFIX}"


def segment_numbers(path: Path) -> list[int]:
    """The numbers of the log's segments, ascending; empty where `path` is no log."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name[:10]) for name in names if name.endswith(SUFFIX) and name[:-4].isdigit())


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_header(fd: int, number: int) -> SegmentHeader | None:
    return decode_segment_header(os.pread(fd, SEGMENT_HEADER_BYTES, 0), number)


class WriterLock:
    """An exclusive flock on ``<log>/LOCK``, which names its holder; the kernel lets go of it when the process dies."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise StoreLocked(f"{path} is being written by process {holder or 'unknown'}; stop it first") from None
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            _logger.warning("store.lock-unnamed path=%s: %s", path, error.strerror)  # the lock itself holds

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def last_sequence(path: Path, number: int) -> int:
    """The newest sequence number that segment `number` gives evidence of; -1 where it gives none."""
    fd = os.open(segment_path(path, number), os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = read_header(fd, number)
        scan = SegmentScan(fd, number, sequence=header.first_sequence if header else 0)
        for _ in scan:
            pass
        return scan.sequence - 1
    finally:
        os.close(fd)
