"""Translates damage into losses: the chunks, steps and episodes in unreadable bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import MAGIC
from user_sys.episode import ChunkHeader
from user_sys.errors import WireError
from user_sys.store.files import OS_FILES
from user_sys.store.index import Index
from user_sys.store.index_block import decode_block
from user_sys.store.record_format import (
    FOOTER_SUFFIX,
    RECORD_HEADER_BYTES,
    SEGMENT_SUFFIX,
    Damage,
    list_segments,
    parse_segment_name,
    read_footer_copy,
    resolve_generations,
)

_PREFIX = struct.Struct("<4sII")  # of a packet: magic, bytes of the record, bytes of the layout
_HEADER = msgspec.msgpack.Decoder(ChunkHeader)


class LostChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Steps `first_step` to ``first_step + steps - 1`` of an episode, which chunk `index` held."""

    episode: str
    index: int
    first_step: int
    steps: int

    def __str__(self) -> str:
        return f"{self.episode}, chunk {self.index}, steps {self.first_step} to {self.first_step + self.steps - 1}"


class DamageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Damage and the chunks that it destroyed, if known.

    Attributes:
        sequence: of the record; -1 if unknown.
        last_sequence: of the last record, if several are lost together; otherwise -1.
        surely: the chunks come from the index; otherwise from the damaged bytes themselves.
    """

    segment: int
    offset: int
    length: int
    sequence: int
    last_sequence: int
    reason: str
    chunks: tuple[LostChunk, ...] = ()
    surely: bool = True


class MissingChunks(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive missing chunks between stored ones; `steps` is their total."""

    episode: str
    first_index: int
    last_index: int
    first_step: int
    steps: int


def report_damage(path: Path, index: Index, damaged: Sequence[Damage]) -> list[DamageReport]:
    """The losses of each of `damaged` in the store at `path`; `index` holds all intact records."""
    files = {name.number: path / str(name) for name in resolve_generations(list_segments(path))[0]}
    return [
        _damaged_range(damage, index, files)
        if damage.segment < 0 or damage.segment in files
        else _missing_segment(damage, index, path)
        for damage in damaged
    ]


def _missing_segment(damage: Damage, index: Index, path: Path) -> DamageReport:
    """Losses of a segment without a file, by the copy of its footer."""
    footer = None
    for file in path.glob(f"{damage.segment:010d}*{FOOTER_SUFFIX}"):
        if (name := parse_segment_name(file.name.removesuffix(FOOTER_SUFFIX) + SEGMENT_SUFFIX)) is not None:
            footer = read_footer_copy(OS_FILES, path, name) or footer
    found = DamageReport(
        segment=damage.segment, offset=0, length=0, sequence=-1, last_sequence=-1, reason=damage.reason
    )
    if footer is None or not len(footer.records) or not footer.summary:
        return found
    try:
        block = decode_block(footer.summary)
    except WireError:
        return found
    names = [episode.episode for episode in block.episodes]
    columns = (block.chunks[column].tolist() for column in ("episode", "index", "first_step", "steps"))
    stored = [_stored_indices(index, name) for name in names]  # some chunks were sent and stored again
    chunks = [
        LostChunk(episode=names[episode], index=number, first_step=first_step, steps=steps)
        for episode, number, first_step, steps in zip(*columns, strict=True)
        if number not in stored[episode]
    ]
    first, last = int(footer.records.sequence[0]), int(footer.records.sequence[-1])
    return replace(found, sequence=first, last_sequence=last, chunks=tuple(chunks))


def _damaged_range(damage: Damage, index: Index, files: dict[int, Path]) -> DamageReport:
    chunks = tuple(_indexed_chunks(damage, index))
    surely = bool(chunks)
    if not chunks and damage.length and damage.segment in files:
        chunk = _chunk_by_its_header(files[damage.segment], damage)
        restored = chunk is not None and _is_stored(index, chunk)
        chunks = () if chunk is None or restored else (chunk,)
    return DamageReport(
        segment=damage.segment,
        offset=damage.offset,
        length=damage.length,
        sequence=damage.sequence,
        last_sequence=damage.last_sequence,
        reason=damage.reason,
        chunks=chunks,
        surely=surely,
    )


