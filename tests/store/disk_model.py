"""An in-memory disk that models power cuts.

Writes are *volatile* until they are synced. Each unsynced 512-byte sector of a file, and each change of its length,
is on the disk or not, independently; a length without its bytes gives zeros. Each unsynced creation, renaming and
deletion in a folder is on the disk or not, independently and atomically. Journaling file systems promise more, so
results hold there too.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from user_sys.store.files import Buffer, Files

SECTOR_BYTES = 512
SYNCS = ("sync", "sync_folder")


class Event(NamedTuple):
    """A recorded operation: ``write``, ``length``, ``sync`` (of a file), ``link``, ``rename``, ``unlink``,
    ``sync_folder``, ``forgotten`` (an omitted sync), or ``note`` (by the workload). `site`: code location of a sync.
    """

    kind: str
    file: int = -1
    offset: int = 0
    body: bytes = b""
    name: str = ""
    other: str = ""
    site: str = ""
    note: object = None


class Dead(OSError):
    """An operation of a killed process."""


ROOT = Path("/disk")
ROOT_NAME = "."  # file names are relative to `ROOT`


class Disk:
    """The files in `ROOT`. `files` returns a process's view of them; `kill` ends all views.

    Attributes:
        room_bytes: remaining space, never freed; None for unlimited.
        fail_at, fail_with: the number of the event, from 1, that is executed and reported as failed, and its errno;
            `fail_at` is -1 after that.
    """

    def __init__(self, content: dict[str, bytes] | None = None, *, forget: str = "", kill_at: int = -1) -> None:
        """Args: `forget`: the site of an omitted sync; `kill_at`: kill after so many events."""
        self.lock = threading.RLock()
        self.forget, self.kill_at = forget, kill_at
        self.room_bytes: int | None = None
        self.fail_at, self.fail_with = -1, 0
        self.files_by_number: list[bytearray] = []
        self.names: dict[str, int] = {}
        self.trace: list[Event] = []
        self.epoch = 0
        self.locked: dict[int, object] = {}
        for name, body in (content or {}).items():
            self.names[name] = len(self.files_by_number)
            self.files_by_number.append(bytearray(body))
        self.start = State.of(self)

    def files(self) -> ModelFiles:
        return ModelFiles(self)

    def kill(self) -> None:
        """Ends every process that uses the disk."""
        with self.lock:
            self.epoch += 1
            self.locked.clear()

    def take_room(self, body: bytes) -> bytes:
        """The part of `body` that fits. Raises OSError if nothing fits."""
        if self.room_bytes is None:
            return body
        if not self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        body = body[: self.room_bytes]
        self.room_bytes -= len(body)
        return body

    def note(self, what: object) -> None:
        self.trace.append(Event("note", note=what))

    def record(self, event: Event) -> None:
        if event.kind in SYNCS:
            event = event._replace(site=_site())
            if event.site == self.forget:
                event = event._replace(kind="forgotten")
        self.trace.append(event)
        if len(self.trace) == self.kill_at:
            self.kill()
        if len(self.trace) == self.fail_at:
            self.fail_at = -1
            raise OSError(self.fail_with, os.strerror(self.fail_with))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _site() -> str:
    """Code location of a sync: the store's functions on the stack, innermost first, two besides those in files.py."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None and sum(not each.startswith("files.py") for each in found) < 2:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "store" and path.parent.parent.name == "user_sys":
            found.append(f"{path.name}:{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


class ModelFiles(Files):
    """A process's view of a `Disk`; every operation fails after a kill."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.epoch = disk, disk.epoch
        self._open: dict[int, int] = {}
        self._next_fd = 3

    def _alive(self) -> None:
        if self.epoch != self.disk.epoch:
            raise Dead(errno.EIO, "the process was killed")

    def _body(self, fd: int) -> bytearray:
        self._alive()
        return self.disk.files_by_number[self._open[fd]]

    def open(self, path: Path, flags: int) -> int:
        with self.disk.lock:
            self._alive()
            disk, name = self.disk, _name(path)
            if name not in disk.names:
                if not flags & os.O_CREAT or _name(path.parent) not in disk.names:
                    raise _missing(path)
                disk.names[name] = len(disk.files_by_number)
                disk.files_by_number.append(bytearray())
                disk.record(Event("link", disk.names[name], name=name))
            elif flags & os.O_TRUNC:
                self._set_length(disk.names[name], 0)
            self._next_fd += 1
            self._open[self._next_fd] = disk.names[name]
            return self._next_fd

    def _set_length(self, file: int, length: int) -> None:
        body = self.disk.files_by_number[file]
        del body[length:]
        body.extend(bytes(length - len(body)))
        self.disk.record(Event("length", file, length))

    def close(self, fd: int) -> None:
        with self.disk.lock:
            self.disk.locked = {f: owner for f, owner in self.disk.locked.items() if owner != (self, fd)}
            self._open.pop(fd, None)

    def size(self, fd: int) -> int:
        return len(self._body(fd))

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return bytes(self._body(fd)[offset : offset + count])

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self.disk.lock:
            body, joined = self._body(fd), self.disk.take_room(b"".join(buffers))
            body.extend(bytes(max(0, offset - len(body))))
            body[offset : offset + len(joined)] = joined
            self.disk.record(Event("write", self._open[fd], offset, joined))
            return len(joined)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        with self.disk.lock:
            if len(self._body(fd)) < offset + length:
                self._set_length(self._open[fd], offset + length)

    def ftruncate(self, fd: int, length: int) -> None:
        with self.disk.lock:
            self._alive()
            self._set_length(self._open[fd], length)

    def fdatasync(self, fd: int) -> None:
        with self.disk.lock:
            self._alive()
            self.disk.record(Event("sync", self._open[fd]))

    def fsync(self, fd: int) -> None:
        self.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self.disk.lock:
            self._alive()
            names, old, new = self.disk.names, _name(source), _name(target)
            names[new] = names.pop(old)
            self.disk.record(Event("rename", names[new], name=old, other=new))

    def unlink(self, path: Path) -> None:
        with self.disk.lock:
            self._alive()
            if (name := _name(path)) not in self.disk.names:
                raise _missing(path)
            self.disk.record(Event("unlink", self.disk.names.pop(name), name=name))

    def listdir(self, path: Path) -> list[str]:
        self._alive()
        with self.disk.lock:
            if _name(path) not in self.disk.names:
                raise _missing(path)
            return [Path(name).name for name in self.disk.names if (ROOT / name).parent == path]

    def modified_ns(self, folder: Path) -> int:
        self._alive()
        return len(self.disk.trace)

    def make_folder(self, path: Path) -> None:
        with self.disk.lock:
            self._alive()
            for name in (ROOT_NAME, _name(path)):
                if name not in self.disk.names:
                    self.disk.names[name] = len(self.disk.files_by_number)
                    self.disk.files_by_number.append(bytearray())
                    self.disk.record(Event("link", self.disk.names[name], name=name))
            self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        with self.disk.lock:
            self._alive()
            self.disk.record(Event("sync_folder", name=str(path)))

    def lock(self, fd: int) -> bool:
        with self.disk.lock:
            self._alive()
            return self.disk.locked.setdefault(self._open[fd], (self, fd)) == (self, fd)


@dataclass
class State:
    """Durable content, and volatile changes of each file and of the folder since their last syncs."""

    durable: dict[int, bytes] = field(default_factory=dict)
    volatile: dict[int, list[Event]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    renamed: list[Event] = field(default_factory=list)

    @classmethod
    def of(cls, disk: Disk) -> State:
        return cls({n: bytes(body) for n, body in enumerate(disk.files_by_number)}, {}, dict(disk.names), [])

    def advance(self, event: Event) -> None:
        if event.kind in ("write", "length"):
            self.volatile.setdefault(event.file, []).append(event)
        elif event.kind == "sync":
            changes = [each for change in self.volatile.pop(event.file, []) for each in _sectors(change)]
            self.durable[event.file] = _applied(self.durable.get(event.file, b""), changes)
        elif event.kind == "sync_folder":
            here = [each for each in self.renamed if (ROOT / each.name).parent == Path(event.name)]
            self.names = _named(self.names, here)
            self.renamed = [each for each in self.renamed if each not in here]
        elif event.kind in ("link", "rename", "unlink"):
            self.renamed.append(event)

    def is_torn(self) -> bool:
        names = _named(self.names, self.renamed).items()
        return any(name.endswith(".seg") and self.volatile.get(file) for name, file in names)

    def outcome(self, choice: Choice) -> dict[str, bytes]:
        """Content after `choice`, each file's bytes by name."""
        found, names = {}, _named(self.names, choice.names(self.renamed))
        for name, file in names.items():
            if not names.keys() >= {ROOT_NAME, str(Path(name).parent)}:
                continue
            changes = [each for change in self.volatile.get(file, []) for each in _sectors(change)]
            body = _applied(self.durable.get(file, b""), choice.changes(file, changes))
            if choice.lengths_first and changes:
                longest = len(_applied(self.durable.get(file, b""), changes))
                body += bytes(max(0, longest - len(body)))
            found[name] = body
        return found


@dataclass(frozen=True)
class Choice:
    """Selects the volatile changes that survive a power cut, at random with `rng`, otherwise a leading share.

    Attributes:
        folder, data: surviving share of name changes, and of each file's changes; or the chance of each.
        last: the trailing share survives instead.
        lengths_first: a file's length is on the disk before its bytes.
        spared: a file that loses nothing regardless of `data`.
    """

    folder: float
    data: float
    rng: random.Random | None = None
    lengths_first: bool = False
    last: bool = False
    spared: int = -1

    def names(self, changes: Sequence[Event]) -> list[Event]:
        return self._some(changes, self.folder)

    def changes(self, file: int, changes: Sequence[Event]) -> list[Event]:
        return list(changes) if file == self.spared else self._some(changes, self.data)

    def _some(self, changes: Sequence[Event], share: float) -> list[Event]:
        if self.rng is not None:
            return [each for each in changes if self.rng.random() < share]
        kept = round(share * len(changes))
        return list(changes[len(changes) - kept :] if self.last else changes[:kept])


def _sectors(event: Event) -> Iterator[Event]:
    """A write as sectors; a change of length unchanged."""
    if event.kind == "length":
        yield event
        return
    start = 0
    while start < len(event.body):
        stop = min(len(event.body), start + SECTOR_BYTES - (event.offset + start) % SECTOR_BYTES)
        yield event._replace(offset=event.offset + start, body=event.body[start:stop])
        start = stop


def _applied(body: bytes, changes: Sequence[Event]) -> bytes:
    grown = bytearray(body)
    for change in changes:
        length = change.offset if change.kind == "length" else change.offset + len(change.body)
        if change.kind == "length":
            del grown[length:]
        grown.extend(bytes(max(0, length - len(grown))))
        if change.kind == "write":
            grown[change.offset : length] = change.body
    return bytes(grown)


def _named(names: dict[str, int], changes: Sequence[Event]) -> dict[str, int]:
    found = dict(names)
    for change in changes:
        if change.kind in ("unlink", "rename"):
            found.pop(change.name, None)
        if change.kind in ("link", "rename"):
            found[change.other or change.name] = change.file
    return found


class CrashState(NamedTuple):
    """State after a power cut.

    Attributes:
        at: the last event.
        content: the files, by name.
        notes: acknowledged data by then.
        torn: some segment had unsynced bytes.
    """

    at: int
    content: dict[str, bytes]
    notes: tuple[object, ...]
    torn: bool


def crash_states(
    start: State, trace: Sequence[Event], rng: random.Random, per_moment: int, first: int = 0
) -> Iterator[CrashState]:
    """For each moment of `trace` from event `first` on: extremes, each prefix of names, `per_moment` random ones."""
    state, notes = State(dict(start.durable), {}, dict(start.names), []), []
    for at, event in enumerate(trace):
        state.advance(event)
        if event.kind == "note":
            notes.append(event.note)
        elif at >= first and event.kind != "forgotten":
            for choice in _choices(state, rng, per_moment):
                yield CrashState(at, state.outcome(choice), tuple(notes), state.is_torn())


def _choices(state: State, rng: random.Random, per_moment: int) -> Iterator[Choice]:
    folder = len(state.renamed)
    data = sum(len(list(_sectors(change))) for changes in state.volatile.values() for change in changes)
    for names in range(folder + 1):
        share = names / folder if folder else 1.0
        for last in (False, True) if 0 < names < folder else (False,):
            for kept in (0.0, 1.0) if data else (0.0,):
                yield Choice(share, kept, last=last)
    if data:
        yield Choice(1.0, 0.0, lengths_first=True)
        yield Choice(1.0, 0.5)
        yield Choice(1.0, 0.5, last=True)
    for file in state.volatile if len(state.volatile) > 1 else ():
        yield Choice(1.0, 0.0, spared=file)
    for _ in range(per_moment if data + folder > 1 else 0):
        kept = rng.choice((0.1, 0.5, 0.9))
        yield Choice(rng.choice((0.1, 0.5, 1.0)), kept, random.Random(rng.random()), rng.random() < 0.3)
