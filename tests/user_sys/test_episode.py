"""Chunks: self-contained, and validated on receipt."""

from __future__ import annotations

import re
import weakref

import numpy as np
import pytest
from crc32c import crc32c
from episode_kit import chunk_header
from msgspec.structs import replace

from user_sys.episode import (
    Chunk,
    EpisodeEnd,
    decode_chunk,
    frame_columns,
    new_episode_id,
    parse_chunk,
)
from user_sys.errors import WireError

HEADER = chunk_header(
    "panda-0-1763695921123-9f2c1a",
    3,
    index=1,
    first_step=10,
    embodiment="0123456789abcdef",
    seed=5,
    end=EpisodeEnd(steps=13, success=True),
)
COLUMNS = {"reward": np.array([0, 0, 1], np.float32), "observation.state": np.zeros((3, 4), np.float32)}


def test_chunk_round_trip() -> None:
    chunk = decode_chunk(Chunk(HEADER, COLUMNS, {"observation.state": np.ones(4, np.float32)}).encode())
    assert chunk.header == HEADER
    assert np.array_equal(chunk.columns["reward"], COLUMNS["reward"])
    assert chunk.final["observation.state"].tolist() == [1, 1, 1, 1]


JPEG = [b"\xff\xd8one", None, b"\xff\xd8number two"]
RAW = [None, np.full((2, 4, 3), 7, np.uint8), np.full((2, 4, 3), 9, np.uint8)]
TIMES = {"front": [5, 5, 8], "wrist": [0, 6, 9]}


def with_frames(changes: dict[str, np.ndarray] | None = None) -> Chunk:
    front = frame_columns("observation.images.front", JPEG, TIMES["front"])
    wrist = frame_columns("observation.images.wrist", RAW, TIMES["wrist"])
    return Chunk(HEADER, {**COLUMNS, **front, **wrist, **(changes or {})}, {})


