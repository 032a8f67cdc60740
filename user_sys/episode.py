"""Episodes: the columns of a step, and the chunks in which an episode is sent and stored.

A running episode is sent in *chunks*. A chunk is self-contained: it names its episode, robot, embodiment and task, so
it can be checked and stored without the others. (episode, index) identifies it permanently.

Columns of a chunk of T steps (row t is step ``first_step + t``):

====================== ================ ======================================================================
``observation.*``      float32 (T, d)   sensor values before the step
``action``             float32 (T, a)   requested by the policy or operator, in the action spec's units
``action.applied``     float32 (T, a)   applied by the robot, which may round what the safety kernel passed to it
``reward``             float32 (T,)     of this step
``terminated``         bool (T,)        the task ended here; do not bootstrap
``truncated``          bool (T,)        cut off here; bootstrap from the final observation
``phase``              uint8 (T,)       `Phase`: the source of control
``safety``             uint16 (T,)      bit set of `SafetyReason`: why ``action`` did not reach the robot; 0 if it did
``policy_version``     int64 (T,)       version of the weights; -1 without a policy, -2 for another run's weights
``log_prob``           float32 (T,)     of the behaviour policy; NaN without one
``action_chunk``       int32 (T,)       number of the policy's action chunk in the episode; -1 without one
``action_chunk_step``  int16 (T,)       the action's place in it; -1 without one
``action_delay``       uint16 (T,)      actions executed from its observation to its first use
``t_observation_ns``   int64 (T,)       monotonic clock of the edge: capture of its observation; 0 without one
``t_capture_ns``       int64 (T,)       ... observation captured
``t_inference_ns``     int64 (T,)       ... action known
``t_command_ns``       int64 (T,)       ... command applied
====================== ================ ======================================================================

Columns of the first two kinds may have any shape. A chunk may omit columns without values.

A camera has four columns. ``observation.images.<camera>`` has the new frames one after the other: joined JPEG files as
uint8 (bytes,), or raw RGB pictures as uint8 (n, height, width, 3). The others have one value for each step:

================== ============ ===========================================================================
``.length``        int32 (T,)   bytes of the step's frame; 0: the previous frame is still valid
``.crc``           uint32 (T,)  their CRC32C, so that a reader can check a single frame
``.t_capture_ns``  int64 (T,)   monotonic clock of the edge: capture of the valid frame; 0: no frame
================== ============ ===========================================================================
"""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from hal.settings import NAME_PATTERN
from user_sys.codec import (
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
FRAME_SUFFIXES = (LENGTH_SUFFIX, CRC_SUFFIX, CAPTURE_TIME_SUFFIX)  # of the columns that describe a camera's frames
MAX_STEPS_PER_CHUNK = 4096
MAX_SENTENCE_CHARS = 4096
MAX_COLUMN_CHARS = 256
MAX_REASON_CHARS = 500  # of the text in an error that lists columns
SCALAR_DTYPES = {
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
    "phase": "uint8",
    "safety": "uint16",
    "policy_version": "int64",
    "log_prob": "float32",
    "action_chunk": "int32",
    "action_chunk_step": "int16",
    "action_delay": "uint16",
    "t_observation_ns": "int64",
    "t_capture_ns": "int64",
    "t_inference_ns": "int64",
    "t_command_ns": "int64",
}
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE_CHARS)]  # free text; the limit protects the index
_Number = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]


class Phase(enum.IntEnum):
    """The source of control of a step."""

    POLICY = 0
    TELEOP = 1
    CORRECTION = 2
    RECOVERY = 3


_PHASES = bytes(Phase)


class EpisodeSource(enum.StrEnum):
    """The purpose for which an episode was recorded."""

    DEMO = "demo"
    ONLINE = "online"
    EVALUATION = "evaluation"


class EpisodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode; `success` is None if it is unknown."""

    steps: _Count
    success: bool | None
    reward_source: _Text = "rule"


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The metadata of a chunk. A header or end with a value out of its limits does not decode.

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
    """A header and its columns. If ``header.end`` is set, `final` is the observation after the last step."""

    header: ChunkHeader
    columns: Mapping[str, Array]
    final: Mapping[str, Array]

    def encode(self) -> bytes:
        return encode_packet(self.header, {**self.columns, **{FINAL_PREFIX + k: v for k, v in self.final.items()}})


class PackedChunk(NamedTuple):
    """A validated chunk whose arrays are not unpacked yet."""

    header: ChunkHeader
    packet: ParsedPacket

    @property
    def schema(self) -> int:
        """A fingerprint of the columns' names, dtypes and shapes."""
        return self.packet.layout.fingerprint

    def column(self, name: str) -> Array | None:
        """A read-only view of one column, or None."""
        entry = _chunk_layout(self.packet.layout).scalars.get(name)
        return None if entry is None else self.packet.array(entry)

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
    """The columns of a valid layout; `rows` is -1 if no column has one row for each step."""

    rows: int
    cameras: tuple[_Camera, ...]
    scalars: Mapping[str, ArrayEntry]


def decode_chunk(packet: bytes | memoryview) -> Chunk:
    """The chunk in `packet`; its arrays are read-only views of it. Raises as `parse_chunk`."""
    return parse_chunk(packet).unpack()


def parse_chunk(packet: bytes | memoryview) -> PackedChunk:
    """Validates the chunk in `packet` without unpacking it. The checks of a layout are cached.

    Raises:
        WireError: damaged bytes, a name that is not safe as a file name, columns of different lengths or of a wrong
            dtype, or frames whose lengths do not add up.
    """
    parts = parse_packet(packet)
    header = decode_packet_record(parts, ChunkHeader)
    _check_names(header.episode, header.robot, header.embodiment, header.task)
    layout = _chunk_layout(parts.layout)
    if layout.rows not in (header.steps, -1):
        raise WireError(f"episode {header.episode}: columns of {layout.rows} rows in a chunk of {header.steps} steps")
    for camera in layout.cameras:
        _check_lengths(camera, parts.array(camera.length))
    reward = layout.scalars.get("reward")
    if reward is not None and not math.isfinite(sum(parts.array(reward).tolist())):  # float32 sums fit a float
        raise WireError(f"episode {header.episode}: a reward is not finite")
    phase = layout.scalars.get("phase")
    if phase is not None and (unknown := parts.array_bytes(phase).translate(None, _PHASES)):
        raise WireError(f"episode {header.episode}: unknown phase {unknown[0]}")
    return PackedChunk(header, parts)


@lru_cache(maxsize=1024)
def _check_names(*names: str) -> None:
    for name in names:
        if not NAME_PATTERN.fullmatch(name):
            raise WireError(f"{name[:80]!r} is not a name (letters, digits, '.', '_', '-')")


_CHUNK_LAYOUTS: WeakKeyDictionary[PacketLayout, _ChunkLayout] = WeakKeyDictionary()
"""Each valid layout in use: the codec decides which it keeps, so that long ones of a peer do not fill the memory."""


def _chunk_layout(layout: PacketLayout) -> _ChunkLayout:
    found = _CHUNK_LAYOUTS.get(layout)
    if found is None:
        found = _CHUNK_LAYOUTS[layout] = _validate_layout(layout)
    return found


def _validate_layout(layout: PacketLayout) -> _ChunkLayout:
    for entry in layout.arrays:
        _check_column(entry)
    columns = {entry.name: entry for entry in layout.arrays if not entry.name.startswith(FINAL_PREFIX)}
    cameras = tuple(_cameras(columns))
    ragged = {camera.frames.name for camera in cameras}
    rows = {entry.shape[0] if entry.shape else -1 for name, entry in columns.items() if name not in ragged}
    if len(rows) > 1 or (rows and min(rows) < 0):
        shapes = [(name[:80], entry.shape) for name, entry in columns.items()]
        raise WireError(f"columns of different lengths: {str(shapes)[:MAX_REASON_CHARS]}")
    for name in SCALAR_DTYPES.keys() & columns.keys():
        _expect(columns[name], SCALAR_DTYPES[name])
    scalars = {name: columns[name] for name in SCALAR_DTYPES if name in columns}
    return _ChunkLayout(rows.pop() if rows else -1, cameras, scalars)


