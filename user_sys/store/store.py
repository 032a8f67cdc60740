"""The experience store: every chunk of every episode once, and the labels added later.

Durability is that of `user_sys.store.log_writer`: a chunk is acknowledged when `StoreWriter.sync` has returned, and
then survives kills and power cuts. Ingestion is idempotent by (episode, index), also after a restart and after the
episode was deleted and compacted away. An episode belongs to the robot of its first chunk; chunks of other robots
are refused.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from hal.context import ClosedAtExit
from user_sys.codec import Array
from user_sys.episode import Chunk, PackedChunk, decode_chunk, parse_chunk
from user_sys.errors import StoreCorrupt, StoreError, StoreRecordGone, WireError
from user_sys.store.files import OS_FILES, Files
from user_sys.store.index import EpisodeSummary, Index, IndexChange, summarise_episodes
from user_sys.store.index_block import (
    CHUNK_KIND,
    COLUMN_KIND,
    LABEL_KIND,
    IndexBlock,
    IndexBlockBuilder,
    decode_block,
)
from user_sys.store.labels import ColumnLabel, DeleteLabel, Label, UndoLabel, effective_labels, encode_label
from user_sys.store.log_reader import LogReader, RecordBatch
from user_sys.store.log_writer import SEGMENT_BYTES, LogWriter
from user_sys.store.record_format import Damage, refs_of, segment_numbers

POLL_S = 0.05
_logger = logging.getLogger(__name__)


class IngestedChunks:
    """The (episode, index) of each stored chunk.

    Attributes:
        chunks: how many they are.
        deleted: episodes that a label deletes.
    """

    def __init__(self) -> None:
        self.chunks = 0
        self.deleted: set[str] = set()
        self._indexes: dict[str, set[int]] = {}
        self._robots: dict[str, str] = {}
        self._deletions: dict[str, list[Label]] = {}  # with what reverts them

    def has(self, episode: str, index: int) -> bool:
        """Whether that chunk is stored."""
        return index in self._indexes.get(episode, ())

    def robot_of(self, episode: str) -> str | None:
        """Robot of the episode's first stored chunk; None without one."""
        return self._robots.get(episode)

    def add(self, episode: str, robot: str, index: int) -> None:
        """Adds a chunk; a repeated one counts once."""
        indexes = self._indexes.setdefault(episode, set())
        self._robots.setdefault(episode, sys.intern(robot))
        if index not in indexes:
            indexes.add(index)
            self.chunks += 1

    def add_label(self, label: Label) -> None:
        """Applies deletions, and labels that revert them."""
        if isinstance(label, DeleteLabel | UndoLabel):
            labels = self._deletions.setdefault(label.episode, [])
            labels.append(label)
            left = [each.deleted for each in effective_labels(labels) if isinstance(each, DeleteLabel)]
            (self.deleted.add if left and left[-1] else self.deleted.discard)(label.episode)

    def add_blocks(self, blocks: Iterable[IndexBlock]) -> None:
        """Adds all chunks and labels of `blocks`."""
        for block in blocks:
            columns = (block.chunks[name].tolist() for name in ("episode", "index"))
            for code, index in zip(*columns, strict=True):
                episode = block.episodes[code]
                self.add(episode.episode, episode.robot, index)
            for label in block.labels:
                self.add_label(label)


class StoreWriter(LogWriter):
    """The only writer of a store: a log of chunks and labels. Create it with `open`.

    One thread calls it, except `sealed_segments`, `lost_segments` and `rewrite`, which are thread-safe.

    Attributes:
        path: the store's folder.
    """

    _ingested: IngestedChunks  # of all segments; set by `open`

    @classmethod
    def open(cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES, files: Files = OS_FILES) -> Self:
        """Opens or creates the store at `path`; reads the footers of sealed segments and scans the rest.

        Arguments and errors as `LogWriter.open`.
        """
        writer = super().open(path, segment_bytes=segment_bytes, files=files)
        writer._ingested = IngestedChunks()
        try:
            with LogReader.open(path, files=files) as reader:
                writer._ingested.add_blocks(_new_blocks(reader).blocks)
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def chunks(self) -> int:
        """Number of chunks, with unsynced ones."""
        return self._ingested.chunks

    def append(self, packet: bytes | memoryview, parsed: PackedChunk | None = None) -> bool:
        """Adds an encoded chunk; returns False, at no cost, if it is not needed.

        A chunk is not needed if the store already has it, or if its episode is deleted and no chunk of it is stored.

        The next `sync` acknowledges it, also after False, because the stored chunk may be unsynced.

        Args:
            packet: the chunk's bytes, stored unchanged.
            parsed: result of `parse_chunk` for this `packet`, if the caller has it.

        Raises:
            WireError: the packet is not a valid chunk, or the episode belongs to another robot; nothing was stored.
            StoreFull: no space; this chunk was not taken, earlier ones are kept.
            StoreError: the disk failed.
        """
        chunk = parse_chunk(packet) if parsed is None else parsed
        header, ingested = chunk.header, self._ingested
        owner = ingested.robot_of(header.episode)
        if owner not in (None, header.robot):
            raise WireError(f"the episode {header.episode} belongs to {owner}; {header.robot} cannot write to it")
        if ingested.has(header.episode, header.index) or (owner is None and header.episode in ingested.deleted):
            return False
        self.append_record(CHUNK_KIND, packet, schema=chunk.schema, parsed=chunk)
        ingested.add(header.episode, header.robot, header.index)
        return True

    def append_label(self, label: Label) -> None:
        """Adds a label; its episode may be unknown. Raises as `append`."""
        kind = COLUMN_KIND if isinstance(label, ColumnLabel) else LABEL_KIND
        self.append_record(kind, encode_label(label))
        self._ingested.add_label(label)

    @property
    def deleted_episodes(self) -> int:
        """Number of episodes that labels delete, with those already compacted away. Thread-safe."""
        return len(self._ingested.deleted)


