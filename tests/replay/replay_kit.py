"""Episodes whose numbers identify their steps, so that a mixed-up row is detected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import simplejpeg
from episode_kit import chunk_header

from user_sys.codec import Array
from user_sys.episode import APPLIED_ACTION, Chunk, EpisodeEnd, EpisodeSource, Phase, frame_columns
from user_sys.replay.batches import Batch, ObservationFeatures
from user_sys.replay.buffer import ReplayBuffer
from user_sys.store.labels import Label
from user_sys.store.store import StoreReader, StoreWriter

CAMERA = "observation.images.front"
SHAPE = (16, 24, 3)
STATE = ObservationFeatures(vectors={"observation.state": 3}, action_size=2, cameras={})
PICTURES = ObservationFeatures(vectors={"observation.state": 3}, action_size=2, cameras={CAMERA: SHAPE})
ROOM = 1 << 20


def state(episode: int, step: Array | int) -> Array:
    """An observation that contains its episode and step."""
    step = np.asarray(step)
    return np.stack([np.full(step.shape, episode), step, step + 1000 * episode], axis=-1).astype(np.float32)


def grey(level: int) -> bytes:
    return simplejpeg.encode_jpeg(np.full(SHAPE, level, np.uint8), quality=95)


def odd(level: int) -> bytes:
    """A JPEG file with chroma subsampling that simplejpeg does not name."""
    file = bytearray(grey(level))
    file[file.index(b"\xff\xc0") + 11] = 0x14
    return bytes(file)


def raw(level: int) -> Array:
    return np.full(SHAPE, level, np.uint8)


def chunk(
    episode: int,
    first: int,
    steps: int,
    *,
    index: int = 0,
    end: bool = False,
    source: EpisodeSource = EpisodeSource.ONLINE,
    phase: int | list[int] = Phase.POLICY,
    frames: Mapping[int, bytes | Array] | None = None,
    embodiment: str = "e1",
    robot: str = "panda-0",
    task: str = "lift",
    version: int = 0,
    at_s: float = 0.0,
    success: bool | None = True,
    extras: Mapping[str, Array] | None = None,
) -> Chunk:
    """Steps `first` to ``first + steps`` of an episode; `frames` are by step, the final observation's included."""
    at = np.arange(first, first + steps)
    columns: dict[str, Array] = {
        "observation.state": state(episode, at),
        "action": np.full((steps, 2), -1, np.float32),
        APPLIED_ACTION: np.stack([at, np.full(steps, episode)], axis=-1).astype(np.float32),
        "reward": at.astype(np.float32),
        "terminated": (at == first + steps - 1) & end,
        "phase": np.broadcast_to(np.asarray(phase, np.uint8), steps).copy(),
        "policy_version": np.full(steps, version, np.int64),
        "t_capture_ns": np.full(steps, round(at_s * 1e9), np.int64),
        **(extras or {}),
    }
    final: dict[str, Array] = {"observation.state": state(episode, first + steps)} if end else {}
    if frames is not None:
        columns |= frame_columns(CAMERA, [frames.get(int(step)) for step in at], columns["t_capture_ns"])
        if end and first + steps in frames:
            last = frames[first + steps]
            final[CAMERA] = np.frombuffer(last, np.uint8) if isinstance(last, bytes) else last
    header = chunk_header(
        f"ep-{episode}",
        steps,
        index=index,
        first_step=first,
        robot=robot,
        embodiment=embodiment,
        task=task,
        source=source,
        end=EpisodeEnd(steps=first + steps, success=success) if end else None,
    )
    return Chunk(header, columns, final)


def seen(batch: Batch) -> set[tuple[int, int]]:
    """The (episode, step) pairs in a batch, after a check that each transition exists."""
    now, then = batch.observation["observation.state"], batch.next_observation["observation.state"]
    np.testing.assert_array_equal(now[:, 2], now[:, 1] + 1000 * now[:, 0])
    np.testing.assert_array_equal(then, now + [0, 1, 1])
    np.testing.assert_array_equal(batch.action, now[:, 1::-1])
    np.testing.assert_array_equal(batch.reward, now[:, 1])
    return {(int(a), int(b)) for a, b, _ in now}


class Store:
    """A store with its writer, and replay buffers over it."""

    def __init__(self, path: Path, writer: StoreWriter) -> None:
        self.path, self.writer = path, writer

    def put(self, *records: Chunk | Label) -> None:
        for record in records:
            if isinstance(record, Chunk):
                self.writer.append(record.encode())
            else:
                self.writer.append_label(record)
        self.writer.sync()

    @contextmanager
    def replay(self, features: ObservationFeatures = STATE, cache_bytes: int = ROOM) -> Iterator[ReplayBuffer]:
        """A buffer that has read the stored content."""
        with StoreReader.open(self.path) as reader, ReplayBuffer(reader, features, cache_bytes=cache_bytes) as replay:
            replay.refresh()
            yield replay
