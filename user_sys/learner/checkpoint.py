"""Checkpoints: everything that a learner needs to resume as if it had never stopped.

A checkpoint is a folder, ``<number>-<updates>.checkpoint``; each new one has a greater number. It holds the arrays as
safetensors files of at most `SHARD_BYTES` (more for a larger array), the first of which holds the scalars too, and
``index.json``: format version, and length and BLAKE2b-256 of each file. The folder is written under a temporary name,
synced and renamed: after a killed process or a power cut a checkpoint is complete or absent. Older ones are removed
only then.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably, sync_folder
from hal.machine_folder import try_lock
from user_sys.codec import Array
from user_sys.errors import DiskFull, RunError, WireError
from user_sys.trace import span

FORMAT_VERSION = 3
SHARD_BYTES = 1 << 30
WRITE_TIMEOUT_S = 60.0  # and the time that the slowest disk takes for the arrays
MIN_DISK_BYTES_PER_S = 20e6
LOCK_POLL_S = 0.5
RESTART_FLAG = "--restart-if-unreadable"
_INDEX = "index.json"
_SCALARS = "scalars.json"  # the array that holds the scalars
_SUFFIX, _PARTIAL_SUFFIX = ".checkpoint", ".tmp"
_NAME = re.compile(rf"(\d+)-\d+{re.escape(_SUFFIX)}")
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
    format: int
    shards: tuple[_Shard, ...] = ()

    def files(self) -> Iterator[tuple[str, _Shard]]:
        for number, shard in enumerate(self.shards, 1):
            yield f"arrays-{number:05d}-of-{len(self.shards):05d}.safetensors", shard


class _Scalars(msgspec.Struct, frozen=True):
    updates: int
    scalars: Scalars


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

    @property
    def has_updates(self) -> bool:
        """The readable checkpoint is not that of the start of training."""
        return self.readable is not None and int(self.readable.stem.split("-")[1]) > 0

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
    from safetensors import SafetensorError, safe_open  # only the learner's computer has it

    if reason := _read_error(path):
        raise WireError(f"{path}: {reason}")
    arrays: dict[str, Array] = {}
    try:
        for name, _ in _read_index(path).files():
            with safe_open(path / name, "numpy") as file:
                arrays |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
        found = msgspec.json.decode(arrays.pop(_SCALARS).tobytes(), type=_Scalars)
    except (OSError, SafetensorError, KeyError, *DECODE_ERRORS) as error:
        raise WireError(f"{path}: its content cannot be decoded: {error}") from None
    return Checkpoint(found.updates, found.scalars, arrays)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes `checkpoint` durably, then removes all but the newest `keep` readable ones. Blocks for the disk.

    Raises:
        DiskFull: there is no room; nothing of it stays, and the older checkpoints remain.
        RunError: the folder cannot be written, or a scalar is not finite.
    """
    try:
        make_folder_durably(folder)
        for unfinished in folder.glob(f"*{_PARTIAL_SUFFIX}"):  # left by a killed writer
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        older = _list_checkpoints(folder)
        path = folder / f"{_number(older[0]) + 1 if older else 0:06d}-{checkpoint.updates:012d}{_SUFFIX}"
        with span("write checkpoint"):
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
    logs this once. The lock ends with the process.

    Yields:
        False if `stop` was set before.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        make_folder_durably(folder)
        handle = open(folder / "lock", "ab")
    except OSError as error:
        raise RunError(
            f"checkpoints cannot be written to {folder}: {error.strerror}; free some space, or make it writable"
        ) from error
    with handle:
        yield _lock(handle, stop)


def _lock(handle: BinaryIO, stop: threading.Event) -> bool:
    is_logged = False
    while not stop.is_set():
        if try_lock(handle.fileno(), LOCK_POLL_S):
            return True
        if not is_logged:
            is_logged = True
            _log.warning("learner.waiting another process holds %s", handle.name)
    return False


class CheckpointWriter:
    """Writes checkpoints in a thread, so that training waits only for a copy in memory. One thread calls it."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[Path] | None = None
        self._timeout_s = WRITE_TIMEOUT_S

    @property
    def is_busy(self) -> bool:
        """A checkpoint is being written."""
        return self._written is not None and not self._written.done()

    @property
    def has_failed(self) -> bool:
        """The last checkpoint could not be written; `finish` and `write` raise the error."""
        return self._written is not None and self._written.done() and self._written.exception() is not None

    def write(self, checkpoint: Checkpoint) -> None:
        """Starts to write, after the previous one. The arrays must not change afterwards. Raises as `finish`."""
        self.finish()
        self._timeout_s = WRITE_TIMEOUT_S + checkpoint.size_bytes / MIN_DISK_BYTES_PER_S
        self._written = self._thread.submit(save_checkpoint, self._folder, checkpoint, self._keep)

    def finish(self) -> None:
        """Waits until the started checkpoint is on disk.

        Raises:
            DiskFull: there was no room for it.
            RunError: it could not be written, or the disk took longer than any disk should.
        """
        written, self._written = self._written, None
        if written is not None:
            try:
                written.result(self._timeout_s)
            except TimeoutError:
                raise RunError(
                    f"the disk of {self._folder} took longer than {self._timeout_s:.0f} s for a checkpoint"
                ) from None


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
    doomed = path.with_suffix(_PARTIAL_SUFFIX)  # atomically: half a checkpoint would look damaged
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_atomically(path: Path, checkpoint: Checkpoint, shard_bytes: int) -> None:
    partial = path.with_suffix(_PARTIAL_SUFFIX)
    try:
        partial.mkdir()
        _write_files(partial, checkpoint, shard_bytes)
        sync_folder(partial)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
        raise
    sync_folder(path.parent)


def _write_files(folder: Path, checkpoint: Checkpoint, shard_bytes: int) -> None:
    from safetensors.numpy import save as encode

    scalars = msgspec.json.encode(_Scalars(checkpoint.updates, checkpoint.scalars))
    try:
        msgspec.json.decode(scalars, type=_Scalars)
    except DECODE_ERRORS as error:
        raise RunError(f"a checkpoint with these scalars could not be read back: {error}") from None
    arrays = {_SCALARS: np.frombuffer(scalars, np.uint8), **checkpoint.arrays}
    parts = list(_split(arrays, shard_bytes))
    written = []
    for part, (name, _) in zip(parts, _CheckpointIndex(0, (_Shard(0, ""),) * len(parts)).files(), strict=True):
        content = encode({key: np.asarray(arrays[key], order="C") for key in part})
        _write_durably(folder / name, content)
        written.append(_Shard(len(content), hashlib.blake2b(content, digest_size=32).hexdigest()))
    _write_durably(folder / _INDEX, msgspec.json.encode(_CheckpointIndex(FORMAT_VERSION, tuple(written))))


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
        index = msgspec.json.decode((path / _INDEX).read_bytes(), type=_CheckpointIndex)
    except FileNotFoundError:
        raise WireError(f"its file {_INDEX} is missing") from None
    except DECODE_ERRORS as error:
        raise WireError(f"its file {_INDEX} is incomplete or damaged: {error}") from None
    if index.format != FORMAT_VERSION:
        raise WireError(f"its format version is {index.format}; this program reads {FORMAT_VERSION}")
    if not index.shards:
        raise WireError(f"its file {_INDEX} is incomplete or damaged: it lists no file")
    return index
