"""Episodes: what a step holds, and the chunks in which an episode travels and is stored.

An episode streams in *chunks* while it runs. A chunk is self-contained: it names its episode, robot, embodiment and
task, so that each can be checked and kept without the others. (episode, index) identifies it for ever.

Columns of a chunk of T steps (row t is step ``first_step + t``):

====================== ================ ======================================================================
``observation.*``      float32 (T, d)   what the robot sensed before the step
``action``             float32 (T, a)   what the policy or the person asked for, in the action spec's units
``action.applied``     float32 (T, a)   what the safety kernel let through and the robot applied
``reward``             float32 (T,)     of this step
``terminated``         bool (T,)        the task ended here; do not bootstrap
``truncated``          bool (T,)        cut off here; bootstrap from the final observation
``phase``              uint8 (T,)       `Phase`: who was in control
``safety``             uint16 (T,)      bit set of ``hal.safety.Reason``: why applied differs from action; 0 if equal
``policy_version``     int64 (T,)       the weights that acted; -1 where no policy did, -2 where another run's did
``log_prob``           float32 (T,)     of the behaviour policy; NaN where it has none
``t_capture_ns``       int64 (T,)       monotonic clock of the edge: observation captured
``t_inference_ns``     int64 (T,)       ... action known
``t_command_ns``       int64 (T,)       ... command applied
====================== ================ ======================================================================

Only the first two kinds may take any shape that fits; a chunk may leave out columns that nobody measured.

A camera's frames are four columns. ``observation.images.<camera>`` has the new frames one after the other, either JPEG
files joined, uint8 (bytes,), or raw RGB pictures, uint8 (n, height, width, 3). Beside it stand, with one value a step:

================== ============ ===========================================================================
``.length``        int32 (T,)   the bytes of the step's frame; 0: the frame before still stands
``.crc``           uint32 (T,)  their CRC32C, so that a reader can check the one frame it needs
``.t_capture_ns``  int64 (T,)   monotonic clock of the edge: the frame that stands was captured; 0: none stood
================== ============ ===========================================================================
"""

from __future__ import annotations

import enum
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from user_sys.codec import (
    MAX_CACHED_LAYOUTS,
    Array,
    ArrayEntry,
    PacketLayout,
    ParsedPacket,
    checksum,
    decode_packet_record,
    encode_packet,
    parse_packet,
)
from user_sys.errors import WireError

IMAGE_PREFIX = "observation.images."
APPLIED_ACTION = "action.applied"
FINAL_PREFIX = "final:"  # prefix of the columns that hold the observation after the last step
LENGTH_SUFFIX, CRC_SUFFIX, CAPTURE_TIME_SUFFIX = ".length", ".crc", ".t_capture_ns"
FRAME_SUFFIXES = (LENGTH_SUFFIX, CRC_SUFFIX, CAPTURE_TIME_SUFFIX)  # suffixes of the columns beside a camera's frames
MAX_STEPS_PER_CHUNK = 4096
MAX_SENTENCE_CHARS = 4096
MAX_COLUMN_CHARS = 256
SCALAR_DTYPES = {
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
    "phase": "uint8",
    "safety": "uint16",
    "policy_version": "int64",
    "log_prob": "float32",
    "t_capture_ns": "int64",
    "t_inference_ns": "int64",
    "t_command_ns": "int64",
}
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE_CHARS)]  # for people: no pattern, but an index keeps them
_Number = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Phase(enum.IntEnum):
    """Who was in control of a step, and to what end."""

    POLICY = 0
    TELEOP = 1
    CORRECTION = 2
    RECOVERY = 3


_PHASES = bytes(Phase)


class EpisodeSource(enum.StrEnum):
    """Where an episode comes from."""

    DEMO = "demo"
    ONLINE = "online"
    EVALUATION = "evaluation"


class EpisodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode ended; `success` is None where nobody knows."""

    steps: _Count
    success: bool | None
    reward_source: _Text = "rule"


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a chunk is part of. What is out of bounds, of its end too, does not decode.

    Attributes:
        end: set on an episode's last chunk only.
        unix_offset_ns: added to the times of the columns, it gives Unix time.
    """

    episode: str
    index: _Count
    first_step: _Count
    steps: Annotated[int, msgspec.Meta(gt=0, le=MAX_STEPS_PER_CHUNK)]
    robot: str
    embodiment: str
    task: str
    sentence: _Text
    source: EpisodeSource
    seed: _Number
    started_unix_ns: _Number
    end: EpisodeEnd | None = None
    unix_offset_ns: _Number = 0