def _check_column(entry: ArrayEntry) -> None:
    """Raises WireError for an unsafe name (slashes, unprintable), and for a final value that is not an array."""
    name = entry.name
    if not 0 < len(name) <= MAX_COLUMN_CHARS or not name.isprintable() or "/" in name or "\\" in name:
        raise WireError(f"{name[:80]!r} is not a column's name (printable, no slashes)")
    if name.startswith(FINAL_PREFIX) and not entry.shape:
        raise WireError(f"{name[:80]!r} is a scalar; a final observation has vectors and pictures")
    if name.startswith(FINAL_PREFIX + IMAGE_PREFIX) and (entry.dtype != np.uint8 or len(entry.shape) not in (1, 3, 4)):
        raise WireError(f"{name[:80]!r}: {entry.dtype} {entry.shape} is neither a JPEG file nor a raw frame")


def _cameras(columns: Mapping[str, ArrayEntry]) -> Iterator[_Camera]:
    for name, entry in columns.items():
        if not name.startswith(IMAGE_PREFIX) or name.endswith(FRAME_SUFFIXES):
            continue
        if entry.dtype != np.uint8 or len(entry.shape) not in (1, 4) or (len(entry.shape) == 4 and entry.shape[3] != 3):
            raise WireError(f"{name[:80]!r}: {entry.dtype} {entry.shape} are neither JPEG files nor raw frames")
        missing = [suffix for suffix in FRAME_SUFFIXES if name + suffix not in columns]
        if missing:
            why = "it is damaged, or of a version that did not keep it"
            raise WireError(f"{name[:80]!r} is without its column {missing[0]!r}: {why}")
        _expect(columns[name + CRC_SUFFIX], "uint32")
        _expect(columns[name + LENGTH_SUFFIX], "int32")
        _expect(columns[name + CAPTURE_TIME_SUFFIX], "int64")
        yield _Camera(entry, columns[name + LENGTH_SUFFIX])


def _expect(entry: ArrayEntry, dtype: str) -> None:
    if entry.dtype != dtype or len(entry.shape) != 1:
        raise WireError(f"{entry.name[:80]!r} is {entry.dtype} {entry.shape}; it must be {dtype}, one for each step")


def _check_lengths(camera: _Camera, lengths: Array) -> None:
    """Raises WireError unless the frame lengths of a camera add up to the bytes of its frames."""
    shape, each = camera.frames.shape, lengths.tolist()  # for few values, Python is faster than numpy
    whole = min(each) >= 0 and sum(each) == math.prod(shape)
    if whole and len(shape) == 4:
        whole = set(each) <= {0, math.prod(shape[1:])}
    if not whole:
        raise WireError(f"{camera.frames.name[:80]!r}: the frame lengths do not add up to {shape}")


def frame_columns(
    feature: str, frames: Sequence[bytes | Array | None], captured_ns: Sequence[int] | Array
) -> dict[str, Array]:
    """The four columns of a camera.

    Args:
        feature: ``observation.images.<camera>``.
        frames: each step's frame, or None if the previous one is still valid: JPEG files, or uint8 (h, w, 3), all of
            one kind and size. If all are None, the frames count as JPEG.
        captured_ns: for each step, the capture time of the valid frame by the monotonic clock; 0 without one.

    Raises:
        WireError: JPEG files and arrays mixed, or arrays of another kind.
    """
    new = [frame for frame in frames if frame is not None]
    raw = [np.ascontiguousarray(frame) for frame in new if isinstance(frame, np.ndarray)]
    files = [frame for frame in new if isinstance(frame, bytes)]
    joined = np.stack(raw) if raw else np.frombuffer(b"".join(files), np.uint8)
    if raw and (files or raw[0].dtype != np.uint8 or raw[0].ndim != 3):
        raise WireError(f"{feature}: frames must be all JPEG files, or all uint8 (h, w, 3) of one size")
    following = iter(raw or files)
    flat = [b"" if frame is None else memoryview(next(following)).cast("B") for frame in frames]
    return {
        feature: joined,
        feature + LENGTH_SUFFIX: np.array([len(each) for each in flat], np.int32),
        feature + CRC_SUFFIX: np.array([checksum(each) for each in flat], np.uint32),
        feature + CAPTURE_TIME_SUFFIX: np.array(captured_ns, np.int64),
    }


def new_episode_id(robot: str) -> str:
    """A unique identifier that sorts by time, e.g. ``panda-0-1763695921123-9f2c1a04b7``."""
    return f"{robot}-{time.time_ns() // 1_000_000}-{secrets.token_hex(5)}"
