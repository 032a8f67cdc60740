"""The log: acknowledged records are read back whole, and damage is never read as a record."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from store_kit import segment_path

from hal import durable
from user_sys.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked, StoreVersionMismatch
from user_sys.store.files import Files
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import (
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    RecordRef,
    SegmentHeader,
)

payloads = st.lists(st.binary(max_size=300) | st.just(RECORD_MAGIC * 9), min_size=1, max_size=12)


def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


def write(path: Path, contents: list[bytes], segment_bytes: int = 1 << 20) -> list[RecordRef]:
    with LogWriter.open(path, segment_bytes=segment_bytes) as writer:
        return [writer.append_record(index % 7, content) for index, content in enumerate(contents)]


def read(path: Path) -> list[bytes]:
    with LogReader.open(path) as reader:
        return [bytes(reader.read(ref)) for ref in reader.records()]


@settings(max_examples=50, deadline=None)
@given(contents=payloads, segment_bytes=st.integers(64, 900))
def test_appended_records_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], segment_bytes: int
) -> None:
    path = fresh(tmp_path_factory)
    refs = write(path, contents, segment_bytes)
    with LogReader.open(path) as reader:
        assert reader.records() == refs
        assert [ref.sequence for ref in refs] == list(range(len(contents)))
        assert [bytes(reader.read(ref)) for ref in refs] == contents
        assert reader.records() == [] and reader.damaged == []


def test_truncated_tail_keeps_whole_records_and_takes_new_ones(tmp_path: Path) -> None:
    contents = [b"one", b"", b"three" * 20, b"the last"]
    refs = write(tmp_path, contents)
    file, last = segment_path(tmp_path, 0), refs[-1]
    raw = file.read_bytes()
    for cut in range(last.offset, last.offset + RECORD_HEADER_BYTES + last.length):
        file.write_bytes(raw[:cut])
        with LogReader.open(tmp_path) as reader:
            assert reader.records() == refs[:-1] and reader.damaged == [], "a torn tail is no damage"
            with LogWriter.open(tmp_path) as writer:
                assert writer.next_sequence == last.sequence and file.stat().st_size == last.offset
                added = writer.append_record(1, b"instead")
            assert reader.records() == [added]
    assert read(tmp_path) == [*contents[:-1], b"instead"]


def test_log_inside_a_payload_is_one_record(tmp_path: Path) -> None:
    write(tmp_path / "inner", [b"inner"] * 3)
    nested = segment_path(tmp_path / "inner", 0).read_bytes()
    refs = write(tmp_path / "outer", [nested, b"after"])
    with segment_path(tmp_path / "outer", 0).open("r+b") as file:
        file.seek(refs[0].offset + 9)
        file.write(b"\xff")
    assert read(tmp_path / "outer") == [b"after"]


def test_record_damaged_after_refresh_raises_on_read(tmp_path: Path) -> None:
    write(tmp_path, [b"payload"])
    with LogReader.open(tmp_path) as reader:
        (ref,) = reader.records()
        with segment_path(tmp_path, 0).open("r+b") as file:
            file.seek(ref.offset + RECORD_HEADER_BYTES)
            file.write(b"X")
        with pytest.raises(StoreCorrupt, match=str(ref.offset)):
            reader.read(ref)


def test_other_format_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [b"x"])
    header = bytearray(SegmentHeader(0, 0, 0, 0, bytes(16)).encode())
    header[8] = 9
    header[60:64] = crc32c(bytes(header[:60])).to_bytes(4, "little")
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.write(header)
    for open_it in (LogReader.open, LogWriter.open):
        with pytest.raises(StoreVersionMismatch, match="format 9"):
            open_it(tmp_path)


def test_missing_log_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        LogReader.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        LogWriter.open(tmp_path / "file")


def test_second_writer_error_names_lock_holder(tmp_path: Path) -> None:
    with LogWriter.open(tmp_path):
        code = (
            "import pathlib, sys\n"
            "from user_sys.store.log_writer import LogWriter\n"
            "LogWriter.open(pathlib.Path(sys.argv[1]))"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert StoreLocked.__name__ in second.stderr and f"process {os.getpid()}" in second.stderr
        with pytest.raises(StoreLocked):
            LogWriter.open(tmp_path)
    LogWriter.open(tmp_path).close()


def test_failed_sync_ends_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path)
    writer.append_record(0, b"kept")
    writer.sync()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer.append_record(0, b"unknown")
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreError, match="do not retry"):
        writer.sync()
    monkeypatch.undo()
    for again in (writer.sync, lambda: writer.append_record(0, b"")):
        with pytest.raises(StoreError, match="do not retry"):
            again()
    writer.close()
    assert read(tmp_path)[0] == b"kept"


def test_full_disk_bounds_pending_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taken = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StoreFull):
            for _ in range(100):
                writer.append_record(0, b"x" * 1_000_000)
                taken += 1
        assert 0 < writer.pending_bytes < 9_000_000
    writer.close()
    assert len(read(tmp_path)) == taken


def test_full_disk_at_rotation_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path, segment_bytes=200)
    writer.append_record(0, b"a" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        for _ in range(2):
            with pytest.raises(StoreFull):
                writer.append_record(0, b"b" * 100)
    writer.append_record(0, b"c" * 100)
    writer.close()
    assert read(tmp_path) == [b"a" * 100, b"c" * 100]


def test_opened_log_has_durable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    LogWriter.open(tmp_path / "all" / "site" / "store").close()
    assert {tmp_path, tmp_path / "all", tmp_path / "all" / "site"} <= set(synced)
    (tmp_path / "all").rename(tmp_path / "moved")
    synced.clear()
    LogWriter.open(tmp_path / "moved" / "site" / "store").close()
    assert tmp_path / "moved" / "site" in synced  # a killed restore may have renamed the log without a sync


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC])
def test_failed_folder_sync_of_a_new_segment_ends_the_writer(tmp_path: Path, code: int) -> None:
    class Failing(Files):
        is_failing = False

        def sync_folder(self, path: Path) -> None:
            if self.is_failing:
                raise OSError(code, os.strerror(code))
            super().sync_folder(path)

    files = Failing()
    writer = LogWriter.open(tmp_path, segment_bytes=200, files=files)
    writer.append_record(0, b"a" * 100)
    files.is_failing = True
    for _ in range(2):
        with pytest.raises(StoreError, match="do not retry"):
            writer.append_record(0, b"b" * 100)
        files.is_failing = False
    writer.close()
    write(tmp_path, [b"c"])
    assert read(tmp_path) == [b"a" * 100, b"c"]


def no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
