"""Checkpoints: everything that a learner needs to resume as if it had never stopped.

A checkpoint is a folder, ``<number>-<updates>.checkpoint``; each new one has a greater number. It holds the arrays as
safetensors files of at most `SHARD_BYTES` (more for a larger array), and ``index.json``: format version, scalars, and
length and BLAKE2b-256 of each file, with a digest of its own. The folder is written under a temporary name, synced and
renamed: after a killed process or a power cut a checkpoint is complete or absent. Older ones are removed only then.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from hal.durable import sync_folder
from user_sys.codec import Array
from user_sys.errors import DiskFull, RunError, WireError

FORMAT_VERSION = 2
SHARD_BYTES = 1 << 30
WRITE_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.5
RESTART_FLAG = "--restart-if-unreadable"
_INDEX = "index.json"
_SUFFIX, _PARTIAL_SUFFIX = ".checkpoint", ".tmp"
_NAME = re.compile(rf"(\d+)(?:-\d+)?{re.escape(_SUFFIX)}")
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)

Scalars = dict[str, int | float | str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: `arrays` by name and finite `scalars`; both are restored bit-identically."""

    updates: int
    scalars: Scalars
    arrays: Mapping[str, Array]

    @property
    def size_bytes(self) -> int:
        """The size of the arrays."""
        return sum(np.asarray(value).nbytes for value in self.arrays.values())


class _Shard(msgspec.Struct, frozen=True):
    size_bytes: int
    blake2b: str


class _CheckpointIndex(msgspec.Struct, frozen=True):
    updates: int
    scalars: Scalars
    shards: tuple[_Shard, ...]

    def files(self) -> Iterator[tuple[str, _Shard]]:
        for number, shard in enumerate(self.shards, 1):
            yield f"arrays-{number:05d}-of-{len(self.shards):05d}.safetensors", shard


class _Format(msgspec.Struct, frozen=True):
    format: int


class _SealedIndex(_Format, frozen=True):
    blake2b: str
    index: msgspec.Raw


@dataclass(frozen=True)
class CheckpointScan:
    """The checkpoints of a folder, down to the newest readable one.

    Attributes:
        readable: the newest readable checkpoint; None if there is none.
        unreadable: newer ones, with the reason for each.
    """

    readable: Path | None
    unreadable: Mapping[Path, str]

    @property
    def is_all_unreadable(self) -> bool:
        """There are checkpoints, but none can be read."""
        return self.readable is None and bool(self.unreadable)

    def __str__(self) -> str:
        return "; ".join(f"{path}: {reason}" for path, reason in self.unreadable.items())


def scan_checkpoints(folder: Path) -> CheckpointScan:
    """Reads the checkpoints of `folder` completely, from the newest on, until one is intact."""
    unreadable: dict[Path, str] = {}
    for path in _list_checkpoints(folder):
        if not (reason := _read_error(path)):
            return CheckpointScan(path, unreadable)
        unreadable[path] = reason
    return CheckpointScan(None, unreadable)


