"""Segments of a log: sealing, listing, rewriting, dropping, and concurrent readers."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from user_sys.errors import StoreError, StoreRecordGone
from user_sys.store.files import Files
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import RecordRef, list_segments
from user_sys.store.segment_writer import SyncPoint

WAIT_S = 240.0


def summarise(records: Iterable[tuple[RecordRef, memoryview]]) -> bytes:
    return b",".join(b"%d:%s" % (ref.sequence, bytes(payload[:3])) for ref, payload in records)


def content(number: int) -> bytes:
    return b"%03d" % number * 30


def filled(path: Path, count: int = 20, segment_bytes: int = 600) -> LogWriter:
    """A writer with so many records, four per segment."""
    writer = LogWriter.open(path, segment_bytes=segment_bytes, summarise=summarise, background=False)
    for number in range(count):
        writer.append(1 + number % 3, content(number), schema=number)
    writer.sync()
    return writer


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()} - {"LOCK"}


def test_sealed_segment_is_read_from_its_footer(tmp_path: Path) -> None:
    with filled(tmp_path) as writer, LogReader.open(tmp_path) as reader:
        batches = reader.refresh()
        assert [batch.segment for batch in batches] == [0, 1, 2, 3, 4]
        assert [entry.number for entry in writer.sealed_segments()] == [0, 1, 2, 3]
        assert batches[1].summary == b"4:004,5:005,6:006,7:007"
        assert batches[4].summary is None and len(batches[4].records) == 4
        refs = [ref for batch in batches for ref in batch.records]
        assert [(ref.sequence, ref.kind, ref.schema) for ref in refs] == [(n, 1 + n % 3, n) for n in range(20)]
        assert [bytes(reader.read(ref)) for ref in refs] == [content(number) for number in range(20)]
        assert not reader.damaged and not reader.refresh()


def test_scanned_records_are_not_reported_again_after_sealing(tmp_path: Path) -> None:
    with filled(tmp_path, 2) as writer, LogReader.open(tmp_path) as reader:
        seen = [ref.sequence for ref in reader.records()]
        for number in range(2, 11):
            writer.append(1, content(number))
            writer.sync()
            if number % 3 == 0:
                seen += [ref.sequence for ref in reader.records()]
        seen += [ref.sequence for ref in reader.records()]
        assert seen == list(range(11)) and not reader.damaged


def test_background_sealing_gives_the_same_files(tmp_path: Path) -> None:
    with LogWriter.open(tmp_path, segment_bytes=600, summarise=summarise) as writer:
        for number in range(20):
            writer.append(1, content(number))
    with LogReader.open(tmp_path) as reader:
        assert [batch.summary is not None for batch in reader.refresh()] == [True] * 4 + [False]


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
        writer.append(1, content(20))
    expected = [number for number in range(21) if number not in (5, 7, 9, 11)]
    with LogReader.open(tmp_path) as fresh:
        batches = fresh.refresh()
        assert [ref.sequence for batch in batches for ref in batch.records] == expected
        assert batches[1].summary == b"4:004,6:006,8:008,10:010"
        assert not fresh.damaged
    assert files(tmp_path) >= {"0000000001-00002.00001.seg", "MANIFEST"} and len(list_segments(tmp_path)) == 5


def test_segments_can_be_rewritten_until_empty(tmp_path: Path) -> None:
    with filled(tmp_path) as writer, LogReader.open(tmp_path) as alive:
        alive.refresh()
        writer.rewrite([1], lambda ref: ref.sequence != 6)
        writer.rewrite([0, 1, 2], lambda ref: False)
        dropped = np.concatenate([batch.dropped for batch in alive.refresh()])
        assert sorted(dropped.tolist()) == list(range(12))
        with pytest.raises(StoreError, match="not all sealed"):
            writer.rewrite([4], lambda ref: True)


def test_rewrite_refuses_segments_that_are_not_neighbours(tmp_path: Path) -> None:
    with filled(tmp_path) as writer, pytest.raises(StoreError, match="not neighbours"):
        writer.rewrite([0, 2], lambda ref: True)


def test_drop_keeps_file_that_spans_the_limit(tmp_path: Path) -> None:
    with filled(tmp_path) as writer:
        writer.rewrite([1, 2], lambda ref: True)
        writer.drop_before(2)
        with LogReader.open(tmp_path) as reader:
            assert [ref.sequence for ref in reader.records()] == list(range(4, 20)) and not reader.damaged
        writer.drop_before(3)
        with LogReader.open(tmp_path) as reader:
            assert [ref.sequence for ref in reader.records()] == list(range(12, 20)) and not reader.damaged


def test_reader_reports_dropped_segments(tmp_path: Path) -> None:
    with filled(tmp_path) as writer, LogReader.open(tmp_path) as alive:
        refs = alive.records()
        writer.drop_before(2)
        assert sorted(np.concatenate([batch.dropped for batch in alive.refresh()]).tolist()) == list(range(8))
        with pytest.raises(StoreRecordGone):
            alive.read(refs[0])
        assert alive.read(refs[8]) == content(8) and not alive.damaged
    with LogWriter.open(tmp_path) as writer:
        assert writer.next_sequence == 20 and [entry.number for entry in writer.sealed_segments()] == [2, 3]


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


def test_read_survives_remapping_of_its_segment(tmp_path: Path) -> None:
    class Interrupted(Files):
        meanwhile: Callable[[], object]

        def pread_into(self, fd: int, out: Sequence[memoryview], offset: int) -> int:
            self.meanwhile()
            return super().pread_into(fd, out, offset)

    files, out = Interrupted(), bytearray(100)
    with LogWriter.open(tmp_path) as writer, LogReader.open(tmp_path, files=files) as reader:
        first = writer.append(1, b"a" * 100)
        writer.sync()
        assert reader.read(first) == b"a" * 100
        second = writer.append(1, b"b" * 100)
        writer.sync()
        files.meanwhile = lambda: reader.read(second)  # needs more of the file than was mapped
        reader.read_into(first, 20, [memoryview(out)[:30], memoryview(out)[30:80]])
        assert out == b"a" * 80 + bytes(20)
        with pytest.raises(StoreError, match="of a record of 100"):
            reader.read_into(first, 60, [memoryview(out)])


def test_append_and_sync_in_two_threads(tmp_path: Path) -> None:
    queue: deque[SyncPoint] = deque()
    with LogWriter.open(tmp_path, segment_bytes=5000) as writer:
        done = threading.Event()

        def sync() -> None:
            while not done.is_set() or queue:
                if queue:
                    writer.sync(queue.popleft())

        thread = threading.Thread(target=sync)
        thread.start()
        for number in range(300):
            writer.append(1, content(number))
            queue.append(writer.flush())
        done.set()
        thread.join(WAIT_S)
        assert not thread.is_alive() and writer.pending_bytes == 0
        with LogReader.open(tmp_path) as reader:
            assert [bytes(reader.read(ref)) for ref in reader.records()] == [content(number) for number in range(300)]


COMPACTED = """
    import sys
    from pathlib import Path
    from user_sys.store.log_writer import LogWriter
    with LogWriter.open(Path(sys.argv[1]), segment_bytes=20_000) as writer:
        done = 0
        for number in range(4000):
            writer.append(0, number.to_bytes(4, "little") * (number % 50))
            if number % 25 == 0:
                writer.sync()
            sealed = writer.sealed_segments()
            if len(sealed) > done + 3:
                writer.rewrite([sealed[done].number, sealed[done + 1].number], lambda ref: ref.sequence % 7 != 0)
                done += 1
