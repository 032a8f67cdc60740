"""Damage anywhere in a log is reported, costs the damaged record, and can be quarantined."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_kit import segment_path

from user_sys.errors import StoreCorrupt
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.manifest import MANIFEST
from user_sys.store.record_format import RECORD_HEADER_BYTES, Damage, RecordRef
from user_sys.store.verify import quarantine_damage, verify_log

COUNT = 15


def content(number: int) -> bytes:
    return b"%04d" % number * 20


def filled(path: Path) -> list[RecordRef]:
    """Fifteen records, four per segment, the first six of them rewritten into one of five."""
    with LogWriter.open(path, segment_bytes=600) as writer:
        for number in range(COUNT):
            writer.append_record(1, content(number))
        writer.rewrite([0, 1], lambda ref: ref.sequence != 5)
    with LogReader.open(path) as reader:
        return reader.records()


def held(path: Path) -> dict[int, bytes]:
    """The readable records, by sequence number."""
    found = {}
    with LogReader.open(path) as reader:
        for ref in reader.records():
            try:
                found[ref.sequence] = bytes(reader.read(ref))
            except StoreCorrupt:
                continue
    return found


def flipped(raw: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_quarantine_copies_damage_and_keeps_neighbours(tmp_path: Path) -> None:
    refs = filled(tmp_path)
    target = next(ref for ref in refs if ref.sequence == 9)
    path = segment_path(tmp_path, target.segment)
    path.write_bytes(flipped(path.read_bytes(), target.offset + RECORD_HEADER_BYTES, 3))
    (damage,) = verify_log(tmp_path)
    assert (damage.segment, damage.offset, damage.sequence) == (target.segment, target.offset, 9)
    (copy,) = quarantine_damage(tmp_path, [damage])
    assert len(copy.read_bytes()) == damage.length and verify_log(tmp_path) == []
    with LogWriter.open(tmp_path) as writer:
        writer.rewrite([target.segment], lambda ref: True)
        assert writer.next_sequence == COUNT
    assert verify_log(tmp_path) == [] and sorted(held(tmp_path)) == [0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14]


def test_missing_segment_is_reported_and_its_numbers_not_reused(tmp_path: Path) -> None:
    filled(tmp_path)
    segment_path(tmp_path, 2).unlink()
    segment_path(tmp_path, 3).unlink()
    assert [(damage.segment, damage.reason) for damage in verify_log(tmp_path)] == [
        (2, "the segment's file is missing"),
        (3, "the segment's file is missing"),
    ]
    with LogWriter.open(tmp_path) as writer:
        assert writer.append_record(1, b"next").segment == 4 and writer.next_sequence > COUNT
    quarantine_damage(tmp_path, verify_log(tmp_path))
    assert verify_log(tmp_path) == [] and len(held(tmp_path)) == 8


def test_first_segment_that_is_brought_back_after_the_manifest_was_lost_is_read(tmp_path: Path) -> None:
    filled(tmp_path)
    whole, first = held(tmp_path), min(tmp_path.glob("*.seg"))
    moved = first.rename(tmp_path / "lost+found")
    (tmp_path / MANIFEST).unlink()
    LogWriter.open(tmp_path).close()
    moved.rename(first)
    LogWriter.open(tmp_path).close()
    assert held(tmp_path) == whole and not verify_log(tmp_path)


@pytest.mark.parametrize("how", ["lost", "torn", "old"])
def test_log_is_complete_without_manifest(tmp_path: Path, how: str) -> None:
    filled(tmp_path)
    old = (tmp_path / MANIFEST).read_bytes()
    with LogWriter.open(tmp_path, segment_bytes=600) as writer:
        for number in range(COUNT, COUNT + 8):
            writer.append_record(1, content(number))
        writer.rewrite([2, 3], lambda ref: ref.sequence != 8)
    whole, current = held(tmp_path), (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).unlink()
    if how != "lost":
        (tmp_path / MANIFEST).write_bytes(old if how == "old" else current[:-9])
    assert held(tmp_path) == whole
    damage = verify_log(tmp_path)
    assert damage == [] if how == "old" else [each.segment for each in damage] == [-1]
    LogWriter.open(tmp_path).close()
    assert verify_log(tmp_path) == [] and held(tmp_path) == whole
    assert (tmp_path / MANIFEST).read_bytes() == current


def test_damage_has_segment_and_offset(tmp_path: Path) -> None:
    refs = filled(tmp_path)
    path = segment_path(tmp_path, refs[-1].segment)
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    (damage,) = verify_log(tmp_path)
    assert isinstance(damage, Damage) and damage.sequence == COUNT - 1 and "power cut" in damage.reason
    quarantine_damage(tmp_path, [damage])
    with LogWriter.open(tmp_path) as writer:
        writer.append_record(1, b"after")
    assert verify_log(tmp_path) == [], "also once the segment is sealed behind it"
