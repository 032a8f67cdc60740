"""Index blocks: the index columns of a range of records. The footer of a sealed segment holds its block.

A block is built from records alone (`IndexBlockBuilder`) and encoded as a packet of `user_sys.codec`. Opening a
store loads one block per segment and reads no chunk. A writer builds the block while it appends.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import Array, decode_packet, encode_packet
from user_sys.episode import ChunkHeader, PackedChunk, parse_chunk
from user_sys.errors import WireError
from user_sys.store.labels import ColumnLabel, Label, decode_label
from user_sys.store.record_format import Damage, RecordRef, record_bytes

CHUNK_KIND = 1  # kinds of records
LABEL_KIND = 2
COLUMN_KIND = 3  # a `ColumnLabel`; programs before it skip the kind, and its table in footers

# Column of a chunk -> (dtype, default value without that column).
STEP_COLUMNS: dict[str, tuple[str, int]] = {
    "reward": ("float32", 0),
    "terminated": ("bool", 0),
    "truncated": ("bool", 0),
    "phase": ("uint8", 0),
    "policy_version": ("int64", -1),
    "safety": ("uint16", 0),
}
TIME = "time_unix_ns"
TABLES = "tables"
CHUNK_PREFIX = "chunk."
STEP_DTYPES = {name: dtype for name, (dtype, _) in STEP_COLUMNS.items()} | {TIME: "int64"}
CHUNK_COLUMNS: dict[str, str] = {
    "episode": "int32",  # place in `IndexBlock.episodes`
    "index": "int32",
    "first_step": "int32",
    "steps": "int32",
    "end": "int32",  # place in `IndexBlock.ends`; -1 if the episode continues
    "segment": "int64",
    "offset": "int64",
    "length": "int64",
    "sequence": "int64",
    "schema": "uint32",
}


class EpisodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """Description of an episode by its first chunk in the block."""

    episode: str
    robot: str
    embodiment: str
    task: str
    sentence: str
    source: str
    seed: int
    started_unix_ns: int


class EndRecord(msgspec.Struct, frozen=True, array_like=True):
    """An episode's end."""

    steps: int
    success: bool | None
    reward_source: str


class _Head(msgspec.Struct, frozen=True, array_like=True):
    chunks: int
    steps: int


class _Tables(msgspec.Struct, frozen=True, array_like=True):
    episodes: tuple[EpisodeRecord, ...]
    ends: tuple[EndRecord, ...]
    labels: tuple[Label, ...]
    damaged: tuple[Damage, ...]
    columns: tuple[ColumnLabel, ...] = ()


_TABLES_DECODER = msgspec.msgpack.Decoder(_Tables)


@dataclass(frozen=True)
class IndexBlock:
    """Records in storage order.

    Attributes:
        chunks: columns `CHUNK_COLUMNS`, one row per chunk.
        steps: columns `STEP_COLUMNS` and ``time_unix_ns`` int64, one row per step, chunk by chunk.
        episodes, ends: targets of the chunks' references.
        labels: in order; columns after the others, which has no effect on either.
        damaged: records that are whole and do not decode.
    """

    chunks: dict[str, Array]
    steps: dict[str, Array]
    episodes: tuple[EpisodeRecord, ...]
    ends: tuple[EndRecord, ...]
    labels: tuple[Label, ...]
    damaged: tuple[Damage, ...]

    def encode(self) -> bytes:
        columns = tuple(label for label in self.labels if isinstance(label, ColumnLabel))
        labels = tuple(label for label in self.labels if not isinstance(label, ColumnLabel))
        tables = _Tables(self.episodes, self.ends, labels, self.damaged, columns)
        arrays = {**self.steps, **{CHUNK_PREFIX + name: column for name, column in self.chunks.items()}}
        arrays[TABLES] = np.frombuffer(msgspec.msgpack.encode(tables), np.uint8)
        return encode_packet(_Head(len(self.chunks["steps"]), len(self.steps[TIME])), arrays)

    def without_chunks(self, lost: Array) -> IndexBlock:
        """A copy without the chunks marked in `lost` (bool) and without episodes that lose all chunks."""
        kept = ~lost
        of_step = np.repeat(kept, self.chunks["steps"])
        chunks = {name: column[kept] for name, column in self.chunks.items()}
        used, codes = np.unique(chunks["episode"], return_inverse=True)
        chunks["episode"] = codes.astype(np.int32)
        steps = {name: column[of_step] for name, column in self.steps.items()}
        episodes = tuple(self.episodes[code] for code in used.tolist())
        return IndexBlock(chunks, steps, episodes, self.ends, self.labels, self.damaged)


