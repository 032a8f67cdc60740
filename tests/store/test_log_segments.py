"""Segments of a log: sealing, listing, rewriting, and concurrent readers."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from user_sys.errors import StoreError, StoreRecordGone
from user_sys.store.files import Files
from user_sys.store.index_block import decode_block
from user_sys.store.log_reader import LIST_S, TICK_S, LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import list_segments, refs_of

WAIT_S = 240.0


def content(number: int) -> bytes:
    return b"%03d" % number * 30


def filled(path: Path, count: int = 20, segment_bytes: int = 600) -> LogWriter:
    """A writer with so many records, four per segment."""
    writer = LogWriter.open(path, segment_bytes=segment_bytes)
    for number in range(count):
        writer.append_record(1 + number % 3, content(number), schema=number)
    writer.sync()
    return writer


def in_summary(summary: bytes | None) -> list[int]:
    """The sequence numbers in the index block of a segment; the records are no chunks and no labels."""
    assert summary is not None
    return [damage.sequence for damage in decode_block(summary).damaged]


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()} - {"LOCK"}


def test_sealed_segment_is_read_from_its_footer(tmp_path: Path) -> None:
    with filled(tmp_path) as writer, LogReader.open(tmp_path) as reader:
        batches = reader.refresh()
        assert [batch.segment for batch in batches] == [0, 1, 2, 3, 4]
        assert [entry.number for entry in writer.sealed_segments()] == [0, 1, 2, 3]
        assert in_summary(batches[1].summary) == [4, 5, 6, 7]
        assert batches[4].summary is None and len(batches[4].records) == 4
        refs = [ref for batch in batches for ref in refs_of(batch.records)]
        assert [(ref.sequence, ref.kind, ref.schema) for ref in refs] == [(n, 1 + n % 3, n) for n in range(20)]
        assert [bytes(reader.read(ref)) for ref in refs] == [content(number) for number in range(20)]
        assert not reader.damaged and not reader.refresh()


def test_rewritten_segment_keeps_wanted_records_and_number(tmp_path: Path) -> None:
    with filled(tmp_path) as writer, LogReader.open(tmp_path) as alive, LogReader.open(tmp_path) as idle:
        refs = alive.records()
        idle_refs = idle.records()
        view = alive.read(refs[5])
        entry = writer.rewrite([1, 2], lambda ref: ref.sequence % 2 == 0)
        assert (entry.number, entry.span, entry.first_sequence, entry.next_sequence) == (1, 2, 4, 12)
        assert view == content(5), "a view outlives the file"
        (batch,) = alive.refresh()
        assert batch.dropped.tolist() == [5, 7, 9, 11] and not len(batch.records)
        for reader, old in ((alive, refs), (idle, idle_refs)):
            for ref in old:
                if ref.sequence in (5, 7, 9, 11):
                    with pytest.raises(StoreRecordGone):
                        reader.read(ref)
                else:
                    assert reader.read(ref) == content(ref.sequence)
        writer.append_record(1, content(20))
    expected = [number for number in range(21) if number not in (5, 7, 9, 11)]
    with LogReader.open(tmp_path) as fresh:
        batches = fresh.refresh()
        assert [ref.sequence for batch in batches for ref in refs_of(batch.records)] == expected
        assert in_summary(batches[1].summary) == [4, 6, 8, 10]
        assert not fresh.damaged
    assert files(tmp_path) >= {"0000000001-00002.00001.seg", "MANIFEST"} and len(list_segments(tmp_path)) == 5


def test_rewrite_after_a_full_disk_at_the_manifest_lists_the_new_segment_only(tmp_path: Path) -> None:
    class Filling(Files):
        is_full = False

        def open(self, path: Path, flags: int) -> int:
            if self.is_full and path.name == "MANIFEST.tmp":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().open(path, flags)

    disk = Filling()
    with LogWriter.open(tmp_path, segment_bytes=600, files=disk) as writer:
        writer.append_record(1, content(0))
        writer.append_record(1, content(1))
        disk.is_full = True
        writer.rotate()
        disk.is_full = False
        first = writer.rewrite([0], lambda ref: ref.sequence != 0)
        writer.append_record(1, content(2))
        writer.rotate()
        assert writer.sealed_segments()[0] == first
        writer.rewrite([0, 1], lambda ref: True)
    with LogReader.open(tmp_path) as reader:
        assert [reader.read(ref) for ref in reader.records()] == [content(1), content(2)]
        assert not reader.damaged


def test_threads_read_during_rewrite(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()
    with filled(tmp_path, 80) as writer, LogReader.open(tmp_path) as reader:
        refs = reader.records()

        def read(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                ref = rng.choice(refs)
                try:
                    assert reader.read(ref) == content(ref.sequence)
                    assert reader.read_range(ref, 3, 6) == content(ref.sequence)[3:6]
                except StoreRecordGone:
                    assert ref.sequence % 5 == 0
                except BaseException as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for first in range(0, 16, 2):
            writer.rewrite([first, first + 1], lambda ref: ref.sequence % 5 != 0)
            reader.refresh()
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures and not reader.damaged


def test_log_of_many_segments_opens_without_reading_records(tmp_path: Path) -> None:
    with filled(tmp_path, 800) as writer:
        writer.sync()

    class Counting(Files):
        bytes_read = 0

        def pread(self, fd: int, count: int, offset: int) -> bytes:
            raw = super().pread(fd, count, offset)
            self.bytes_read += len(raw)
            return raw

    counting = Counting()
    with LogReader.open(tmp_path, files=counting) as reader:
        assert sum(len(batch.records) for batch in reader.refresh()) == 800
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.seg"))
    assert counting.bytes_read < 0.8 * stored


class ListedFolder(Files):
    """Counts listings. `time_ns` is the folder's time, instead of its own."""

    def __init__(self) -> None:
        self.listings, self.time_ns = 0, 7

    def listdir(self, path: Path) -> list[str]:
        self.listings += 1
        return super().listdir(path)

    def modified_ns(self, folder: Path) -> int:
        return self.time_ns