def test_single_frame_is_found_and_checked() -> None:
    columns = decode_chunk(with_frames().encode()).columns
    for camera, frames in (("front", JPEG), ("wrist", RAW)):
        name, at = f"observation.images.{camera}", 0
        assert columns[f"{name}.t_capture_ns"].tolist() == TIMES[camera]
        joined = columns[name].tobytes()
        for step, frame in enumerate(frames):
            length = int(columns[f"{name}.length"][step])
            expected = b"" if frame is None else frame if isinstance(frame, bytes) else frame.tobytes()
            assert joined[at : at + length] == expected
            assert crc32c(joined[at : at + length]) == columns[f"{name}.crc"][step]
            at += length
    assert columns["observation.images.wrist"].shape == (2, 2, 4, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"observation.images.front.length": np.array([5, 1, 12], np.int32)},
        {"observation.images.front.length": np.array([22, 0, -5], np.int32)},
        {"observation.images.front.length": np.array([5, 0, 12], np.int64)},
        {"observation.images.front.crc": np.zeros(3, np.int64)},
        {"observation.images.front.crc": np.zeros(2, np.uint32)},
        {"observation.images.front.t_capture_ns": np.zeros(2, np.int64)},
        {"observation.images.front.t_capture_ns": np.zeros(3, np.float64)},
        {"observation.images.front.t_capture_ns": np.zeros((3, 1), np.int64)},
        {"observation.images.front": np.zeros((17, 1), np.uint8)},
        {"observation.images.front": np.zeros(17, np.int8)},
        {"observation.images.wrist": np.zeros((2, 2, 4, 4), np.uint8)},
        {"observation.images.wrist.length": np.array([0, 23, 25], np.int32)},
        {"observation.images.new": np.zeros(3, np.uint8)},
        {"reward": np.zeros(3, np.float64)},
        {"phase": np.zeros((3, 1), np.uint8)},
        {"phase": np.array([0, 1, 77], np.uint8)},
        {"reward": np.array([0, np.nan, 1], np.float32)},
        {"observation.state": np.float32(1)},
    ],
)
def test_inconsistent_frames_and_columns_are_refused(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises(WireError):
        parse_chunk(with_frames({k: np.asarray(v) for k, v in changes.items()}).encode())


def test_long_layout_of_a_chunk_is_not_kept() -> None:
    columns = {f"a-long-name-of-column-{number}": np.zeros(3, np.float32) for number in range(300)}
    chunk = parse_chunk(Chunk(HEADER, columns, {}).encode())
    layout = weakref.ref(chunk.packet.layout)
    del chunk
    assert layout() is None


def test_error_about_many_columns_is_short() -> None:
    columns = {f"column-{number}": np.zeros(1 + number % 2, np.float32) for number in range(5000)}
    with pytest.raises(WireError, match="different lengths") as refused:
        parse_chunk(Chunk(HEADER, columns, {}).encode())
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("suffix", [".length", ".crc", ".t_capture_ns"])
def test_frames_without_their_columns_are_refused(suffix: str) -> None:
    whole = with_frames()
    columns = {name: column for name, column in whole.columns.items() if name != f"observation.images.wrist{suffix}"}
    with pytest.raises(WireError, match=rf"wrist.*without its column .{re.escape(suffix)}.*version"):
        parse_chunk(Chunk(HEADER, columns, {}).encode())


def test_mixed_frame_kinds_are_refused() -> None:
    for frames in ([JPEG[0], RAW[1]], [np.zeros((2, 4), np.uint8)], [np.zeros((2, 4, 3), np.float32)]):
        with pytest.raises(WireError):
            frame_columns("observation.images.front", frames, range(len(frames)))


def test_packed_chunk_returns_single_columns() -> None:
    packed = parse_chunk(Chunk(HEADER, COLUMNS, {}).encode())
    reward = packed.column("reward")
    assert reward is not None and reward.tolist() == [0, 0, 1] and packed.column("phase") is None
    assert packed.schema == parse_chunk(Chunk(replace(HEADER, index=2), COLUMNS, {}).encode()).schema


@pytest.mark.parametrize("name", ["../../etc/passwd", "", ".hidden", "a/b", "a\0b", "x" * 200])
@pytest.mark.parametrize("field", ["episode", "robot", "task", "embodiment"])
def test_unsafe_episode_name_is_refused(field: str, name: str) -> None:
    with pytest.raises(WireError, match="not a name"):
        decode_chunk(Chunk(replace(HEADER, **{field: name}), COLUMNS, {}).encode())


@pytest.mark.parametrize("name", ["observation.images.a/../../../../a", "", "a\nb", "a\\b", "x" * 300])
def test_unsafe_column_name_is_refused(name: str) -> None:
    with pytest.raises(WireError, match="not a column's name"):
        parse_chunk(Chunk(HEADER, {name: np.zeros(3, np.float32)}, {}).encode())


@pytest.mark.parametrize(
    "final",
    [
        {"observation.state": np.float32(1)},
        {"observation.images.front": np.zeros((), np.uint8)},
        {"observation.images.front": np.zeros(5, np.float32)},
        {"observation.images.front": np.zeros((2, 4), np.uint8)},
    ],
)
def test_invalid_final_observation_is_refused(final: dict[str, np.ndarray]) -> None:
    with pytest.raises(WireError):
        parse_chunk(Chunk(HEADER, COLUMNS, {k: np.asarray(v) for k, v in final.items()}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"sentence": "lift " * 1000},
        {"end": EpisodeEnd(steps=-1, success=None)},
        {"end": EpisodeEnd(steps=(1 << 64) - 1, success=None)},
        {"end": EpisodeEnd(steps=13, success=True, reward_source="x" * 5000)},
    ],
)
def test_header_values_out_of_limits_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        parse_chunk(Chunk(replace(HEADER, **changes), COLUMNS, {}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"steps": 10**6},
        {"index": -1},
        {"first_step": -1},
        {"steps": 2},
        {"seed": 1 << 63},
        {"index": 1 << 31},
    ],
)
def test_chunk_with_a_wrong_length_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(WireError):
        decode_chunk(Chunk(replace(HEADER, **changes), COLUMNS, {}).encode())


def test_episode_ids_sort_by_time_and_are_unique() -> None:
    names = [new_episode_id("panda-0") for _ in range(1000)]
    assert len(set(names)) == 1000
    assert names[0].rsplit("-", 1)[0] <= names[-1].rsplit("-", 1)[0]
