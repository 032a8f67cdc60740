"""Damage anywhere in a log is reported, costs the damaged record, and can be quarantined."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from user_sys.errors import StoreCorrupt, StoreLocked
from user_sys.store.files import Files
from user_sys.store.log_reader import LogReader
from user_sys.store.log_writer import LogWriter
from user_sys.store.manifest import MANIFEST
from user_sys.store.record_format import RECORD_HEADER_BYTES, Damage, RecordRef, segment_path
from user_sys.store.verify import quarantine_damage, verify_log

COUNT = 15


class Unsynced(Files):
    """Files without real syncs, for tests without power cuts."""

    def fsync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


UNSYNCED = Unsynced()


def summarise(records: Iterable[tuple[RecordRef, memoryview]]) -> bytes:
    return b"".join(bytes(payload[:8]) for _, payload in records)


def content(number: int) -> bytes:
    return b"%04d" % number * 20


def filled(path: Path) -> list[RecordRef]:
    """Fifteen records, four per segment, the first six of them rewritten into one of five."""
    with LogWriter.open(path, segment_bytes=600, summarise=summarise, background=False) as writer:
        for number in range(COUNT):
            writer.append(1, content(number))
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


def padding_of(refs: list[RecordRef], at: int) -> bool:
    ends = [ref.offset + RECORD_HEADER_BYTES + ref.length for ref in refs]
    return any(end <= at < end + -end % 8 for end in ends)


def flipped(raw: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_verify_finds_nothing_in_sound_log(tmp_path: Path) -> None:
    refs = filled(tmp_path)
    assert len(refs) == COUNT - 1 and verify_log(tmp_path) == []
    with LogWriter.open(tmp_path) as writer:
        writer.append(1, content(15))
        writer.sync()
        assert verify_log(tmp_path) == []
        with pytest.raises(StoreLocked):
            quarantine_damage(tmp_path, [])


@pytest.mark.parametrize("file", ["0000000000-00002.00001.seg", "0000000002.seg", "0000000003.seg", MANIFEST])
def test_flipped_byte_is_reported_and_loses_at_most_one_record(tmp_path: Path, file: str) -> None:
    refs = filled(tmp_path)
    whole, path = held(tmp_path), tmp_path / file
    raw, manifest = path.read_bytes(), (tmp_path / MANIFEST).read_bytes()
    number = -1 if file == MANIFEST else int(file[:10])
    inside = [ref for ref in refs if ref.segment == number]
    rng = random.Random(0)
    for at in range(0, len(raw), 3):
        path.write_bytes(flipped(raw, at, rng.randrange(8)))
        found = verify_log(tmp_path)
        hit = [r for r in inside if r.offset <= at < r.offset + RECORD_HEADER_BYTES + r.length]
        lost = {ref.sequence for ref in hit}
        assert held(tmp_path) == {key: value for key, value in whole.items() if key not in lost}, at
        if not found:
            assert padding_of(inside, at) or _is_footer_padding(raw, at), at
            continue
        assert {damage.segment for damage in found} == {number}, at
        assert not hit or [damage.sequence for damage in found] == [ref.sequence for ref in hit], at
        quarantine_damage(tmp_path, found, files=UNSYNCED)
        assert verify_log(tmp_path) == [], at
        path.write_bytes(raw)
        (tmp_path / MANIFEST).write_bytes(manifest)


def _is_footer_padding(raw: bytes, at: int) -> bool:
    """Whether the byte is padding of the index or the summary."""
    return raw[at] == 0 and at > len(raw) - 64 - 400


def test_quarantine_copies_damage_and_keeps_neighbours(tmp_path: Path) -> None:
    refs = filled(tmp_path)
    target = next(ref for ref in refs if ref.sequence == 9)
    path = segment_path(tmp_path, target.segment)
    path.write_bytes(flipped(path.read_bytes(), target.offset + RECORD_HEADER_BYTES, 3))
    (damage,) = verify_log(tmp_path)
    assert (damage.segment, damage.offset, damage.sequence) == (target.segment, target.offset, 9)
    (copy,) = quarantine_damage(tmp_path, [damage])
    assert len(copy.read_bytes()) == damage.length and verify_log(tmp_path) == []
    with LogWriter.open(tmp_path, summarise=summarise) as writer:
        writer.rewrite([target.segment], lambda ref: True)
        assert writer.next_sequence == COUNT
    assert verify_log(tmp_path) == [] and sorted(held(tmp_path)) == [0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14]


def test_rewrite_refuses_damaged_record(tmp_path: Path) -> None:
    target = next(ref for ref in filled(tmp_path) if ref.sequence == 9)
    path = segment_path(tmp_path, target.segment)
    path.write_bytes(flipped(path.read_bytes(), target.offset + RECORD_HEADER_BYTES, 3))
    with LogWriter.open(tmp_path) as writer, pytest.raises(StoreCorrupt, match="record 9"):
        writer.rewrite([target.segment], lambda ref: True)
    assert [damage.sequence for damage in verify_log(tmp_path)] == [9]


def test_missing_segment_is_reported_and_its_numbers_not_reused(tmp_path: Path) -> None:
    filled(tmp_path)
    segment_path(tmp_path, 2).unlink()
    segment_path(tmp_path, 3).unlink()
    assert [(damage.segment, damage.reason) for damage in verify_log(tmp_path)] == [
        (2, "the segment's file is missing"),
        (3, "the segment's file is missing"),
    ]
    with LogWriter.open(tmp_path) as writer:
        assert writer.append(1, b"next").segment == 4 and writer.next_sequence > COUNT
    quarantine_damage(tmp_path, verify_log(tmp_path))
    assert verify_log(tmp_path) == [] and len(held(tmp_path)) == 8


def test_swapped_and_foreign_segments_are_reported_and_not_read(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path in (ours, theirs):
        filled(path)
    segment_path(ours, 2).write_bytes(segment_path(theirs, 2).read_bytes())
    assert [(damage.segment, damage.reason) for damage in verify_log(ours)] == [(2, "the file belongs to another log")]
    segment_path(ours, 3).write_bytes(segment_path(theirs, 3).read_bytes())
    with LogWriter.open(ours) as writer:
        assert writer.append(1, b"next").segment == 4 and writer.next_sequence > COUNT
    assert segment_path(ours, 3).read_bytes() == segment_path(theirs, 3).read_bytes(), "it is left alone"
    one, two = segment_path(theirs, 2).read_bytes(), segment_path(theirs, 3).read_bytes()
    segment_path(theirs, 2).write_bytes(two)
    segment_path(theirs, 3).write_bytes(one)
    assert {damage.reason for damage in verify_log(theirs)} == {
        "the file belongs to segment 3",
        "the file belongs to segment 2",
    }


def test_older_copy_of_sealed_segment_is_reported(tmp_path: Path) -> None:
    filled(tmp_path)
    path = segment_path(tmp_path, 2)
    with LogReader.open(tmp_path) as reader:
        (batch,) = (batch for batch in reader.refresh() if batch.segment == 2)
    path.write_bytes(path.read_bytes()[: batch.records[2].offset])
    found = verify_log(tmp_path)
    assert any("no trailer" in damage.reason for damage in found)
    assert {damage.sequence for damage in found} >= {batch.records[2].sequence}


@pytest.mark.parametrize("how", ["lost", "torn", "old"])
def test_log_is_complete_without_manifest(tmp_path: Path, how: str) -> None:
    filled(tmp_path)
    old = (tmp_path / MANIFEST).read_bytes()
    with LogWriter.open(tmp_path, segment_bytes=600, summarise=summarise, background=False) as writer:
        for number in range(COUNT, COUNT + 8):
            writer.append(1, content(number))
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
        writer.append(1, b"after")
    assert verify_log(tmp_path) == [], "also once the segment is sealed behind it"
