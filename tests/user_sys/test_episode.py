"""Chunks: self-contained, checked when they come from outside."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from user_sys.episode import Chunk, ChunkHeader, EpisodeEnd, Source, decode_chunk, new_episode_id
from user_sys.errors import WireError

HEADER = ChunkHeader(
    episode="panda-0-1763695921123-9f2c1a",
    index=1,
    first_step=10,
    steps=3,
    robot="panda-0",
    embodiment="0123456789abcdef",
    task="lift",
    sentence="lift the cube",
    source=Source.ONLINE,
    seed=5,
    started_unix_ns=1,
    end=EpisodeEnd(steps=13, success=True),
)
COLUMNS = {"reward": np.array([0, 0, 1], np.float32), "observation.state": np.zeros((3, 4), np.float32)}


def test_a_chunk_comes_back_with_header_columns_and_final_observation() -> None:
    chunk = decode_chunk(Chunk(HEADER, COLUMNS, {"observation.state": np.ones(4, np.float32)}).encode())
    assert chunk.header == HEADER
    assert np.array_equal(chunk.columns["reward"], COLUMNS["reward"])
    assert chunk.final["observation.state"].tolist() == [1, 1, 1, 1]


def test_pictures_may_be_of_any_length() -> None:
    pictures = {
        "observation.images.front": np.zeros(999, np.uint8),
        "observation.images.front.length": np.array([999, 0, 0], np.int32),
        "observation.images.front.crc": np.array([1, 0, 0], np.uint32),
    }
    assert (
        decode_chunk(Chunk(HEADER, {**COLUMNS, **pictures}, {}).encode()).columns.keys()
        == {**COLUMNS, **pictures}.keys()
    )


@pytest.mark.parametrize("name", ["../../etc/passwd", "", ".hidden", "a/b", "a\0b", "x" * 200])
@pytest.mark.parametrize("field", ["episode", "robot", "task", "embodiment"])
def test_a_name_that_could_leave_its_folder_is_refused(field: str, name: str) -> None:
    with pytest.raises(WireError, match="not a name"):
        decode_chunk(Chunk(replace(HEADER, **{field: name}), COLUMNS, {}).encode())


@pytest.mark.parametrize("changes", [{"steps": 0}, {"steps": 10**6}, {"index": -1}, {"first_step": -1}, {"steps": 2}])
def test_a_chunk_that_lies_about_its_length_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(WireError):
        decode_chunk(Chunk(replace(HEADER, **changes), COLUMNS, {}).encode())


def test_episode_names_sort_by_time_and_never_repeat() -> None:
    names = [new_episode_id("panda-0") for _ in range(1000)]
    assert len(set(names)) == 1000
    assert names[0].rsplit("-", 1)[0] <= names[-1].rsplit("-", 1)[0]