def test_folder_that_does_not_change_is_seldom_listed(tmp_path: Path) -> None:
    folder, now_s = ListedFolder(), 100.0
    with filled(tmp_path) as writer, LogReader.open(tmp_path, files=folder, clock=lambda: now_s) as reader:
        reader.refresh()
        for _ in range(3):  # a listing after a tick of the folder's clock sees all changes with that time
            now_s += TICK_S
            before = folder.listings
            assert not reader.refresh()
        assert folder.listings == before
        for number in range(20, 40):
            writer.append_record(1, content(number))
            writer.sync()
            folder.time_ns += 1
            assert [ref.sequence for ref in reader.records()] == [number]


def test_new_segment_that_leaves_the_folders_time_is_found_within_a_second(tmp_path: Path) -> None:
    folder, now_s = ListedFolder(), 100.0
    with filled(tmp_path) as writer, LogReader.open(tmp_path, files=folder, clock=lambda: now_s) as reader:
        assert len(reader.records()) == 20
        found = list[int]()
        for number in range(20, 100):
            writer.append_record(1, content(number))
            writer.sync()
            now_s += LIST_S / 10
            found += [ref.sequence for ref in reader.records()]
        now_s += LIST_S
        found += [ref.sequence for ref in reader.records()]
        assert found == list(range(20, 100)) and not reader.damaged
        assert folder.listings < 30


def test_reader_that_has_failed_lists_the_folder_again(tmp_path: Path) -> None:
    class Failing(ListedFolder):
        fails = False

        def open(self, path: Path, flags: int) -> int:
            if self.fails:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path, flags)

    folder, now_s = Failing(), 100.0
    with filled(tmp_path) as writer, LogReader.open(tmp_path, files=folder, clock=lambda: now_s) as reader:
        reader.refresh()
        now_s += TICK_S
        reader.refresh()
        folder.fails, folder.time_ns, now_s = True, 8, now_s + TICK_S
        writer.append_record(1, content(20))
        writer.sync()
        with pytest.raises(StoreError, match="Too many open files"):
            reader.refresh()
        folder.fails = False
        assert [ref.sequence for ref in reader.records()] == [20]