class StoreReader(ClosedAtExit):
    """Reads a store in any process, also during writes. Create it with `open`.

    One thread calls `refresh` and `close`; the read methods are thread-safe.

    Attributes:
        index: steps, chunks and episodes as of the last `refresh`.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._damaged: list[Damage] = []
        self.index = Index()
        self._summaries: dict[int, EpisodeSummary] = {}  # by row, as of so many updates of the index
        self._summarised_updates = 0

    @property
    def path(self) -> Path:
        return self._log.path

    @property
    def log_id(self) -> str:
        """Equal in a store and its backups, in hex; empty before the first `refresh`."""
        return self._log.log_id.hex()

    @classmethod
    def open(cls, path: Path, *, wait_s: float = 0.0, files: Files = OS_FILES) -> Self:
        """A reader that has read nothing yet; waits at most `wait_s` seconds for a writer to create the store.

        Raises:
            StoreError: there is no store at `path`, or it cannot be read.
            StoreVersionMismatch: it has another format version.
        """
        deadline = time.monotonic() + wait_s
        try:
            while not segment_numbers(path, files) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        return cls(LogReader.open(path, files=files))

    def refresh(self) -> IndexChange:
        """Adds new records to `index` and returns the changes. Never blocks for a writer.

        Raises:
            StoreVersionMismatch, StoreError: as `LogReader.refresh`.
        """
        new = _new_blocks(self._log)
        for block in new.blocks:
            self._damaged += block.damaged
        return self.index.apply(new.blocks, new.dropped)

    def read(self, chunk: int) -> Chunk:
        """The chunk of row `chunk`. Its arrays are read-only; its checksum is verified.

        Values are as recorded, except that ``header.end`` has the labelled success.

        Raises:
            StoreCorrupt: the bytes changed.
            StoreRecordGone: the record was dropped; the next `refresh` reports that too.
            StoreError: the file cannot be read.
        """
        found = decode_chunk(self._log.read(self.index.record_ref(chunk)))
        if found.header.end is None:
            return found
        episodes, row = self.index.episodes, int(self.index.chunks.episode[chunk])
        end = msgspec.structs.replace(
            found.header.end,
            success=None if episodes.success[row] < 0 else bool(episodes.success[row]),
            reward_source=episodes.reward_sources.names[episodes.reward_source[row]],
        )
        return Chunk(msgspec.structs.replace(found.header, end=end), found.columns, found.final)

    def read_packed(self, chunk: int) -> PackedChunk:
        """The chunk of row `chunk`, not unpacked and as recorded. Thread-safe.

        Raises:
            StoreCorrupt, StoreError: as `read`.
            WireError: it is no longer a chunk.
        """
        return parse_chunk(self._log.read(self.index.record_ref(chunk)))

    def read_range(self, chunk: int, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a chunk's packet, without verification. Thread-safe.

        Raises:
            StoreError: the record is gone or shorter than that.
        """
        return self._log.read_range(self.index.record_ref(chunk), start, stop)

    def episodes(self) -> list[EpisodeSummary]:
        """Every episode found so far, in the order of their first chunks: at its row of the index.

        The first call visits each step of the store, a later one only those of the episodes that have changed.
        """
        updates, rows = self.index.updates, self.index.updated_episodes(self._summarised_updates)
        if len(rows):
            self._summaries.update(zip(rows.tolist(), summarise_episodes(self.index, rows), strict=True))
            self._summarised_updates = updates
        return list(self._summaries.values())

    @property
    def damaged(self) -> list[Damage]:
        """Unreadable records found so far."""
        return [*self._log.damaged, *self._damaged]

    def close(self) -> None:
        """Releases the files. Idempotent."""
        self._log.close()


class _NewBlocks(NamedTuple):
    """New content of a log: blocks in order, and sequence numbers of dropped records."""

    blocks: list[IndexBlock]
    dropped: list[Array]


def _new_blocks(log: LogReader) -> _NewBlocks:
    """New blocks; of sealed segments only the footers are read. Raises as `LogReader.refresh`."""
    new, batches = _NewBlocks([], []), log.refresh()
    try:
        for batch in batches:
            new.dropped.append(batch.dropped)
            if block := _block_from_summary(batch) or _block_from_records(log, batch):
                new.blocks.append(_without_quarantined(block, log.quarantined_ranges(batch.segment)))
    except StoreError:
        log.return_again(batches)
        raise
    return new


def _without_quarantined(block: IndexBlock, quarantined: Sequence[range]) -> IndexBlock:
    """The block without quarantined chunks, which may arrive and be stored again."""
    offset = block.chunks["offset"]
    lost = np.zeros(len(offset), bool)
    for each in quarantined:
        lost |= (offset >= each.start) & (offset < each.stop)
    return block.without_chunks(lost) if lost.any() else block


def _block_from_summary(batch: RecordBatch) -> IndexBlock | None:
    if not batch.summary:
        return None
    try:
        return decode_block(batch.summary)
    except WireError as error:
        _logger.warning("store.summary_undecodable segment=%d: its records are read instead: %s", batch.segment, error)
        return None


def _block_from_records(log: LogReader, batch: RecordBatch) -> IndexBlock | None:
    builder = IndexBlockBuilder()
    for ref in refs_of(batch.records):
        try:
            builder.add(ref, log.read(ref))
        except StoreRecordGone as error:
            _logger.info("store.record_dropped %s", error)
        except StoreCorrupt as error:
            builder.add_damage(ref, str(error))
    block = builder.build()
    for damage in block.damaged:
        _logger.warning("store.undecodable %s", damage)
    return block if len(batch.records) else None