def decode_block(raw: bytes | memoryview) -> IndexBlock:
    """The block in `raw`; its columns are read-only views.

    Raises:
        WireError: it is invalid or inconsistent.
    """
    head, arrays = decode_packet(raw, _Head)
    try:
        tables = _TABLES_DECODER.decode(arrays[TABLES].data)
        chunks = {
            name: _checked(arrays[CHUNK_PREFIX + name], dtype, head.chunks) for name, dtype in CHUNK_COLUMNS.items()
        }
        steps = {name: _checked(arrays[name], dtype, head.steps) for name, dtype in STEP_DTYPES.items()}
    except (KeyError, *DECODE_ERRORS) as error:
        raise WireError(f"not a block: {error}") from None
    sound = [int(chunks["steps"].sum()) == head.steps, (chunks["steps"] > 0).all()]
    for name, table, least in (("episode", tables.episodes, 0), ("end", tables.ends, -1)):
        sound.append(((chunks[name] >= least) & (chunks[name] < len(table))).all())
    if not all(sound):
        raise WireError(f"a block of {head.chunks} chunks and {head.steps} steps is inconsistent")
    labels = (*tables.labels, *tables.columns)
    return IndexBlock(chunks, steps, tables.episodes, tables.ends, labels, tables.damaged)


def _checked(column: Array, dtype: str, rows: int) -> Array:
    if column.dtype != dtype or column.shape != (rows,):
        raise WireError(f"a block has {column.dtype} {column.shape} where {dtype} ({rows},) belongs")
    return column


class IndexBlockBuilder:
    """Builds a block from records added in storage order. A segment's footer holds it encoded."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._episodes: list[EpisodeRecord] = []
        self._ends: list[EndRecord] = []
        self._labels: list[Label] = []
        self._damaged: list[Damage] = []
        self._chunks = array("q")  # rows of `CHUNK_COLUMNS`
        self._steps = {name: bytearray() for name in STEP_DTYPES}

    def add(self, ref: RecordRef, payload: bytes | memoryview, parsed: object = None) -> None:
        """Adds a record. A record that does not decode becomes damage; unknown kinds are skipped.

        Args:
            parsed: the payload's `PackedChunk`, if the caller has it.
        """
        try:
            if ref.kind == CHUNK_KIND:
                self._add_chunk(ref, parsed if isinstance(parsed, PackedChunk) else parse_chunk(payload))
            elif ref.kind in (LABEL_KIND, COLUMN_KIND):
                self._labels.append(decode_label(payload))
        except WireError as error:
            self.add_damage(ref, f"does not decode: {error}")

    def add_damage(self, ref: RecordRef, reason: str) -> None:
        """Marks a record as unusable."""
        self._damaged.append(Damage(ref.segment, ref.offset, record_bytes(ref.length), reason, ref.sequence))

    def _add_chunk(self, ref: RecordRef, packed: PackedChunk) -> None:
        header, end = packed.header, -1
        if header.end is not None:
            end = len(self._ends)
            self._ends.append(EndRecord(header.end.steps, header.end.success, header.end.reward_source))
        code = self._codes.setdefault(header.episode, len(self._episodes))
        if code == len(self._episodes):
            self._episodes.append(_episode_record(header))
        self._chunks.extend((code, header.index, header.first_step, header.steps, end))
        self._chunks.extend((ref.segment, ref.offset, ref.length, ref.sequence, packed.schema))
        for name, (dtype, default) in STEP_COLUMNS.items():
            column = packed.column(name)
            self._steps[name] += (np.full(header.steps, default, dtype) if column is None else column).tobytes()
        captured = packed.column("t_capture_ns")
        times = header.started_unix_ns if captured is None else captured + header.unix_offset_ns
        self._steps[TIME] += np.broadcast_to(times, header.steps).astype(np.int64).tobytes()

    def build(self) -> IndexBlock:
        """The block; its columns are copies."""
        rows = np.array(self._chunks, np.int64).reshape(-1, len(CHUNK_COLUMNS))
        chunks = {name: rows[:, n].astype(dtype) for n, (name, dtype) in enumerate(CHUNK_COLUMNS.items())}
        steps = {name: np.frombuffer(bytes(column), STEP_DTYPES[name]) for name, column in self._steps.items()}
        tables = (tuple(self._episodes), tuple(self._ends), tuple(self._labels), tuple(self._damaged))
        return IndexBlock(chunks, steps, *tables)

    def encode(self) -> bytes:
        """The encoded block."""
        return self.build().encode()


def _episode_record(header: ChunkHeader) -> EpisodeRecord:
    return EpisodeRecord(
        header.episode,
        header.robot,
        header.embodiment,
        header.task,
        header.sentence,
        str(header.source),
        header.seed,
        header.started_unix_ns,
    )
