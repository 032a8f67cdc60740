"""The edge's outbox: recorded chunks survive until they are acknowledged."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from episode_kit import chunk_header
from hypothesis import given, settings
from hypothesis import strategies as st

from user_sys.edge.outbox import RESERVE_BYTES, ChunkTooLarge, Outbox, OutboxFull
from user_sys.episode import Chunk, EpisodeSource, decode_chunk
from user_sys.errors import LinkDown, StoreError, StoreLocked
from user_sys.store.files import Buffer, Files
from user_sys.tunnel.limits import MAX_CHUNK_BYTES


def packet(index: int, size_kb: int = 1) -> bytes:
    header = chunk_header(
        "e",
        1,
        index=index,
        first_step=index,
        robot="r",
        embodiment="fake",
        task="t",
        sentence="",
        source=EpisodeSource.DEMO,
        started_unix_ns=0,
    )
    return Chunk(header, {"observation.state": np.full((1, 256 * size_kb), index, np.float32)}, {}).encode()


def indexes(outbox: Outbox, after: int = -1) -> list[int]:
    return [decode_chunk(chunk.packet).header.index for chunk in outbox.pending(after)]


def test_acknowledged_chunks_are_deleted(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        for index in range(30):
            outbox.acknowledge(outbox.append(packet(index)))
        assert len(outbox) == outbox.used_bytes == 0
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000
    with Outbox.open(tmp_path) as outbox:
        assert indexes(outbox) == []


def test_numbers_follow_those_that_wait(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as first:
        assert [first.append(packet(index)) for index in range(3)] == [0, 1, 2]
        first.acknowledge(0)
    with Outbox.open(tmp_path) as second:
        assert second.append(packet(3)) == 3 and indexes(second) == [1, 2, 3]


def test_sessions_are_counted(tmp_path: Path) -> None:
    for before in range(3):
        with Outbox.open(tmp_path) as outbox:
            assert outbox.count_session() == before
    (tmp_path / "sessions").write_bytes(b"")
    with Outbox.open(tmp_path) as outbox:
        assert outbox.count_session() == 0


def test_failed_append_leaves_no_file_of_its_number(tmp_path: Path) -> None:
    files = FailingFolder()
    with Outbox.open(tmp_path, files=files) as outbox:
        outbox.append(packet(0))
        files.fails = True
        with pytest.raises(StoreError):
            outbox.append(packet(1), packet(2))
        files.fails = False
        assert indexes(outbox) == [0] and outbox.append(packet(3), packet(4)) == 2
    with Outbox.open(tmp_path) as outbox:
        assert indexes(outbox) == [0, 3, 4]


class HalfFullDisk(Files):
    """A disk on which `room` more bytes can be written."""

    room = 1000

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().pwritev(fd, [b"".join(buffers)[: self.room]], offset)
        self.room -= written
        return written


def test_append_without_disk_space_gives_its_bytes_back(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, files=HalfFullDisk()) as outbox:
        with pytest.raises(OutboxFull, match="waiting for disk space"):
            outbox.append(packet(0))
        assert {file.name for file in tmp_path.iterdir()} == {"LOCK"}


class FailingFolder(Files):
    """Files whose names cannot be made durable while `fails` is set."""

    fails = False

    def sync_folder(self, path: Path) -> None:
        if self.fails:
            raise OSError(errno.EIO, "I/O error")
        super().sync_folder(path)


def test_reserve_takes_chunks_of_a_full_outbox(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, max_bytes=1 << 20) as outbox:
        outbox.allocate_reserve()
        reserved = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
        assert reserved >= RESERVE_BYTES
        kept = 0
        with pytest.raises(OutboxFull):
            for _ in range(100):
                outbox.append(packet(kept, size_kb=64))
                kept += 1
        stopped = threading.Event()
        stopped.set()
        for index in range(kept, kept + 100):
            outbox.append_when_free(packet(index, size_kb=64), stopped)
        assert indexes(outbox) == list(range(kept + 100))
        assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) < reserved


def test_full_outbox_raises_until_there_is_room(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, max_bytes=1 << 20) as outbox:
        kept = 0
        with pytest.raises(OutboxFull, match="recording pauses"):
            for index in range(2000):
                outbox.append(packet(index))
                kept += 1
        assert indexes(outbox) == list(range(kept))
        with pytest.raises(OutboxFull):
            outbox.append(packet(kept))
        outbox.acknowledge(kept // 2)
        outbox.append(packet(kept))
        assert indexes(outbox) == list(range(kept // 2 + 1, kept + 1))


def test_second_session_of_a_robot_is_refused(tmp_path: Path) -> None:
    with Outbox.open(tmp_path), pytest.raises(StoreLocked):
        Outbox.open(tmp_path)
    Outbox.open(tmp_path).close()


def test_damaged_chunk_is_logged_and_skipped(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        for index in range(3):
            outbox.append(packet(index))
        damaged = sorted(tmp_path.glob("*.chunk"))[1]
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 0xFF
        damaged.write_bytes(content)
        for _ in range(3):
            assert indexes(outbox) == [0, 2] and outbox.damaged == 1
        assert len(outbox) == 2 and damaged.with_suffix(".damaged").exists()
        sorted(tmp_path.glob("*.chunk"))[-1].write_bytes(b"")
        outbox.acknowledge(0)
        assert not indexes(outbox) and not len(outbox) and not outbox.used_bytes, "nothing is left to deliver"
    with Outbox.open(tmp_path) as outbox:
        assert outbox.append(packet(3)) == 3, "a number is never used again"


class BusyFiles(Files):
    """A process with too many open files cannot read for a while."""

    is_busy = False

    def open(self, path: Path, flags: int) -> int:
        if self.is_busy:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open(path, flags)


def test_chunk_that_cannot_be_read_now_is_sent_later(tmp_path: Path) -> None:
    files = BusyFiles()
    with Outbox.open(tmp_path, files=files) as outbox:
        for index in range(3):
            outbox.append(packet(index))
        files.is_busy = True
        assert indexes(outbox) == []
        files.is_busy = False
        assert indexes(outbox) == [0, 1, 2] and outbox.damaged == 0


def test_refused_chunk_is_saved_aside(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        for index in range(3):
            outbox.append(packet(index))
        outbox.set_aside(1, "another robot's name")
        outbox.set_aside(99, "never sent")
        outbox.acknowledge(1)
        assert indexes(outbox) == [2]
    (kept,) = tmp_path.glob("*.refused")
    assert kept.read_bytes() == packet(1)
    with Outbox.open(tmp_path) as outbox:
        outbox.acknowledge(2)
    with Outbox.open(tmp_path) as outbox:
        assert outbox.append(packet(3)) == 2, "above the number of the refused chunk"
    kept.rename(kept.with_suffix(".chunk"))
    with Outbox.open(tmp_path) as outbox:
        assert indexes(outbox) == [1, 3], "a person has it sent again"


class FullFolder(Files):
    """A disk without a free block: folders cannot be made."""

    def make_folder(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_refused_chunk_on_a_full_disk_is_saved_aside(tmp_path: Path) -> None:
    files = FullFolder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullFolder, "make_folder", Files.make_folder)
        outbox = Outbox.open(tmp_path, files=files)
    with outbox:
        outbox.append(packet(0))
        outbox.set_aside(0, "another robot's name")
        assert not len(outbox)


def test_refused_chunk_that_cannot_be_renamed_stays_and_ends_the_session(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        outbox.append(packet(0))
        chunk = next(tmp_path.glob("*.chunk"))
        chunk.with_suffix(".refused").mkdir()
        with pytest.raises(LinkDown, match="cannot be renamed"):
            outbox.set_aside(0, "another robot's name")
        assert indexes(outbox) == [0]


OPERATIONS = st.lists(st.one_of(st.sampled_from(["append", "append 3", "reopen"]), st.integers(0, 40)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_any_history_leaves_the_unacknowledged_chunks(operations: list[str | int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outbox = Outbox.open(Path(folder), max_bytes=1 << 19)
        appended, acknowledged = 0, -1
        for operation in operations:
            if operation == "append":
                outbox.append(packet(appended))
                appended += 1
            elif operation == "append 3":
                outbox.append(*map(packet, range(appended, appended + 3)))
                appended += 3
            elif operation == "reopen":
                outbox.close()
                outbox = Outbox.open(Path(folder), max_bytes=1 << 19)
            else:
                acknowledged = max(acknowledged, min(int(operation), appended - 1))
                outbox.acknowledge(acknowledged)
            assert indexes(outbox) == list(range(acknowledged + 1, appended))
        outbox.close()


def test_too_large_chunk_is_refused(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        with pytest.raises(ChunkTooLarge, match="smaller pictures"):
            outbox.append(packet(0, size_kb=(MAX_CHUNK_BYTES >> 10) + 1))
        outbox.append(packet(1))
        assert indexes(outbox) == [1]
