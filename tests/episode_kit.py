"""Headers of chunks, for tests that make experience of their own."""

from __future__ import annotations

from typing import Any

from user_sys.episode import ChunkHeader, EpisodeSource


def chunk_header(episode: str, steps: int, **fields: Any) -> ChunkHeader:
    """The header of the first chunk of an online episode; `fields` replace its defaults."""
    defaults: dict[str, Any] = {
        "index": 0,
        "first_step": 0,
        "robot": "panda-0",
        "embodiment": "e1",
        "task": "lift",
        "sentence": "lift the cube",
        "source": EpisodeSource.ONLINE,
        "seed": 0,
        "started_unix_ns": 1,
    }
    return ChunkHeader(episode=episode, steps=steps, **defaults | fields)
