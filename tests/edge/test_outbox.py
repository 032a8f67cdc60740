"""The edge's outbox: recorded chunks survive until they are acknowledged."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from user_sys.edge.outbox import RESERVE_BYTES, ChunkTooLarge, Outbox, OutboxFull
from user_sys.episode import Chunk, ChunkHeader, EpisodeSource, decode_chunk
from user_sys.errors import StoreLocked
from user_sys.tunnel.limits import MAX_CHUNK_BYTES


def packet(index: int, size_kb: int = 1) -> bytes:
    header = ChunkHeader(episode="e", index=index, first_step=index, steps=1, robot="r", embodiment="fake", task="t",
                         sentence="", source=EpisodeSource.DEMO, seed=0, started_unix_ns=0)  # fmt: skip
    return Chunk(header, {"observation.state": np.full((1, 256 * size_kb), index, np.float32)}, {}).encode()


def indexes(outbox: Outbox, after: int = -1) -> list[int]:
    return [decode_chunk(chunk.packet).header.index for chunk in outbox.pending(after)]


def test_unacknowledged_chunks_survive_a_restart_in_order(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        assert [outbox.append(packet(index)) for index in range(5)] == [0, 1, 2, 3, 4]
        assert indexes(outbox) == [0, 1, 2, 3, 4] and indexes(outbox, 2) == [3, 4]
        outbox.acknowledge(1)
        outbox.acknowledge(0)
        assert indexes(outbox) == [2, 3, 4] and len(outbox) == 3
    with Outbox.open(tmp_path) as outbox:
        assert indexes(outbox) == [2, 3, 4]
        assert outbox.append(packet(5)) == outbox.next_sequence - 1 == 5


def test_unsynced_chunk_is_not_pending(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        appended: list[int] = []
        outbox.set_on_append(lambda: appended.append(len(outbox)))
        for index in range(3):
            outbox.append(packet(index), sync=False)
        assert len(outbox) == 0 and appended == []
        outbox.sync()
        assert indexes(outbox) == [0, 1, 2] and appended == [3]


def test_chunk_is_read_twice_alike(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        outbox.append(packet(7))
        (chunk,) = outbox.pending()
        assert (chunk.sequence, chunk.episode, chunk.index, bytes(chunk.packet)) == (0, "e", 7, packet(7))


def test_acknowledged_segments_are_deleted(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, max_bytes=1 << 20) as outbox:
        for index in range(3000):
            outbox.acknowledge(outbox.append(packet(index), sync=True) - 10)
        assert indexes(outbox) == list(range(2990, 3000))
        assert outbox.used_bytes <= 1 << 20
    assert sum(file.stat().st_size for file in tmp_path.glob("*.seg")) <= 1 << 20


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
        outbox.release_reserve()
        for index in range(kept, kept + 100):
            outbox.append(packet(index, size_kb=64))
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
        segment = next(tmp_path.glob("*.seg"))
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 0xFF
        segment.write_bytes(content)
        assert indexes(outbox) == [0, 2] and outbox.damaged == 1


def test_refused_chunk_is_saved_aside(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        for index in range(3):
            outbox.append(packet(index))
        outbox.set_aside(1, "another robot's name")
        outbox.set_aside(99, "never sent")
        outbox.acknowledge(1)
        assert indexes(outbox) == [2]
    (kept,) = (tmp_path / "refused").iterdir()
    assert kept.read_bytes() == packet(1)


def test_torn_position_sends_chunks_again(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        for index in range(3):
            outbox.append(packet(index))
        outbox.acknowledge(1)
    (tmp_path / "acknowledged").write_bytes(b"\0" * 5)
    with Outbox.open(tmp_path) as outbox:
        assert indexes(outbox) == [0, 1, 2]


OPERATIONS = st.lists(st.one_of(st.just("append"), st.just("sync"), st.just("reopen"), st.integers(0, 40)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_any_history_leaves_the_unacknowledged_chunks(operations: list[str | int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outbox = Outbox.open(Path(folder), max_bytes=1 << 19)
        appended, durable, acknowledged = 0, 0, -1
        for operation in operations:
            if operation == "append":
                outbox.append(packet(appended, 8), sync=False)
                appended += 1
            elif operation == "sync":
                outbox.sync()
                durable = appended
            elif operation == "reopen":
                outbox.close()
                durable = appended
                outbox = Outbox.open(Path(folder), max_bytes=1 << 19)
            else:
                acknowledged = max(acknowledged, min(int(operation), durable - 1))
                outbox.acknowledge(acknowledged)
            assert indexes(outbox) == list(range(acknowledged + 1, durable))
        outbox.close()


def test_too_large_chunk_is_refused(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        with pytest.raises(ChunkTooLarge, match="smaller pictures"):
            outbox.append(packet(0, size_kb=(MAX_CHUNK_BYTES >> 10) + 1))
        outbox.append(packet(1))
        assert indexes(outbox) == [1]
