"""A writer stopped or refused at any file operation loses nothing acknowledged."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from user_sys.errors import StoreError, StoreFull, StoreRecordGone
from user_sys.store.files import Buffer, Files
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import RecordRef
from user_sys.store.verify import verify_log

OPERATIONS = ("open", "pwritev", "ftruncate", "fdatasync", "fsync", "rename", "unlink", "sync_folder")
DROPPED = {5, 9}
RECORDS = 24


class Stopped(BaseException):
    """The moment of a kill; no product code catches it."""


class Unsynced(Files):
    """Files without real syncs, for tests without power cuts."""

    def fsync(self, fd: int) -> None:
        pass

    def fdatasync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


UNSYNCED = Unsynced()


class Failing(Unsynced):
    """Files whose operation number `at` raises `what`, and later ones too if `once` is false."""

    def __init__(self, at: int, what: Callable[[], None], *, once: bool = True, torn: bool = False) -> None:
        self.at, self.what, self.once, self.torn, self.count = at, what, once, torn, -1
        for name in OPERATIONS:
            setattr(self, name, functools.partial(self._counted, name, getattr(self, name)))

    def _counted(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        self.count += 1
        if self.count == self.at or (self.count > self.at and not self.once):
            if self.torn and name == "pwritev":
                fd, buffers, offset = args
                super().pwritev(fd, [b"".join(buffers)[: sum(map(len, buffers)) // 2]], offset)
            self.what()
        return operation(*args)


class Short(Unsynced):
    """Files that write seven bytes at a time."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return super().pwritev(fd, [b"".join(buffers)[:7]], offset)


def summarise(records: Iterable[tuple[RecordRef, memoryview]]) -> bytes:
    return b"".join(bytes(payload[:4]) for _, payload in records)


def content(number: int) -> bytes:
    return b"%04d" % number * 30


def run_writer(path: Path, files: Files, acknowledged: list[int]) -> None:
    """Appends, rotates, seals, reopens, rewrites and drops, noting acknowledged records."""
    for first in range(0, RECORDS, 8):
        with LogWriter.open(path, segment_bytes=600, summarise=summarise, background=False, files=files) as writer:
            for number in range(max(first, len(acknowledged)), first + 8):
                writer.append(1, content(number))
                if number % 2:
                    writer.sync()
                    acknowledged[:] = range(number + 1)
            if first == 8:
                writer.rewrite([1, 2], lambda ref: ref.sequence not in DROPPED)
            if first == 16:
                writer.drop_before(1)


def check(path: Path, acknowledged: int) -> None:
    """Acknowledged records are present once unless dropped, and the log continues."""
    before = readable(path) if list(path.glob("*.seg")) else {}
    with LogWriter.open(path, segment_bytes=600, summarise=summarise, background=False, files=UNSYNCED) as writer:
        assert writer.next_sequence >= acknowledged
        writer.append(1, b"next")
    found = readable(path)
    assert verify_log(path) == []
    assert all(value == content(key) for key, value in found.items() if value != b"next")
    assert set(range(3, acknowledged)) - DROPPED <= set(found)
    assert before.items() <= found.items() or min(found) == 3
    assert {path.suffix for path in path.iterdir()} <= {".seg", ".footer", ""}, "leftovers are removed"


def readable(path: Path) -> dict[int, bytes]:
    with LogReader.open(path) as reader:
        refs = reader.records()
        assert len({ref.sequence for ref in refs}) == len(refs) and not reader.damaged
        return {ref.sequence: bytes(reader.read(ref)) for ref in refs}


def operations(path: Path) -> int:
    counting = Failing(-1, lambda: None)
    run_writer(path, counting, [])
    return counting.count + 1


def stop() -> None:
    raise Stopped


@pytest.mark.parametrize("torn", [False, True])
def test_kill_at_any_operation_loses_nothing_acknowledged(tmp_path: Path, torn: bool) -> None:
    total = operations(tmp_path / "whole")
    assert total > 60
    for at in range(total):
        path, acknowledged = tmp_path / str(at), list[int]()
        with pytest.raises(Stopped):
            run_writer(path, Failing(at, stop, once=False, torn=torn), acknowledged)
        if path.exists():
            check(path, len(acknowledged))


def test_no_space_at_any_operation_is_recoverable(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refused = 0
    for at in range(operations(tmp_path / "whole")):
        path, acknowledged = tmp_path / str(at), list[int]()
        try:
            run_writer(path, Failing(at, full), acknowledged)
        except StoreError:
            refused += 1
        check(path, len(acknowledged))
    assert refused > 30


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_failed_operation_is_a_store_error(tmp_path: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for at in range(operations(tmp_path / "whole")):
        path, acknowledged = tmp_path / str(at), list[int]()
        try:
            run_writer(path, Failing(at, fail), acknowledged)
        except StoreError as error:
            assert os.strerror(code) in str(error), at
        check(path, len(acknowledged))


def test_short_writes_write_all_bytes(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    run_writer(tmp_path, Short(), acknowledged)
    check(tmp_path, RECORDS)


def test_dropping_segments_frees_a_full_disk(tmp_path: Path) -> None:
    full = False

    class Full(Unsynced):
        def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwritev(fd, buffers, offset)

    with LogWriter.open(tmp_path, segment_bytes=600, background=False, files=Full()) as writer:
        for number in range(10):
            writer.append(1, content(number))
        writer.sync()
        full = True
        with pytest.raises(StoreFull):
            for number in range(10, 20):
                writer.append(1, content(number))
                writer.sync()
        writer.drop_before(2)
        assert sorted(tmp_path.glob("*.seg"))[0].name == "0000000002.seg"
        full = False
        writer.sync()
    assert min(readable(tmp_path)) == 6 and verify_log(tmp_path) == []


def test_reader_finds_every_record_during_compaction(tmp_path: Path) -> None:
    """At each operation of a compaction and of a drop, a following reader reads the remaining records."""
    total, path = 0, tmp_path / "log"
    with LogWriter.open(path, segment_bytes=600, background=False) as writer:
        for number in range(16):
            writer.append(1, content(number))
    reader = LogReader.open(path)
    refs = reader.records()

    def look() -> None:
        nonlocal total
        total += 1
        for ref in refs:
            try:
                assert reader.read(ref) == content(ref.sequence)
            except StoreRecordGone:
                assert ref.sequence in DROPPED or ref.sequence < 3
        if total % 2:
            reader.refresh()

    with LogWriter.open(path, segment_bytes=600, background=False, files=Failing(0, look, once=False)) as writer:
        writer.rewrite([1, 2], lambda ref: ref.sequence not in DROPPED)
        writer.drop_before(1)
    assert total > 15 and not reader.damaged
    reader.close()
