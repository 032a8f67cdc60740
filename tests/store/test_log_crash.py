"""A writer stopped at any of its file operations, or refused one, loses nothing that it acknowledged."""

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
from user_sys.store.log import LogReader, LogWriter, RecordRef
from user_sys.store.verify import verify_log

OPERATIONS = ("open", "pwritev", "ftruncate", "fdatasync", "fsync", "rename", "unlink", "sync_folder")
DROPPED = {5, 9}
RECORDS = 24


class Stopped(BaseException):
    """The moment at which the process is killed; nothing of ours catches it."""


class Unsynced(Files):
    """Files of a test that cuts no power."""

    def fsync(self, fd: int) -> None:
        pass

    def fdatasync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


UNSYNCED = Unsynced()


class Failing(Unsynced):
    """Files of which the operation number `at` does `what`, and each one after it too where `once` is false."""

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


def life(path: Path, files: Files, acknowledged: list[int]) -> None:
    """Appends, rotates, seals, is opened again, rewrites and drops, noting what is acknowledged."""
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
    """What was acknowledged is there but for what was dropped, nothing is there twice, and the log goes on."""
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
    life(path, counting, [])
    return counting.count + 1


def stop() -> None:
    raise Stopped


@pytest.mark.parametrize("torn", [False, True])
def test_a_writer_killed_at_any_operation_loses_nothing_acknowledged(tmp_path: Path, torn: bool) -> None:
    total = operations(tmp_path / "whole")
    assert total > 60
    for at in range(total):
        path, acknowledged = tmp_path / str(at), list[int]()
        with pytest.raises(Stopped):
            life(path, Failing(at, stop, once=False, torn=torn), acknowledged)
        if path.exists():
            check(path, len(acknowledged))


def test_a_disk_without_space_at_any_operation_refuses_and_goes_on(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refused = 0
    for at in range(operations(tmp_path / "whole")):
        path, acknowledged = tmp_path / str(at), list[int]()
        try:
            life(path, Failing(at, full), acknowledged)
        except StoreError:
            refused += 1
        check(path, len(acknowledged))
    assert refused > 30


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_failed_operation_of_any_kind_is_a_clear_error(tmp_path: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for at in range(operations(tmp_path / "whole")):
        path, acknowledged = tmp_path / str(at), list[int]()
        try:
            life(path, Failing(at, fail), acknowledged)
        except StoreError as error:
            assert os.strerror(code) in str(error), at
        check(path, len(acknowledged))


def test_writes_that_take_a_few_bytes_at_a_time_write_all(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    life(tmp_path, Short(), acknowledged)
    check(tmp_path, RECORDS)


def test_a_full_disk_is_helped_by_dropping(tmp_path: Path) -> None:
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


def test_a_reader_that_looks_at_a_log_mid_compaction_finds_every_record(tmp_path: Path) -> None:
    """At each operation of a compaction and of a drop, a reader that followed from the start reads what is left."""
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