def load_latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Loads the newest readable checkpoint of `folder`; logs newer ones. Returns None if the folder has none.

    Raises:
        RunError: there are checkpoints, but none can be read.
    """
    found = scan_checkpoints(folder)
    if found.is_all_unreadable:
        raise RunError(unreadable_message(folder, found))
    for path, reason in found.unreadable.items():
        _log.error("checkpoint.unreadable path=%s: %s; resuming from %s", path, reason, found.readable)
    return None if found.readable is None else read_checkpoint(found.readable)


def unreadable_message(folder: Path, found: CheckpointScan) -> str:
    """Returns the error message if no checkpoint of `folder` can be read."""
    return (
        f"no checkpoint in {folder} can be read, so its training would be lost: {found}. Restore a copy of one, or "
        f"resume with the version of user-sys that wrote them. To restart the training, resume with {RESTART_FLAG}: "
        "it keeps these files and all recorded episodes"
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Loads the checkpoint at `path`.

    Raises:
        WireError: it is incomplete, damaged, or of another format version; the message says which.
    """
    from safetensors import SafetensorError  # only the learner's computer has it
    from safetensors.numpy import load_file

    if reason := _read_error(path):
        raise WireError(f"{path}: {reason}")
    try:
        index = _read_index(path)
        arrays: dict[str, Array] = {}
        for name, _ in index.files():
            arrays |= load_file(path / name)
    except (OSError, SafetensorError) as error:
        raise WireError(f"{path}: its content cannot be decoded: {error}") from None
    return Checkpoint(index.updates, index.scalars, arrays)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes `checkpoint` durably, then removes all but the newest `keep` readable ones. Blocks for the disk.

    Raises:
        DiskFull: there is no room; nothing of it stays, and the older checkpoints remain.
        RunError: the folder cannot be written, or a scalar is not finite.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"*{_PARTIAL_SUFFIX}"):  # left by a killed writer
            shutil.rmtree(unfinished)
        older = _list_checkpoints(folder)
        path = folder / f"{_number(older[0]) + 1 if older else 0:06d}-{checkpoint.updates:012d}{_SUFFIX}"
        _write_atomically(path, checkpoint, shard_bytes)
        _prune(older, keep - 1)
    except OSError as error:
        if error.errno in _NO_SPACE_ERRNOS:
            raise DiskFull(folder, checkpoint.size_bytes, shutil.disk_usage(folder).free) from error
        raise RunError(f"a checkpoint cannot be written to {folder}: {error.strerror or error}") from error
    return path


def quarantine_checkpoints(folder: Path) -> Path:
    """Moves the checkpoints of `folder` into a new folder in it, and returns that. Raises OSError."""
    aside = next(path for n in itertools.count(1) if not (path := folder / f"unreadable-{n}").exists())
    aside.mkdir()
    for path in _list_checkpoints(folder):
        path.rename(aside / path.name)
    sync_folder(aside)
    sync_folder(folder)
    return aside


@contextmanager
def exclusive_writer(folder: Path, stop: threading.Event) -> Iterator[bool]:
    """Locks `folder` against another learner, also on another computer with the same storage.

    A learner that lost its connection and was replaced may still run. Blocks while another process holds the lock, and
    logs
    this once. The lock ends with the process.

    Yields:
        False if `stop` was set before.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / "lock", "ab")
    except OSError as error:
        raise RunError(
            f"checkpoints cannot be written to {folder}: {error.strerror}; free some space, or make it writable"
        ) from error
    with handle:
        yield _lock(handle, stop)


def _lock(handle: BinaryIO, stop: threading.Event) -> bool:
    said = False
    while not stop.is_set():
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not said:
                said = True
                _log.warning("learner.waiting another process holds %s", handle.name)
            stop.wait(LOCK_POLL_S)
    return False


class CheckpointWriter:
    """Writes checkpoints in its own thread, so that training waits only for a copy in memory.

    One thread calls it. While a checkpoint is being written, the next one is declined.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._error: RunError | None = None

    @property
    def is_busy(self) -> bool:
        """A checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """The last checkpoint could not be written; `finish` and `write` raise the error."""
        return self._error is not None

    def write(self, checkpoint: Checkpoint) -> bool:
        """Starts to write. Returns False while the previous one is being written. The arrays must not change
        afterwards.

        Raises:
            RunError: the previous checkpoint could not be written.
        """
        if self.is_busy:
            return False
        self.finish()
        self._thread = threading.Thread(target=self._save, args=(checkpoint,), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> None:
        """Waits until the started checkpoint is on disk.

        Raises:
            DiskFull: there was no room for it.
            RunError: it could not be written, or the disk exceeded `WRITE_TIMEOUT_S`.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(WRITE_TIMEOUT_S)
            if thread.is_alive():
                raise RunError(f"the disk of {self._folder} took longer than {WRITE_TIMEOUT_S:.0f} s for a checkpoint")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _save(self, checkpoint: Checkpoint) -> None:
        try:
            save_checkpoint(self._folder, checkpoint, self._keep)
        except RunError as error:
            self._error = error


