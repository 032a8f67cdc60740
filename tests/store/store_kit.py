"""Chunks to store, and queries of stored chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from user_sys.episode import Chunk, ChunkHeader, EpisodeEnd, EpisodeSource, Phase
from user_sys.store.record_format import SegmentName
from user_sys.store.store import StoreReader


def chunk(
    episode: str,
    index: int = 0,
    steps: int = 4,
    *,
    end: bool = False,
    success: bool | None = True,
    source: EpisodeSource = EpisodeSource.ONLINE,
    width: int = 3,
    robot: str = "panda-0",
) -> Chunk:
    """A chunk of `steps` steps whose observations are its index."""
    phase = np.array([Phase.TELEOP, Phase.CORRECTION, Phase.RECOVERY, *[Phase.POLICY] * 99], np.uint8)[:steps]
    columns = {
        "observation.state": np.full((steps, width), index, np.float32),
        "reward": np.full(steps, 0.5, np.float32),
        "phase": phase,
        "policy_version": np.where(phase == Phase.POLICY, index + 3, -1).astype(np.int64),
    }
    header = ChunkHeader(
        episode=episode,
        index=index,
        first_step=index * 4,
        steps=steps,
        robot=robot,
        embodiment="e1",
        task="lift",
        sentence="lift the cube",
        source=source,
        seed=0,
        started_unix_ns=1,
        end=EpisodeEnd(steps=index * 4 + steps, success=success) if end else None,
    )
    return Chunk(header, columns, {"observation.state": np.zeros(width, np.float32)} if end else {})


def segment_path(path: Path, number: int) -> Path:
    """Path of a segment's file as written first, in the log at `path`."""
    return path / str(SegmentName(number))


def stored(reader: StoreReader) -> list[tuple[str, int]]:
    """(episode, index) of every chunk, in order of storage."""
    index = reader.index
    names = [index.episodes.ids.names[row] for row in index.chunks.episode]
    return list(zip(names, index.chunks.index.tolist(), strict=True))
