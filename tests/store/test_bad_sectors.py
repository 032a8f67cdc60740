"""A sector that the disk cannot read costs the records in it; all else goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store_kit import chunk, segment_path

from user_sys.commands.main import main
from user_sys.commands.output import EXIT_DAMAGED
from user_sys.errors import StoreCorrupt, StoreError
from user_sys.store import backup
from user_sys.store.backup import back_up, restore
from user_sys.store.files import BLOCK_BYTES, Files
from user_sys.store.log_writer import LogWriter
from user_sys.store.maintenance import merge_stores, reclaim_space
from user_sys.store.record_format import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.verify import quarantine_damage, verify_log

EPISODES = 40
BLOCK_CHUNKS = 8  # that a block of the disk has a part of
IN_RECORD, IN_HEADER, IN_INDEX, IN_TRAILER = 6000, 10, -2000, -10  # bytes; negative ones from the file's end


def break_sector(patch: pytest.MonkeyPatch, path: Path, at: int) -> None:
    """Reads across byte `at` of the first segment fail."""
    status, plain = segment_path(path, 0).stat(), Files.pread
    hurt = at % status.st_size

    def pread(self: Files, fd: int, count: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == status.st_ino and offset <= hurt < offset + count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(self, fd, count, offset)

    patch.setattr(Files, "pread", pread)


def fill(path: Path) -> Path:
    """Several sealed segments with one chunk an episode."""
    with StoreWriter.open(path, segment_bytes=20_000) as writer:
        for number in range(EPISODES):
            writer.append(chunk(f"e{number:02d}", end=True).encode())
        writer.rotate()
    return path


def readable(path: Path) -> set[str]:
    """The episodes whose chunk can be read."""
    found = set()
    with StoreReader.open(path) as reader:
        reader.refresh()
        for row in range(len(reader.index.chunks)):
            try:
                found.add(reader.read(row).header.episode)
            except StoreCorrupt:
                continue
    return found


@pytest.mark.parametrize("at", [IN_RECORD, IN_HEADER, IN_INDEX, IN_TRAILER])
def test_damage_is_listed_and_quarantined_and_a_writer_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    break_sector(monkeypatch, fill(tmp_path), at)
    found = verify_log(tmp_path)
    assert found and {damage.segment for damage in found} == {0}
    assert len(readable(tmp_path)) >= EPISODES - BLOCK_CHUNKS
    quarantine_damage(tmp_path, found)
    assert not verify_log(tmp_path)
    with StoreWriter.open(tmp_path) as writer:
        assert writer.append(chunk("new", end=True).encode())
        writer.sync()
    assert "new" in readable(tmp_path)


def test_quarantined_segment_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_sector(monkeypatch, fill(tmp_path), IN_RECORD)
    quarantine_damage(tmp_path, verify_log(tmp_path))
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        reader.refresh()
        assert list(reclaim_space(writer, reader.index, min_dead_share=0.0)) == [""]
    assert len(readable(tmp_path)) == EPISODES - 1


def test_merge_and_backup_leave_out_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = fill(tmp_path / "store")
    with monkeypatch.context() as patch:
        break_sector(patch, path, IN_RECORD)
        report = merge_stores([path], tmp_path / "all")
        back_up(path, str(tmp_path / "backup"))
    assert (report.chunks, report.damaged) == (EPISODES - 1, 1)
    assert "store.backup_unreadable segment=0000000000.seg offset=0" in caplog.text
    restore(str(tmp_path / "backup"), tmp_path / "restored")
    restored, whole = (segment_path(each, 0).read_bytes() for each in (tmp_path / "restored", path))
    first = IN_RECORD // BLOCK_BYTES * BLOCK_BYTES
    assert restored == whole[:first] + bytes(BLOCK_BYTES) + whole[first + BLOCK_BYTES :]


def test_backup_after_a_passing_read_error_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, url = fill(tmp_path / "store"), str(tmp_path / "backup")
    monkeypatch.setattr(backup, "PART_BYTES", BLOCK_BYTES)  # the sector is in neither the first nor the last part
    with monkeypatch.context() as patch:
        break_sector(patch, path, IN_RECORD)
        assert main(["store", "backup", str(path), url]) == EXIT_DAMAGED
    assert main(["store", "backup", str(path), url]) == 0
    restore(url, tmp_path / "restored")
    assert segment_path(tmp_path / "restored", 0).read_bytes() == segment_path(path, 0).read_bytes()


def test_unreadable_end_of_an_open_segment_is_not_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter.open(tmp_path) as writer:
        writer.append_record(1, b"a" * (BLOCK_BYTES - SEGMENT_HEADER_BYTES - RECORD_HEADER_BYTES))
        writer.append_record(1, b"whole, in a block of its own")
        writer.sync()
    before = segment_path(tmp_path, 0).read_bytes()
    with monkeypatch.context() as patch:
        break_sector(patch, tmp_path, IN_TRAILER)
        with pytest.raises(StoreError, match="Input/output error"):
            LogWriter.open(tmp_path)
    assert segment_path(tmp_path, 0).read_bytes() == before