@dataclass(frozen=True)
class Chunk:
    """A header and its columns; `final` is the observation after the last step, where ``header.end`` is set."""

    header: ChunkHeader
    columns: Mapping[str, Array]
    final: Mapping[str, Array]

    def encode(self) -> bytes:
        return encode_packet(self.header, {**self.columns, **{FINAL_PREFIX + k: v for k, v in self.final.items()}})


class PackedChunk(NamedTuple):
    """A chunk that was checked and whose arrays are not unpacked yet."""

    header: ChunkHeader
    packet: ParsedPacket

    @property
    def schema(self) -> int:
        """A fingerprint of the columns' names, dtypes and shapes."""
        return self.packet.layout.fingerprint

    def column(self, name: str) -> Array | None:
        """A read-only view of one column; None where the chunk has none of that name."""
        place = _chunk_layout(self.packet.layout).scalars.get(name)
        return None if place is None else self.packet.array(place)

    def unpack(self) -> Chunk:
        """The chunk; its arrays are read-only views of the packet."""
        columns: dict[str, Array] = {}
        final: dict[str, Array] = {}
        for name, array in self.packet.arrays().items():
            if name.startswith(FINAL_PREFIX):
                final[name[len(FINAL_PREFIX) :]] = array
            else:
                columns[name] = array
        return Chunk(self.header, columns, final)


class _Camera(NamedTuple):
    frames: ArrayEntry
    length: ArrayEntry


@dataclass(frozen=True)
class _ChunkLayout:
    """What a valid layout says about a chunk; `rows` is -1 where nothing says how many steps there are."""

    rows: int
    cameras: tuple[_Camera, ...]
    scalars: Mapping[str, ArrayEntry]


def decode_chunk(packet: bytes | memoryview) -> Chunk:
    """The chunk in `packet`; its arrays are read-only views of it. Raises as `parse_chunk`."""
    return parse_chunk(packet).unpack()


def parse_chunk(packet: bytes | memoryview) -> PackedChunk:
    """Checks the chunk in `packet` wholly without unpacking it; cheap where chunks of the same layout came before.

    Raises:
        WireError: damaged bytes, a name that could not be a file's, columns of unlike length or of the wrong kind, or
            frames that do not add up.
    """
    parts = parse_packet(packet)
    header = decode_packet_record(parts, ChunkHeader)
    _check_names(header.episode, header.robot, header.embodiment, header.task)
    rules = _chunk_layout(parts.layout)
    if rules.rows not in (header.steps, -1):
        raise WireError(f"episode {header.episode}: columns of {rules.rows} rows in a chunk of {header.steps} steps")
    for camera in rules.cameras:
        _check_lengths(camera, parts.array(camera.length))
    reward = rules.scalars.get("reward")
    if reward is not None and not math.isfinite(sum(parts.array(reward).tolist())):  # no float32s sum beyond a float
        raise WireError(f"episode {header.episode}: a reward is no finite number")
    phase = rules.scalars.get("phase")
    if phase is not None and (strange := parts.array_bytes(phase).translate(None, _PHASES)):
        raise WireError(f"episode {header.episode}: there is no phase {strange[0]}")
    return PackedChunk(header, parts)


@lru_cache(maxsize=1024)
def _check_names(*names: str) -> None:
    for name in names:
        if not _NAME_PATTERN.fullmatch(name):
            raise WireError(f"{name[:80]!r} is not a name (letters, digits, '.', '_', '-')")


@lru_cache(maxsize=MAX_CACHED_LAYOUTS)
def _chunk_layout(layout: PacketLayout) -> _ChunkLayout:
    for place in layout.arrays:
        _check_column(place)
    columns = {place.name: place for place in layout.arrays if not place.name.startswith(FINAL_PREFIX)}
    cameras = tuple(_cameras(columns))
    ragged = {camera.frames.name for camera in cameras}
    rows = {place.shape[0] if place.shape else -1 for name, place in columns.items() if name not in ragged}
    if len(rows) > 1 or (rows and min(rows) < 0):
        raise WireError(f"columns of unlike length: {[(name[:80], place.shape) for name, place in columns.items()]}")
    for name in SCALAR_DTYPES.keys() & columns.keys():
        _expect(columns[name], SCALAR_DTYPES[name])
    scalars = {name: columns[name] for name in SCALAR_DTYPES if name in columns}
    return _ChunkLayout(rows.pop() if rows else -1, cameras, scalars)


