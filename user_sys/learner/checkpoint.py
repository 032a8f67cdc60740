"""Checkpoints: everything that a learner needs to go on as if it had never stopped.

A checkpoint is a folder, ``<number>-<updates>.checkpoint``; the number grows with each one that is written. It holds
the arrays as safetensors files of at most `SHARD_BYTES`, unless one array alone is larger, and ``index.json``: format
version, scalars, and length and BLAKE2b-256 of each file, under a digest of its own. The folder is written under a
temporary name, synced, and renamed: after a killed process or a power cut a checkpoint is whole or absent. Older ones
are removed only then. Nothing is ever pickled.
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
    """`arrays` by name and finite `scalars`; both come back bit-identical."""

    updates: int
    scalars: Scalars
    arrays: Mapping[str, Array]

    @property
    def size_bytes(self) -> int:
        """Of the arrays."""
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
    """The checkpoints of a folder, from the newest to the newest readable one.

    Attributes:
        readable: the newest readable one; None if there is none.
        unreadable: those newer than it, and why each cannot be read.
    """

    readable: Path | None
    unreadable: Mapping[Path, str]

    @property
    def is_all_unreadable(self) -> bool:
        """There are checkpoints, and none can be read."""
        return self.readable is None and bool(self.unreadable)

    def __str__(self) -> str:
        return "; ".join(f"{path}: {reason}" for path, reason in self.unreadable.items())


def scan_checkpoints(folder: Path) -> CheckpointScan:
    """Reads the checkpoints of `folder`, each file whole, until one is sound."""
    unreadable: dict[Path, str] = {}
    for path in _list_checkpoints(folder):
        if not (reason := _read_error(path)):
            return CheckpointScan(path, unreadable)
        unreadable[path] = reason
    return CheckpointScan(None, unreadable)


def load_latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest readable checkpoint of `folder`; newer ones are named in the log. None if the folder has none.

    Raises:
        RunError: there are checkpoints, and none can be read.
    """
    found = scan_checkpoints(folder)
    if found.is_all_unreadable:
        raise RunError(unreadable_message(folder, found))
    for path, reason in found.unreadable.items():
        _log.error("checkpoint.unreadable path=%s: %s; going on from %s", path, reason, found.readable)
    return None if found.readable is None else read_checkpoint(found.readable)