def _indexed_chunks(damage: Damage, index: Index) -> Iterator[LostChunk]:
    """Chunks that a footer lists and that lie in the damaged range."""
    chunks, names = index.chunks, index.episodes.ids.names
    inside = chunks.segment == damage.segment
    inside &= (chunks.offset >= damage.offset) & (chunks.offset < damage.offset + damage.length)
    for row in np.flatnonzero(inside | (chunks.sequence == damage.sequence)).tolist():
        yield LostChunk(
            episode=names[chunks.episode[row]],
            index=int(chunks.index[row]),
            first_step=int(chunks.first_step[row]),
            steps=int(chunks.steps[row]),
        )


class EpisodeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of one episode.

    Attributes:
        what: all stored chunks (``gone``), its last steps (``end``), or others (``part``).
        first_step: the first lost step.
        steps: number of lost steps.
    """

    episode: str
    what: Literal["gone", "end", "part"]
    chunks: int
    first_step: int
    steps: int

    def __str__(self) -> str:
        words = {"gone": "is gone", "end": f"lost its end, from step {self.first_step} on", "part": "lost a part"}
        return f"{self.episode} {words[self.what]}: {self.steps} steps in {self.chunks} chunks"


def episode_losses(index: Index, findings: Sequence[DamageReport]) -> list[EpisodeLoss]:
    """Losses per episode, in the order in which `findings` mention them."""
    lost: dict[str, dict[int, LostChunk]] = {}
    for chunk in (chunk for finding in findings for chunk in finding.chunks):
        lost.setdefault(chunk.episode, {})[chunk.index] = chunk
    found = []
    for episode, chunks in lost.items():
        left = _stored_indices(index, episode) - chunks.keys()
        found.append(
            EpisodeLoss(
                episode=episode,
                what="gone" if not left else "end" if max(chunks) > max(left) else "part",
                chunks=len(chunks),
                first_step=min(chunk.first_step for chunk in chunks.values()),
                steps=sum(chunk.steps for chunk in chunks.values()),
            )
        )
    return found


def _stored_indices(index: Index, episode: str) -> set[int]:
    """Indices of the episode's chunks in the index."""
    rows = (index.chunks.episode == index.episodes.find(episode)) & ~index.chunks.gone
    return set(index.chunks.index[rows].tolist())


def _chunk_by_its_header(file: Path, damage: Damage) -> LostChunk | None:
    """The chunk that a damaged record describes in its header, if that much can be decoded."""
    with file.open("rb") as stream:
        stream.seek(damage.offset + RECORD_HEADER_BYTES)
        raw = stream.read(min(1 << 16, max(0, damage.length - RECORD_HEADER_BYTES)))
    if len(raw) < _PREFIX.size:
        return None
    magic, size, _ = _PREFIX.unpack_from(raw)
    if magic != MAGIC or size > len(raw) - _PREFIX.size:
        return None
    try:
        header = _HEADER.decode(raw[_PREFIX.size : _PREFIX.size + size])
    except DECODE_ERRORS:
        return None  # the header is damaged too
    return LostChunk(episode=header.episode, index=header.index, first_step=header.first_step, steps=header.steps)


def _is_stored(index: Index, chunk: LostChunk) -> bool:
    """Whether the chunk was sent again and stored."""
    row = index.episodes.find(chunk.episode)
    return bool(((index.chunks.episode == row) & (index.chunks.index == chunk.index)).any())


def find_missing_chunks(index: Index) -> list[MissingChunks]:
    """Chunks missing before others of their episode; chunks of deleted episodes count as present."""
    chunks = index.chunks
    order = np.lexsort((chunks.index, chunks.episode))
    found: list[MissingChunks] = []
    episode, expected, step = -1, 0, 0
    columns = (chunks.episode, chunks.index, chunks.first_step, chunks.steps)
    for owner, number, first_step, steps in zip(*(column[order].tolist() for column in columns), strict=True):
        if owner != episode:
            episode, expected, step = owner, 0, 0
        if number > expected:
            name = index.episodes.ids.names[owner]
            missing = first_step - step
            gap = MissingChunks(
                episode=name, first_index=expected, last_index=number - 1, first_step=step, steps=missing
            )
            found.append(gap)
        expected, step = number + 1, first_step + steps
    return found
