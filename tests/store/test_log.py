"""The log: acknowledged records are read back whole, and damage is never read as a record."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from user_sys.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked, StoreVersionMismatch
from user_sys.store.files import OS_FILES, Files
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import (
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    RecordRef,
    SegmentHeader,
    SegmentScan,
    record_bytes,
    segment_numbers,
    segment_path,
)

payloads = st.lists(st.binary(max_size=300) | st.just(RECORD_MAGIC * 9), min_size=1, max_size=12)


def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


def write(path: Path, contents: list[bytes], segment_bytes: int = 1 << 20) -> list[RecordRef]:
    with LogWriter.open(path, segment_bytes=segment_bytes) as writer:
        return [writer.append(index % 7, content) for index, content in enumerate(contents)]


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
                assert writer.next_sequence == last.sequence and writer.truncated_bytes == cut - last.offset
                added = writer.append(1, b"instead")
            assert reader.records() == [added]
    assert read(tmp_path) == [*contents[:-1], b"instead"]


@settings(max_examples=40, deadline=None)
@given(contents=payloads, data=st.data())
def test_truncated_log_yields_records_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], data: st.DataObject
) -> None:
    path = fresh(tmp_path_factory)
    refs = write(path, contents)
    cut = data.draw(st.integers(SEGMENT_HEADER_BYTES, segment_path(path, 0).stat().st_size))
    os.truncate(segment_path(path, 0), cut)
    whole = [ref for ref in refs if ref.offset + RECORD_HEADER_BYTES + ref.length <= cut]
    assert read(path) == contents[: len(whole)]


@settings(max_examples=80, deadline=None)
@given(contents=payloads, data=st.data())
def test_flipped_bit_loses_at_most_one_record_and_is_reported(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], data: st.DataObject
) -> None:
    path = fresh(tmp_path_factory)
    refs = write(path, contents)
    write(path, [b"the last"])
    raw = bytearray(segment_path(path, 0).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 9 - RECORD_HEADER_BYTES))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    segment_path(path, 0).write_bytes(raw)
    hit = {i for i, ref in enumerate(refs) if ref.offset <= at < ref.offset + RECORD_HEADER_BYTES + ref.length}
    in_padding = not hit and at >= SEGMENT_HEADER_BYTES
    with LogReader.open(path) as reader:
        got = [bytes(reader.read(ref)) for ref in reader.records()]
        assert got == [content for i, content in enumerate(contents) if i not in hit] + [b"the last"]
        assert bool(reader.damaged) != in_padding
    with LogWriter.open(path) as writer:
        assert writer.next_sequence == len(contents) + 1


def test_damaged_last_record_is_not_truncated(tmp_path: Path) -> None:
    refs = write(tmp_path, [b"one", b"two"])
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(refs[1].offset + RECORD_HEADER_BYTES)
        file.write(b"X")
    before = segment_path(tmp_path, 0).read_bytes()
    assert write(tmp_path, [b"three"])[0].segment == 1
    assert segment_path(tmp_path, 0).read_bytes().startswith(before)
    with LogReader.open(tmp_path) as reader:
        assert [bytes(reader.read(ref)) for ref in reader.records()] == [b"one", b"three"]
        assert [damage.offset for damage in reader.damaged] == [refs[1].offset]


def test_trailing_zeros_are_truncated(tmp_path: Path) -> None:
    write(tmp_path, [b"one"])
    with segment_path(tmp_path, 0).open("ab") as file:
        file.write(bytes(5000))
    with LogWriter.open(tmp_path) as writer:
        assert writer.truncated_bytes == 5000
        writer.append(1, b"two")
    assert read(tmp_path) == [b"one", b"two"]


def test_damaged_segment_header_loses_no_record(tmp_path: Path) -> None:
    write(tmp_path, [b"one", b"two"])
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.write(b"?")
    write(tmp_path, [b"three"])
    with LogReader.open(tmp_path) as reader:
        refs = reader.records()
        assert [bytes(reader.read(ref)) for ref in refs] == [b"one", b"two", b"three"]
        assert [ref.sequence for ref in refs] == [0, 1, 2]
        assert len(reader.damaged) == 1


def test_misnamed_segment_yields_nothing(tmp_path: Path) -> None:
    write(tmp_path, [bytes([i]) * 100 for i in range(6)], segment_bytes=300)
    one, two = segment_path(tmp_path, 1), segment_path(tmp_path, 2)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    with LogReader.open(tmp_path) as reader:
        assert [bytes(reader.read(ref))[0] for ref in reader.records()] == [0, 3, 4, 5]
        assert {damage.segment for damage in reader.damaged} >= {1, 2}


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


def test_view_outlives_reader_and_segment(tmp_path: Path) -> None:
    write(tmp_path, [b"payload" * 1000, b"more"], segment_bytes=100)
    reader = LogReader.open(tmp_path)
    view = reader.read(reader.records()[0])
    reader.close()
    with LogWriter.open(tmp_path) as writer:
        writer.drop_before(1)
    assert segment_numbers(tmp_path) == [1]
    assert view == b"payload" * 1000 and view.readonly
    assert read(tmp_path) == [b"more"]


def test_sequence_continues_after_dropping_all_segments(tmp_path: Path) -> None:
    write(tmp_path, [b"x" * 100] * 5, segment_bytes=150)
    with LogWriter.open(tmp_path) as writer:
        writer.drop_before(99)
        assert segment_numbers(tmp_path) == [4], "the one being written stays"
    with LogWriter.open(tmp_path) as writer:
        assert writer.append(0, b"y").sequence == 5


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


def test_closed_writer_raises(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="is closed"):
        writer.append(0, b"")


def test_failed_sync_ends_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path)
    writer.append(0, b"kept")
    writer.sync()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer.append(0, b"unknown")
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreError, match="do not retry"):
        writer.sync()
    monkeypatch.undo()
    for again in (writer.sync, lambda: writer.append(0, b"")):
        with pytest.raises(StoreError, match="do not retry"):
            again()
    writer.close()
    assert read(tmp_path)[0] == b"kept"


FULL = """
    import resource, signal, sys
    from pathlib import Path
    from user_sys.errors import StoreFull
    from user_sys.store.log_reader import LogReader
    from user_sys.store.log_writer import LogWriter
    path = Path(sys.argv[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    writer = LogWriter.open(path)
    contents = [bytes([i]) * 30_000 for i in range(20)]
    for content in contents[:2]:
        writer.append(0, content)
    writer.sync()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    for content in contents[2:]:
        writer.append(0, content)
    for _ in range(3):
        try:
            writer.sync()
        except StoreFull as error:
            assert "free some space" in str(error), error
        else:
            raise AssertionError("the disk was full")
    reader = LogReader.open(path)
    seen = reader.records()
    assert 2 <= len(seen) <= 3 and not reader.damaged, (seen, reader.damaged)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.sync()
    seen += reader.records()
    assert [bytes(reader.read(ref)) for ref in seen] == contents and not reader.damaged
"""


def test_full_disk_loses_nothing_and_writing_resumes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)], timeout=300, check=True)


def test_full_disk_bounds_pending_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taken = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StoreFull):
            for _ in range(100):
                writer.append(0, b"x" * 1_000_000)
                taken += 1
        assert 0 < writer.pending_bytes < 9_000_000
    writer.close()
    assert len(read(tmp_path)) == taken


def test_full_disk_at_rotation_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path, segment_bytes=200, background=False)
    writer.append(0, b"a" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        for _ in range(2):
            with pytest.raises(StoreFull):
                writer.append(0, b"b" * 100)
    writer.append(0, b"c" * 100)
    writer.close()
    assert read(tmp_path) == [b"a" * 100, b"c" * 100]


def test_full_disk_at_background_rotation_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.open(tmp_path, segment_bytes=200)
    writer.append(0, b"a" * 100)
    point = writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        writer.append(0, b"b" * 100)
        for _ in range(2):
            with pytest.raises(StoreFull):
                writer.sync(point)
            with pytest.raises(StoreFull):
                writer.append(0, b"c" * 100)
        assert writer.pending_bytes == 136 and writer.sealed_segments() == ()  # earlier records are durable
        assert read(tmp_path) == [b"a" * 100]
    writer.append(0, b"d" * 100)
    writer.close()
    assert read(tmp_path) == [b"a" * 100, b"b" * 100, b"d" * 100]


def test_append_that_fills_a_segment_does_not_block(tmp_path: Path) -> None:
    """A thread creates the next segment's file; acknowledgements wait for it."""
    may_sync = threading.Event()

    class Slow(Files):
        def fdatasync(self, fd: int) -> None:
            assert may_sync.wait(60)
            super().fdatasync(fd)

    with LogWriter.open(tmp_path, segment_bytes=200, files=Slow()) as writer:
        for body in (b"a", b"b"):
            assert writer.append(0, body * 100).sequence >= 0
        assert read(tmp_path) == [b"a" * 100]
        may_sync.set()
        writer.sync()
        assert read(tmp_path) == [b"a" * 100, b"b" * 100]


def no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FOLLOWED = """
    import sys
    from pathlib import Path
    from user_sys.store.log_writer import LogWriter
    with LogWriter.open(Path(sys.argv[1]), segment_bytes=40_000) as writer:
        for number in range(3000):
            writer.append(0, number.to_bytes(4, "little") * (number % 100))
            if number % 50 == 0:
                writer.sync()
"""


def test_reader_follows_writer_process(tmp_path: Path) -> None:
    LogWriter.open(tmp_path).close()
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(FOLLOWED), str(tmp_path)])
    refs: list[RecordRef] = []
    deadline = time.monotonic() + 120
    with LogReader.open(tmp_path) as reader:
        while len(refs) < 3000 and time.monotonic() < deadline:
            time.sleep(0.002)
            for ref in reader.records():
                number = len(refs)
                assert bytes(reader.read(ref)) == number.to_bytes(4, "little") * (number % 100)
                refs.append(ref)
        assert child.wait(120) == 0
        assert len(refs) == 3000 and reader.damaged == []


def test_scan_yields_each_sequence_number_once(tmp_path: Path) -> None:
    (first, second) = write(tmp_path, [b"12345678", b"abcdefgh"])
    assert second.offset == first.offset + record_bytes(8)
    fd = os.open(segment_path(tmp_path, 0), os.O_RDONLY)
    try:
        scan = SegmentScan(OS_FILES, fd, 0, sequence=1)
        assert [found for found in scan if isinstance(found, RecordRef)] == [second]
    finally:
        os.close(fd)
