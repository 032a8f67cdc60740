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
``policy_version``     int64 (T,)       the weights that acted; -1 where no policy did
``log_prob``           float32 (T,)     of the behaviour policy; NaN where it has none
``t_capture_ns``       int64 (T,)       monotonic clock of the edge: observation captured
``t_inference_ns``     int64 (T,)       ... action known
``t_command_ns``       int64 (T,)       ... command applied
====================== ================ ======================================================================

A camera's frames are two columns: ``observation.images.<camera>`` uint8 (n,), the JPEG files one after the other, and
``observation.images.<camera>.length`` int32 (T,), their sizes; 0 says that the frame before still stands.
"""

from __future__ import annotations

import enum
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from user_sys.codec import Array, decode_packet, encode_packet
from user_sys.errors import WireError

IMAGES = "observation.images."
APPLIED = "action.applied"
FINAL = "final:"  # prefix of the columns that hold the observation after the last step
MAX_STEPS_PER_CHUNK = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Phase(enum.IntEnum):
    """Who was in control of a step, and to what end."""

    POLICY = 0
    TELEOP = 1
    CORRECTION = 2
    RECOVERY = 3


class Source(enum.StrEnum):
    """Where an episode comes from."""

    DEMO = "demo"
    ONLINE = "online"
    EVALUATION = "evaluation"


class EpisodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode ended; `success` is None where nobody knows."""

    steps: int
    success: bool | None
    reward_source: str = "rule"


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk is part of. `end` is set on an episode's last chunk only."""

    episode: str
    index: int
    first_step: int
    steps: int
    robot: str
    embodiment: str
    task: str
    sentence: str
    source: Source
    seed: int
    started_unix_ns: int
    end: EpisodeEnd | None = None


@dataclass(frozen=True)
class Chunk:
    """A header and its columns; `final` is the observation after the last step, where ``header.end`` is set."""

    header: ChunkHeader
    columns: Mapping[str, Array]
    final: Mapping[str, Array]

    def encode(self) -> bytes:
        return encode_packet(self.header, {**self.columns, **{FINAL + k: v for k, v in self.final.items()}})


def decode_chunk(packet: bytes | memoryview) -> Chunk:
    """The chunk in `packet`; its arrays are read-only views of it.

    Raises:
        WireError: damaged bytes, a name that could not be a file's, or columns of unlike length.
    """
    header, arrays = decode_packet(packet, ChunkHeader)
    for name in (header.episode, header.robot, header.embodiment, header.task):
        if not _NAME.fullmatch(name):
            raise WireError(f"{name[:80]!r} is not a name (letters, digits, '.', '_', '-')")
    if not (0 < header.steps <= MAX_STEPS_PER_CHUNK and header.index >= 0 and header.first_step >= 0):
        raise WireError(f"episode {header.episode}: chunk {header.index} claims {header.steps} steps")
    columns = {k: v for k, v in arrays.items() if not k.startswith(FINAL)}
    for name, column in columns.items():
        ragged = name.startswith(IMAGES) and not name.endswith(".length")
        if not ragged and (column.ndim == 0 or len(column) != header.steps):
            raise WireError(f"{name!r} has shape {column.shape} in a chunk of {header.steps} steps")
    return Chunk(header, columns, {k[len(FINAL) :]: v for k, v in arrays.items() if k.startswith(FINAL)})


def new_episode_id(robot: str) -> str:
    """An identifier that sorts by time and is never drawn twice, e.g. ``panda-0-1763695921123-9f2c1a``."""
    return f"{robot}-{time.time_ns() // 1_000_000}-{secrets.token_hex(3)}"