def _list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints, newest first."""
    named = [path for path in folder.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (_number(path), path.name), reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None  # `_list_checkpoints` returns no others
    return int(match[1])


def _prune(older: list[Path], keep: int) -> None:
    """Removes the checkpoints of `older` beyond the newest `keep` readable ones."""
    for path in older:
        if keep <= 0:
            _remove(path)
        elif not _read_error(path):
            keep -= 1


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_suffix(_PARTIAL_SUFFIX)  # atomically: half a checkpoint would look damaged
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_atomically(path: Path, checkpoint: Checkpoint, shard_bytes: int) -> None:
    beside = path.with_suffix(_PARTIAL_SUFFIX)
    try:
        beside.mkdir()
        _write_files(beside, checkpoint, shard_bytes)
        sync_folder(beside)
        beside.rename(path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # a full disk needs the space
        raise
    sync_folder(path.parent)


def _write_files(folder: Path, checkpoint: Checkpoint, shard_bytes: int) -> None:
    from safetensors.numpy import save as encode

    parts = list(_split(checkpoint.arrays, shard_bytes))
    index = _CheckpointIndex(checkpoint.updates, checkpoint.scalars, tuple(_Shard(0, "") for _ in parts))
    written = []
    for part, (name, _) in zip(parts, index.files(), strict=True):
        content = encode({key: np.asarray(checkpoint.arrays[key], order="C") for key in part})
        _write_durably(folder / name, content)
        written.append(_Shard(len(content), _digest(content)))
    index = msgspec.structs.replace(index, shards=tuple(written))
    encoded = msgspec.json.encode(index)
    try:
        msgspec.json.decode(encoded, type=_CheckpointIndex)
    except DECODE_ERRORS as error:
        raise RunError(f"a checkpoint with these scalars could not be read back: {error}") from None
    _write_durably(
        folder / _INDEX, msgspec.json.encode(_SealedIndex(FORMAT_VERSION, _digest(encoded), msgspec.Raw(encoded)))
    )


def _split(arrays: Mapping[str, Array], shard_bytes: int) -> Iterator[list[str]]:
    """Yields the names of the arrays of each file."""
    part: list[str] = []
    room = shard_bytes
    for name, value in arrays.items():
        size = np.asarray(value).nbytes
        if part and size > room:
            yield part
            part, room = [], shard_bytes
        part.append(name)
        room -= size
    if part:
        yield part


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _read_error(path: Path) -> str:
    """Returns why the checkpoint at `path` cannot be read; empty if it can. Reads all of it the first time."""
    try:
        if not path.is_dir():
            return f"it has another format version; this program reads {FORMAT_VERSION}"
        stats = ((file.name, file.stat()) for file in sorted(path.iterdir()))
        return _cached_read_error(
            path, tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        )
    except OSError as error:
        return f"{error.filename or path} cannot be read: {error.strerror}"


@lru_cache(maxsize=64)
def _cached_read_error(path: Path, _state: tuple[tuple[str, int, int, int], ...]) -> str:
    try:
        for name, shard in _read_index(path).files():
            if not (path / name).exists():
                return f"its file {name} is missing"
            if (size := (path / name).stat().st_size) != shard.size_bytes:
                return f"its file {name} has {size} bytes, expected {shard.size_bytes}"
            with open(path / name, "rb") as stream:
                if hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest() != shard.blake2b:
                    return f"its file {name} is damaged: its digest differs"
    except WireError as error:
        return str(error)
    return ""


def _read_index(path: Path) -> _CheckpointIndex:
    """Raises WireError if it is missing, incomplete, damaged or of another format version; OSError if the disk
    fails.
    """
    try:
        raw = (path / _INDEX).read_bytes()
        if (found := msgspec.json.decode(raw, type=_Format).format) != FORMAT_VERSION:
            raise WireError(f"its format version is {found}; this program reads {FORMAT_VERSION}")
        sealed = msgspec.json.decode(raw, type=_SealedIndex)
        if _digest(sealed.index) != sealed.blake2b:
            raise WireError(f"its file {_INDEX} is damaged: its digest differs")
        return msgspec.json.decode(sealed.index, type=_CheckpointIndex)
    except FileNotFoundError:
        raise WireError(f"its file {_INDEX} is missing") from None
    except DECODE_ERRORS as error:
        raise WireError(f"its file {_INDEX} is incomplete or damaged: {error}") from None


def _digest(content: bytes | msgspec.Raw) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
