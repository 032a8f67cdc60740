"""Checkpoints: everything that a learner needs to go on as if it had never stopped.

A checkpoint is one file, ``<updates, 12 digits>.checkpoint``: magic 'USCK', u32 format version, BLAKE2b-256 of what
follows the prefix, u32 length of a JSON table of scalars; the table; the arrays as safetensors. It is written beside
its place, synced, renamed, and the folder synced: after a killed process or a power cut the file is whole or absent.
The older ones are removed only then. Nothing is ever pickled.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from user_sys.codec import Array
from user_sys.errors import RunError, WireError

FORMAT_VERSION = 1
MAX_CHECKPOINT_BYTES = 1 << 32
WRITE_DEADLINE_S = 60.0
TURN_EVERY_S = 0.5
_MAGIC = b"USCK"
_PREFIX = struct.Struct("<4sI32sI")
_SUFFIX, _HALF = ".checkpoint", ".tmp"
_log = logging.getLogger(__name__)

Scalars = dict[str, int | float | str]


@dataclass(frozen=True)
class Checkpoint:
    """`arrays` by name and `scalars` that JSON can hold; floats come back bit-identical."""

    updates: int
    scalars: Scalars
    arrays: Mapping[str, Array]

    def encode(self) -> bytes:
        from safetensors.numpy import save as save_arrays  # the learner's computer alone has it

        table = json.dumps({"updates": self.updates, **self.scalars}).encode()
        body = table + save_arrays({name: np.asarray(value, order="C") for name, value in self.arrays.items()})
        return _PREFIX.pack(_MAGIC, FORMAT_VERSION, _digest(body), len(table)) + body


def decode_checkpoint(raw: bytes) -> Checkpoint:
    """The checkpoint in `raw`.

    Raises:
        WireError: not a checkpoint, of another format version, torn or damaged; the message says which.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as load_arrays

    if len(raw) < _PREFIX.size or raw[:4] != _MAGIC:
        raise WireError("it is no checkpoint of ours")
    _, version, digest, table_bytes = _PREFIX.unpack_from(raw)
    if version != FORMAT_VERSION:
        raise WireError(f"its format version is {version}; this program reads {FORMAT_VERSION}")
    body = memoryview(raw)[_PREFIX.size :]
    if _digest(body) != digest or table_bytes > len(body):
        raise WireError("it is torn or damaged: its digest is wrong")
    try:
        scalars = json.loads(bytes(body[:table_bytes]))
        arrays = load_arrays(bytes(body[table_bytes:]))
        return Checkpoint(int(scalars.pop("updates")), scalars, arrays)
    except (ValueError, KeyError, SafetensorError) as error:
        raise WireError(f"its content does not decode: {error}") from None


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes `checkpoint` durably, then removes all but the newest `keep`; blocks for the disk.

    Raises:
        RunError: the disk is full or the folder cannot be written; the older checkpoints are still there.
    """
    path = folder / f"{checkpoint.updates:012d}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, checkpoint.encode())
        for old in (*_files(folder)[keep:], *folder.glob(f"*{_HALF}")):  # a kill leaves one half written
            old.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"checkpoint {path} cannot be written: {error.strerror}; free some space") from error
    return path


def latest(folder: Path) -> Checkpoint | None:
    """The newest readable checkpoint of `folder`; None where there is none. Others are named in the log and skipped."""
    for path in _files(folder):
        try:
            return decode_checkpoint(_read(path))
        except (WireError, OSError) as error:
            _log.warning("checkpoint.skipped path=%s: %s", path, error)
    return None


@contextmanager
def sole_writer(folder: Path, stop: threading.Event) -> Iterator[bool]:
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
        yield _locked(handle, stop)


def _locked(handle: BinaryIO, stop: threading.Event) -> bool:
    said = False
    while not stop.is_set():
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not said:
                said = True
                _log.warning("learner.waiting another process has %s", handle.name)
            stop.wait(TURN_EVERY_S)
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
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, checkpoint: Checkpoint) -> bool:
        """Starts to write; False when the former is not done. `checkpoint`'s arrays must not change afterwards.

        Raises:
            RunError: the former could not be written.
        """
        if self.busy:
            return False
        self.finish()
        self._thread = threading.Thread(target=self._save, args=(checkpoint,), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> None:
        """Waits until what was started is on disk.

        Raises:
            RunError: it could not be written, or the disk did not answer within `WRITE_DEADLINE_S`.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(WRITE_DEADLINE_S)
            if thread.is_alive():
                raise RunError(f"the disk of {self._folder} took longer than {WRITE_DEADLINE_S:.0f} s for a checkpoint")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _save(self, checkpoint: Checkpoint) -> None:
        try:
            save(self._folder, checkpoint, self._keep)
        except RunError as error:
            self._error = error


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=32).digest()


def _files(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob(f"*{_SUFFIX}"), reverse=True)


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_CHECKPOINT_BYTES:
        raise WireError(f"it is larger than {MAX_CHECKPOINT_BYTES} bytes")
    return path.read_bytes()


def _write_atomically(path: Path, content: bytes) -> None:
    beside = path.with_suffix(_HALF)
    with open(beside, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