def unreadable_message(folder: Path, found: CheckpointScan) -> str:
    """What to tell a person if no checkpoint of `folder` can be read."""
    return (
        f"no checkpoint in {folder} can be read, so its training would be lost: {found}. Put back a copy of one, or "
        f"resume with the version of user-sys that wrote them. To begin the training anew, resume with {RESTART_FLAG}: "
        "it keeps these files and everything that was recorded"
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`.

    Raises:
        WireError: it is torn, damaged, or of another format version; the message says which.
    """
    from safetensors import SafetensorError  # the learner's computer alone has it
    from safetensors.numpy import load_file

    if reason := _read_error(path):
        raise WireError(f"{path}: {reason}")
    try:
        index = _read_index(path)
        arrays: dict[str, Array] = {}
        for name, _ in index.files():
            arrays |= load_file(path / name)
    except (OSError, SafetensorError) as error:
        raise WireError(f"{path}: its content does not decode: {error}") from None
    return Checkpoint(index.updates, index.scalars, arrays)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes `checkpoint` durably, then removes those older than the newest `keep` readable ones; blocks for the disk.

    Raises:
        DiskFull: there is no room; nothing of it stays, and the older checkpoints are still there.
        RunError: the folder cannot be written, or a scalar is not finite.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"*{_PARTIAL_SUFFIX}"):  # of a writer that was killed
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
    """Moves the checkpoints of `folder` into a new folder in it, which is returned. Raises OSError."""
    aside = next(path for n in itertools.count(1) if not (path := folder / f"unreadable-{n}").exists())
    aside.mkdir()
    for path in _list_checkpoints(folder):
        path.rename(aside / path.name)
    sync_folder(aside)
    sync_folder(folder)
    return aside


@contextmanager
def exclusive_writer(folder: Path, stop: threading.Event) -> Iterator[bool]:
    """Keeps a second learner off `folder`, be it on another computer that shares the storage: one that is cut off, and
    has been replaced, may be alive still. Blocks while another has it, and says so once; ends with the process.

    Yields:
        False where `stop` was set first.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / "lock", "ab")
    except OSError as error:
        raise RunError(f"checkpoints cannot be written to {folder}: {error.strerror}; free some space") from error
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
                _log.warning("learner.waiting another process has %s", handle.name)
            stop.wait(LOCK_POLL_S)
    return False


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, so that training waits for a copy in memory only.

    One thread calls it. While one checkpoint is being written the next is declined: the queue never grows.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._error: RunError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the former could not be written, which `finish` and `write` raise."""
        return self._error is not None

    def write(self, checkpoint: Checkpoint) -> bool:
        """Starts to write; False when the former is not done. `checkpoint`'s arrays must not change afterwards.

        Raises:
            RunError: the former could not be written.
        """
        if self.is_busy:
            return False
        self.finish()
        self._thread = threading.Thread(target=self._save, args=(checkpoint,), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> None:
        """Waits until what was started is on disk.

        Raises:
            DiskFull: there was no room for it.
            RunError: it could not be written, or the disk did not answer within `WRITE_TIMEOUT_S`.
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
    """Newest first."""
    named = [path for path in folder.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (_number(path), path.name), reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None  # `_list_checkpoints` lists no others
    return int(match[1])


def _prune(older: list[Path], keep: int) -> None:
    """Removes what is older than the newest `keep` readable ones of `older`."""
    for path in older:
        if keep <= 0:
            _remove(path)
        elif not _read_error(path):
            keep -= 1


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_suffix(_PARTIAL_SUFFIX)  # in one step: half a checkpoint would look like a damaged one
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
        shutil.rmtree(beside, ignore_errors=True)  # a full disk needs the room
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
        raise RunError(f"a checkpoint with these scalars could not be read again: {error}") from None
    _write_durably(
        folder / _INDEX, msgspec.json.encode(_SealedIndex(FORMAT_VERSION, _digest(encoded), msgspec.Raw(encoded)))
    )


def _split(arrays: Mapping[str, Array], shard_bytes: int) -> Iterator[list[str]]:
    """The names of the arrays that share a file."""
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
    """Why the checkpoint at `path` cannot be read; empty if it can. Reads all of it, unless it was read before."""
    try:
        if not path.is_dir():
            return f"it is of another format version; this program reads {FORMAT_VERSION}"
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
                return f"its file {name} has {size} bytes and should have {shard.size_bytes}"
            with open(path / name, "rb") as stream:
                if hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest() != shard.blake2b:
                    return f"its file {name} is damaged: the digest is wrong"
    except WireError as error:
        return str(error)
    return ""


def _read_index(path: Path) -> _CheckpointIndex:
    """Raises WireError: it is missing, torn, damaged, or of another format version; OSError: the disk failed."""
    try:
        raw = (path / _INDEX).read_bytes()
        if (found := msgspec.json.decode(raw, type=_Format).format) != FORMAT_VERSION:
            raise WireError(f"its format version is {found}; this program reads {FORMAT_VERSION}")
        sealed = msgspec.json.decode(raw, type=_SealedIndex)
        if _digest(sealed.index) != sealed.blake2b:
            raise WireError(f"its file {_INDEX} is damaged: the digest is wrong")
        return msgspec.json.decode(sealed.index, type=_CheckpointIndex)
    except FileNotFoundError:
        raise WireError(f"its file {_INDEX} is missing") from None
    except DECODE_ERRORS as error:
        raise WireError(f"its file {_INDEX} is torn or damaged: {error}") from None


def _digest(content: bytes | msgspec.Raw) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
