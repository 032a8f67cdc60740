"""File operations of the log, as methods of `Files`, so that a test can replace the disk.

Writer, compaction and readers touch files through a `Files` only. A subclass can fail, shorten, delay, record or
omit any call, or keep the files in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hal.durable import make_folder_durably, open_or_create

Buffer = bytes | memoryview

CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC
MAX_BUFFERS = 1024  # IOV_MAX
WRITE_BYTES = 256 << 10
BLOCK_BYTES = 4096  # of a disk: what one bad sector makes unreadable
MAX_BAD_BLOCKS = 64  # in one read

# A write that fails with one of these can be retried.
NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def free_bytes(path: Path) -> int:
    """Free space on the disk of `path`; 0 if the disk cannot be queried."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


class Files:
    """The operating system's files. All methods raise OSError, block for the disk, and are thread-safe.

    Descriptors are small integers from `open`; child processes do not inherit them.
    """

    def open(self, path: Path, flags: int) -> int:
        """Opens a file with the flags of `os.open`; with O_CREAT as `open_or_create` does."""
        return open_or_create(path, flags) if flags & os.O_CREAT else os.open(path, flags | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        """The file's length in bytes."""
        return os.fstat(fd).st_size

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """At most `count` bytes; fewer only at the file's end."""
        return os.pread(fd, count, offset)

    @contextlib.contextmanager
    def opened(self, path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
        """As `open`, for the duration of the context."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes a leading part of the joined `buffers`; returns the number of bytes written."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserves space for a range and extends the file with zeros if it is shorter."""
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        """Returns once the file's bytes and length are durable."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Renames atomically and replaces an existing `target`."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def modified_ns(self, folder: Path) -> int:
        """When a name in the folder last changed, by the file system's clock; 0 without a folder."""
        try:
            return os.stat(folder).st_mtime_ns
        except FileNotFoundError:
            return 0

    def make_folder(self, path: Path) -> None:
        """Creates the folder and its missing parents; returns once their names are durable."""
        make_folder_durably(path)

    def sync_folder(self, path: Path) -> None:
        """Returns once the names in the folder are durable; contents of the files are not synced."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, fd: int) -> bool:
        """Takes an exclusive lock until the descriptor is closed; returns False at once if another process holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


OS_FILES = Files()


def pread_readable(files: Files, fd: int, count: int, offset: int) -> bytes:
    """As `Files.pread`, with zeros in place of blocks that the disk cannot read (EIO); checksums find these.

    Raises OSError: more than `MAX_BAD_BLOCKS` cannot be read, as of a disk that has failed, or another error.
    """
    try:
        return files.pread(fd, count, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    end = max(offset, min(offset + count, files.size(fd)))
    starts = [offset, *range(offset - offset % BLOCK_BYTES + BLOCK_BYTES, end, BLOCK_BYTES)]
    blocks, bad = list[bytes](), 0
    for at, stop in zip(starts, [*starts[1:], end], strict=True):
        try:
            blocks.append(files.pread(fd, stop - at, at))
        except OSError as error:
            bad += 1
            if error.errno != errno.EIO or bad > MAX_BAD_BLOCKS:
                raise
            blocks.append(bytes(stop - at))
    return b"".join(blocks)


def write_all(files: Files, fd: int, buffers: Iterable[Buffer], offset: int) -> int:
    """Writes all of the joined `buffers` at `offset`; returns the end offset. Raises OSError.

    Writes at most `WRITE_BYTES` at once: on ext4, larger writes sometimes take five times as long (measured).
    """
    queue = deque(buffer for buffer in buffers if buffer)
    while queue:
        written = files.pwritev(fd, next_buffers(queue), offset)
        offset += written
        drop_written(queue, written)
    return offset


def replace_durably(files: Files, path: Path, content: bytes) -> None:
    """Replaces the file at `path` atomically: a crash leaves the old or the new content. Raises OSError; blocks.

    Creates a missing folder. One thread at a time per path.
    """
    files.make_folder(path.parent)
    replace_file(files, path, content)
    files.sync_folder(path.parent)


def replace_file(files: Files, path: Path, content: bytes) -> None:
    """As `replace_durably`, without the sync of the folder. Until then a power cut may restore the old content.

    After an error, a full disk has the space of the new content back.
    """
    fresh = path.with_suffix(".tmp")  # the next writer deletes what a kill leaves
    try:
        with files.opened(fresh, CREATE) as fd:
            write_all(files, fd, [content], 0)
            files.fsync(fd)
        files.rename(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(fresh)
        raise


def next_buffers(queue: Iterable[Buffer]) -> list[Buffer]:
    """The first buffers of `queue`, as many as one write should take."""
    buffers: list[Buffer] = []
    size = 0
    for buffer in itertools.islice(queue, MAX_BUFFERS):
        buffers.append(buffer)
        size += len(buffer)
        if size >= WRITE_BYTES:
            break
    return buffers


def drop_written(queue: deque[Buffer], count: int) -> None:
    """Removes `count` written bytes from `queue`; a partly written buffer keeps its rest. Raises OSError for 0."""
    if count <= 0:
        raise OSError(errno.EIO, "the disk wrote 0 bytes without an error")
    while count:
        head = queue[0]
        if len(head) > count:
            queue[0] = memoryview(head)[count:]
            return
        count -= len(head)
        queue.popleft()
