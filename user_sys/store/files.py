"""Every file operation of the log, as methods, so that a test can stand between the log and the disk.

The log's writer, its compaction and its readers touch files through a `Files` only. A subclass may fail, shorten,
delay, record or forget any call, or keep the files in memory.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

Buffer = bytes | memoryview

MAX_BUFFERS = 1024  # IOV_MAX
WRITE_BYTES = 256 << 10

# A write that fails with one of these took nothing that a later attempt could not take.
NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def free_bytes(path: Path) -> int:
    """What the disk of `path` has room for; 0 if it cannot be asked."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


class Files:
    """The operating system's files. All methods raise OSError, block for the disk, and may be called by any thread.

    Descriptors are small integers that `open` hands out; they are not inherited by child processes.
    """

    def open(self, path: Path, flags: int) -> int:
        """Opens a file with `os.open`'s flags; what it creates has mode 0666, less the umask."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        """The file's length in bytes."""
        return os.fstat(fd).st_size

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """At most `count` bytes; fewer at the file's end only."""
        return os.pread(fd, count, offset)

    def pread_into(self, fd: int, out: Sequence[memoryview], offset: int) -> int:
        """Fills one after the other, and returns how many bytes that was; fewer than they have at the file's end only.

        There are at most `MAX_BUFFERS` of them.
        """
        return os.preadv(fd, out, offset)

    def pread_cached(self, fd: int, out: Sequence[memoryview], offset: int) -> bool:
        """As `pread_into` where all of it is in memory. Else False at once, and the disk begins to read it."""
        size = sum(map(len, out))
        try:
            if os.preadv(fd, out, offset, os.RWF_NOWAIT) == size:
                return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):  # the latter: a file system that cannot tell
                raise
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        return False

    def map(self, fd: int, length: int) -> memoryview:
        """The file's first `length` bytes, read-only; valid for as long as it is referenced, also after `unlink`."""
        return memoryview(mmap.mmap(fd, length, prot=mmap.PROT_READ)) if length else memoryview(b"")

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes a leading part of `buffers`, joined, and returns how many bytes that was."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserves space for a range, lengthening the file with zeros where it was shorter."""
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        """Returns once the file's bytes and its length are on the disk."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Gives the file the name `target` in one step, in place of the file that had it."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def make_folder(self, path: Path) -> None:
        """Creates the folder and its parents where they are missing."""
        path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Returns once the names in the folder (not the files' contents) are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, fd: int) -> bool:
        """Takes the exclusive lock that lasts until the descriptor is closed; False at once where another has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


OS_FILES = Files()


def write_all(files: Files, fd: int, buffers: Iterable[Buffer], offset: int) -> int:
    """Writes all of `buffers`, joined, at `offset`, and returns where they end. Raises OSError.

    In steps of `WRITE_BYTES`: a single write of megabytes takes five times as long now and then (ext4, measured).
    """
    queue = deque(buffer for buffer in buffers if buffer)
    while queue:
        written = files.pwritev(fd, next_buffers(queue), offset)
        offset += written
        drop_written(queue, written)
    return offset


def replace_durably(files: Files, path: Path, content: bytes) -> None:
    """Puts `content` at `path` in one step: a crash leaves the old bytes or the new. Raises OSError; blocks.

    One thread at a time for each path. Its folder is made where it is missing.
    """
    files.make_folder(path.parent)
    replace_file(files, path, content)
    files.sync_folder(path.parent)


def replace_file(files: Files, path: Path, content: bytes) -> None:
    """As `replace_durably`, but which of the two a power cut leaves is known only once the folder is synced."""
    fresh = path.with_suffix(".tmp")  # what a crash leaves of it in a log's folder, its writer removes
    fd = files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(files, fd, [content], 0)
        files.fsync(fd)
    finally:
        files.close(fd)
    files.rename(fresh, path)


def next_buffers(queue: Iterable[Buffer]) -> list[Buffer]:
    """The head of `queue`, as much as one write should take."""
    buffers: list[Buffer] = []
    size = 0
    for buffer in itertools.islice(queue, MAX_BUFFERS):
        buffers.append(buffer)
        size += len(buffer)
        if size >= WRITE_BYTES:
            break
    return buffers


def drop_written(queue: deque[Buffer], count: int) -> None:
    """Takes `count` written bytes off `queue`; a buffer written in part stays in part. Raises OSError for none."""
    if count <= 0:
        raise OSError(errno.EIO, "the disk took no bytes and gave no reason")
    while count:
        head = queue[0]
        if len(head) > count:
            queue[0] = memoryview(head)[count:]
            return
        count -= len(head)
        queue.popleft()