def _check_column(place: ArrayEntry) -> None:
    """Raises WireError for a name that could leave its folder or break a line, and for a final value of no vector."""
    name = place.name
    if not 0 < len(name) <= MAX_COLUMN_CHARS or not name.isprintable() or "/" in name or "\\" in name:
        raise WireError(f"{name[:80]!r} is not a column's name (printable, no slashes)")
    if name.startswith(FINAL_PREFIX) and not place.shape:
        raise WireError(f"{name[:80]!r} is a single value; a final observation has vectors and pictures")
    if name.startswith(FINAL_PREFIX + IMAGE_PREFIX) and (place.dtype != np.uint8 or len(place.shape) not in (1, 3, 4)):
        raise WireError(f"{name[:80]!r}: {place.dtype} {place.shape} is neither a JPEG file nor a raw frame")


def _cameras(columns: Mapping[str, ArrayEntry]) -> Iterator[_Camera]:
    for name, place in columns.items():
        if not name.startswith(IMAGE_PREFIX) or name.endswith(FRAME_SUFFIXES):
            continue
        if place.dtype != np.uint8 or len(place.shape) not in (1, 4) or (len(place.shape) == 4 and place.shape[3] != 3):
            raise WireError(f"{name[:80]!r}: {place.dtype} {place.shape} are neither JPEG files nor raw frames")
        missing = [suffix for suffix in FRAME_SUFFIXES if name + suffix not in columns]
        if missing:
            why = "it is damaged, or of a version that did not keep it"
            raise WireError(f"{name[:80]!r} comes without its column {missing[0]!r}: {why}")
        _expect(columns[name + CRC_SUFFIX], "uint32")
        _expect(columns[name + LENGTH_SUFFIX], "int32")
        _expect(columns[name + CAPTURE_TIME_SUFFIX], "int64")
        yield _Camera(place, columns[name + LENGTH_SUFFIX])


def _expect(place: ArrayEntry, dtype: str) -> None:
    if place.dtype != dtype or len(place.shape) != 1:
        raise WireError(f"{place.name[:80]!r} is {place.dtype} {place.shape}; it must be {dtype} and one a step")


def _check_lengths(camera: _Camera, lengths: Array) -> None:
    """Raises WireError unless the frames of a camera's steps take exactly the bytes that there are."""
    shape, each = camera.frames.shape, lengths.tolist()  # a few: Python's own arithmetic is faster
    whole = min(each) >= 0 and sum(each) == math.prod(shape)
    if whole and len(shape) == 4:
        whole = set(each) <= {0, math.prod(shape[1:])}
    if not whole:
        raise WireError(f"{camera.frames.name[:80]!r}: the lengths do not add up to frames of {shape}")


def frame_columns(
    feature: str, frames: Sequence[bytes | Array | None], captured_ns: Sequence[int] | Array
) -> dict[str, Array]:
    """The four columns of a camera.

    Args:
        feature: ``observation.images.<camera>``.
        frames: each step's frame, None where the one before still stands: JPEG files, or uint8 (h, w, 3), all of one
            kind and size. Where all are None the frames count as JPEG.
        captured_ns: for each step, when the frame that stands was captured, by the monotonic clock; 0 where none does.

    Raises:
        WireError: JPEG files and arrays mixed, or arrays of another kind.
    """
    new = [frame for frame in frames if frame is not None]
    raw = [np.ascontiguousarray(frame) for frame in new if isinstance(frame, np.ndarray)]
    files = [frame for frame in new if isinstance(frame, bytes)]
    joined = np.stack(raw) if raw else np.frombuffer(b"".join(files), np.uint8)
    if raw and (files or raw[0].dtype != np.uint8 or raw[0].ndim != 3):
        raise WireError(f"{feature}: frames are JPEG files or uint8 (h, w, 3) all through")
    following = iter(raw or files)
    flat = [b"" if frame is None else memoryview(next(following)).cast("B") for frame in frames]
    return {
        feature: joined,
        feature + LENGTH_SUFFIX: np.array([len(each) for each in flat], np.int32),
        feature + CRC_SUFFIX: np.array([checksum(each) for each in flat], np.uint32),
        feature + CAPTURE_TIME_SUFFIX: np.array(captured_ns, np.int64),
    }


def new_episode_id(robot: str) -> str:
    """An identifier that sorts by time and is never drawn twice, e.g. ``panda-0-1763695921123-9f2c1a04b7``."""
    return f"{robot}-{time.time_ns() // 1_000_000}-{secrets.token_hex(5)}"