"""


def test_reader_follows_compacting_writer_process(tmp_path: Path) -> None:
    LogWriter.open(tmp_path).close()
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(COMPACTED), str(tmp_path)])
    refs: dict[int, RecordRef] = {}
    gone: set[int] = set()
    deadline = time.monotonic() + WAIT_S
    with LogReader.open(tmp_path) as reader:
        while child.poll() is None and time.monotonic() < deadline:
            for batch in reader.refresh():
                assert not refs.keys() & {ref.sequence for ref in batch.records}
                refs |= {ref.sequence: ref for ref in batch.records}
                gone |= set(batch.dropped.tolist())
            time.sleep(0.002)
            for ref in list(refs.values())[-40:]:
                with contextlib.suppress(StoreRecordGone):
                    assert reader.read(ref) == ref.sequence.to_bytes(4, "little") * (ref.sequence % 50)
        assert child.wait(WAIT_S) == 0
        for batch in reader.refresh():
            refs |= {ref.sequence: ref for ref in batch.records}
            gone |= set(batch.dropped.tolist())
        with LogReader.open(tmp_path) as fresh:
            assert {ref.sequence for ref in fresh.records()} == refs.keys() - gone
        assert reader.damaged == [] and all(number % 7 == 0 for number in gone)
        assert all(number % 7 == 0 for number in set(range(4000)) - refs.keys())
        for number in refs.keys() - gone:
            assert reader.read(refs[number]) == number.to_bytes(4, "little") * (number % 50)


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
