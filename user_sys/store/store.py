"""Which chunks a store has and whose its episodes are: all that its writer must remember.

The experience store: every chunk of every episode, once, and what people said about it afterwards.

Durability is the log's (`user_sys.store.log`): a chunk is acknowledged when `StoreWriter.sync` has returned, and
survives kills and power cuts from then on. Ingestion is idempotent by (episode, index): a chunk that is sent again is
recognised, also by a writer that was started anew, and also when its episode was deleted and its space is taken. An
episode belongs to the robot of its first chunk: another's chunks never get into it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.episode import Chunk, ChunkHeader, PackedChunk, decode_chunk, parse_chunk
from user_sys.errors import StoreCorrupt, StoreRecordGone, WireError
from user_sys.store.files import OS_FILES, Files
from user_sys.store.index import EpisodeSummary, Index, IndexChange, summarise_episodes
from user_sys.store.index_block import (
    CHUNK_KIND,
    LABEL_KIND,
    IndexBlock,
    IndexBlockBuilder,
    decode_block,
    summarise_records,
)
from user_sys.store.labels import DeleteLabel, Label, encode_label
from user_sys.store.log import SEGMENT_BYTES, LogReader, LogWriter, RecordBatch, SyncPoint, segment_numbers
from user_sys.store.manifest import SegmentEntry
from user_sys.store.record_format import Damage, RecordRef


class IngestedChunks:
    """The (episode, index) of each chunk: a count for each episode, and single ones only behind a gap.

    Attributes:
        chunks, steps: how many there are.
        deleted: episodes that a label deletes.
    """

    def __init__(self) -> None:
        self.chunks = self.steps = 0
        self.deleted: set[str] = set()
        self._next: dict[str, int] = {}  # all below are there
        self._robots: dict[str, str] = {}
        self._strays: set[tuple[str, int]] = set()

    def has(self, episode: str, index: int) -> bool:
        """Whether that chunk is there."""
        return index < self._next.get(episode, 0) or (episode, index) in self._strays

    def has_episode(self, episode: str) -> bool:
        """Whether any chunk of that episode is there."""
        return episode in self._next

    def robot_of(self, episode: str) -> str | None:
        """Whose chunk was the first of that episode to come; None while there is none."""
        return self._robots.get(episode)

    def add(self, header: ChunkHeader) -> None:
        """Takes note of a chunk that is not there yet."""
        if header.episode not in self._robots:
            self._robots[header.episode] = sys.intern(header.robot)
        self._add(header.episode, header.index, header.steps)

    def _add(self, episode: str, index: int, steps: int) -> None:
        self.chunks += 1
        self.steps += steps
        following = self._next.setdefault(episode, 0)
        if index != following:
            self._strays.add((episode, index))
            return
        following += 1
        while self._strays and (episode, following) in self._strays:
            self._strays.remove((episode, following))
            following += 1
        self._next[episode] = following

    def add_label(self, label: Label) -> None:
        """Takes note of what is deleted."""
        if isinstance(label, DeleteLabel):
            (self.deleted.add if label.deleted else self.deleted.discard)(label.episode)

    def add_blocks(self, blocks: Iterable[IndexBlock]) -> None:
        """Takes note of all that is in `blocks`; what was there already counts once."""
        for block in blocks:
            names = [record.episode for record in block.episodes]
            for record in block.episodes:
                self._robots.setdefault(record.episode, sys.intern(record.robot))
            columns = (block.chunks[name].tolist() for name in ("episode", "index", "steps"))
            for episode, index, steps in zip(*columns, strict=True):
                if not self.has(names[episode], index):
                    self._add(names[episode], index, steps)
            for label in block.labels:
                self.add_label(label)


POLL_S = 0.05

_logger = logging.getLogger(__name__)


class StoreWriter:
    """The one writer of a store. Obtain it with `open`.

    One thread calls it, but for `sync` with a ticket, `sealed_segments` and `rewrite`, which any thread may call beside
    it.
    """

    def __init__(self, path: Path, log: LogWriter, known: IngestedChunks) -> None:
        self.path, self._log, self._known = path, log, known

    @classmethod
    def open(
        cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES, background: bool = True, files: Files = OS_FILES
    ) -> Self:
        """Opens or creates the store at `path`; reads the footers of what is sealed and scans the rest.

        Arguments as `LogWriter.open`'s.

        Raises:
            StoreLocked: another process writes it.
            StoreFull, StoreVersion, StoreError: as `LogWriter.open`.
        """
        log = LogWriter.open(
            path, segment_bytes=segment_bytes, summarise=summarise_records, background=background, files=files
        )
        known = IngestedChunks()
        try:
            with LogReader.open(path, files=files) as reader:
                known.add_blocks(_new_blocks(reader).blocks)
        except BaseException:
            log.close()
            raise
        return cls(path, log, known)

    @property
    def chunks(self) -> int:
        """How many chunks the store has, those not yet synced included."""
        return self._known.chunks

    @property
    def steps(self) -> int:
        """How many steps the store has, those not yet synced included."""
        return self._known.steps

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        return self._log.pending_bytes

    def has(self, episode: str, index: int) -> bool:
        """Whether that chunk was appended; durable only if `sync` has returned since."""
        return self._known.has(episode, index)

    def append(self, packet: bytes | memoryview, parsed: PackedChunk | None = None) -> bool:
        """Adds an encoded chunk; False where it is not needed, which costs nothing.

        Not needed is what the store has already, and what belongs to a deleted episode of which it has nothing: that
        was compacted away, or deleted before it came.

        It is acknowledged by the next `sync`. That holds for False too: what is known may still wait for its sync.

        Args:
            packet: the chunk's bytes, which are stored as they are.
            checked: what `open_chunk` made of this very `packet`, if the caller has called it; saves doing so again.

        Raises:
            WireError: the packet is no valid chunk, or the episode is another robot's; nothing was stored.
            StoreFull: no space; this chunk was not taken, those before it are kept.
            StoreError: the disk failed.
        """
        chunk = parse_chunk(packet) if parsed is None else parsed
        header, known = chunk.header, self._known
        if (owner := known.robot_of(header.episode)) not in (None, header.robot):
            raise WireError(f"the episode {header.episode} is {owner}'s; {header.robot} cannot write to it")
        if known.has(header.episode, header.index):
            return False
        if header.episode in known.deleted and not known.has_episode(header.episode):
            return False
        self._log.append(CHUNK_KIND, packet, schema=chunk.schema)
        known.add(header)
        return True

    def append_label(self, label: Label) -> None:
        """Adds a label, of an episode that may still be unknown. Raises as `append`."""
        self._log.append(LABEL_KIND, encode_label(label))
        self._known.add_label(label)

    def flush(self) -> SyncPoint:
        """Writes out all that was appended; `sync` with the ticket makes it durable. Raises as `append`."""
        return self._log.flush()

    def sync(self, ticket: SyncPoint | None = None) -> None:
        """Makes all that was appended, or flushed by the time of `ticket`, durable: one fdatasync, however many chunks.

        Raises as `LogWriter.sync`.
        """
        self._log.sync(ticket)

    # Giving space back

    @property
    def deleted_episodes(self) -> int:
        """How many episodes labels delete, those whose space was taken long ago included. Any thread may ask."""
        return len(self._known.deleted)

    def rotate(self) -> None:
        """Begins a new segment, so that those before can be rewritten; they are sealed by the time `close` returns."""
        self._log.rotate()

    def sealed_segments(self) -> tuple[SegmentEntry, ...]:
        """The segments that are sealed by now, in order."""
        return self._log.sealed_segments()

    def rewrite(self, segments: Sequence[int], keep: Callable[[RecordRef], bool]) -> SegmentEntry:
        """Rewrites neighbouring sealed segments into one without the records that `keep` refuses. As `LogWriter`'s."""
        return self._log.rewrite(segments, keep)

    def close(self) -> None:
        """Syncs and lets go of the store. Calling it twice is harmless."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class StoreReader:
    """Reads a store, in any process, also while it is written. Obtain it with `open`.

    One thread calls `refresh`, `drop` and `close`; `read` may be called from several at once.

    Attributes:
        index: steps, chunks and episodes as of the last `refresh`.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._damaged: list[Damage] = []
        self.index = Index()

    @classmethod
    def open(cls, path: Path, *, wait_s: float = 0.0, files: Files = OS_FILES) -> Self:
        """A reader that has read nothing yet; waits at most `wait_s` seconds for a writer to create the store.

        Raises:
            StoreError: there is no store at `path`.
            StoreVersion: another format version wrote it.
        """
        deadline = time.monotonic() + wait_s
        while not segment_numbers(path, files) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return cls(LogReader.open(path, files=files))

    def refresh(self) -> IndexChange:
        """Takes what was stored since the last call into `index` and says what came and changed. Never waits.

        Raises:
            StoreVersion, StoreError: as `LogReader.refresh`.
        """
        news = _new_blocks(self._log)
        for block in news.blocks:
            self._damaged += block.damaged
        return self.index.apply(news.blocks, news.dropped)

    def read(self, chunk: int) -> Chunk:
        """The chunk of row `chunk`; its arrays are read-only views of the file, its checksum is verified.

        They are as recorded; what labels say of success by then stands in ``header.end``.

        Raises:
            StoreCorrupt: the bytes are no longer what was stored.
            StoreGone: the record was dropped; `refresh` says so too.
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

    def read_packed(self, chunk: int, *, verify: bool = True) -> PackedChunk:
        """The chunk of row `chunk`, not unpacked; any thread may call it.

        Args:
            verified: check the record's checksum; else only that it is a chunk, for callers with sums of their own.

        Raises:
            StoreCorrupt, StoreError: as `read`.
            WireError: it is no longer a chunk.
        """
        ref = self.index.record_ref(chunk)
        return parse_chunk(self._log.read(ref) if verify else self._log.read_range(ref, 0, ref.length))

    def read_into(self, chunk: int, start: int, out: Sequence[memoryview], *, wait: bool = True) -> bool:
        """Fills buffers with a chunk's packet from byte `start` on, not verified. Any thread may.

        Args:
            wait: for the disk. Else False where it would have to; the disk begins to read then.

        Raises:
            StoreError: the record is gone, or not that long.
        """
        return self._log.read_into(self.index.record_ref(chunk), start, out, wait=wait)

    def episodes(self) -> list[EpisodeSummary]:
        """Every episode found so far, in the order of their first chunks."""
        return summarise_episodes(self.index)

    @property
    def damaged(self) -> list[Damage]:
        """What was found so far that cannot be read."""
        return [*self._log.damaged, *self._damaged]

    def close(self) -> None:
        """Lets go of the files; chunks that were read stay valid. Calling it twice is harmless."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _NewBlocks(NamedTuple):
    """What a log has that was not told of before: blocks in order, and the numbers of records that are gone."""

    blocks: list[IndexBlock]
    dropped: list[Array]


def _new_blocks(log: LogReader) -> _NewBlocks:
    """What is new; of segments that are sealed only the footers are read. Raises as `LogReader.refresh`."""
    news = _NewBlocks([], [])
    for batch in log.refresh():
        news.dropped.append(batch.dropped)
        if block := _summary(batch) or _block_of(log, batch):
            news.blocks.append(_readable(block, log.quarantined_ranges(batch.segment)))
    return news


def _readable(block: IndexBlock, quarantined: Sequence[range]) -> IndexBlock:
    """The block without chunks that were damaged and set aside: they may come again, and are then stored again."""
    offset = block.chunks["offset"]
    lost = np.zeros(len(offset), bool)
    for each in quarantined:
        lost |= (offset >= each.start) & (offset < each.stop)
    return block.without_chunks(lost) if lost.any() else block


def _summary(batch: RecordBatch) -> IndexBlock | None:
    if not batch.summary:
        return None
    try:
        return decode_block(batch.summary)
    except WireError as error:
        _logger.warning("store.no-summary segment=%d: its records are read instead: %s", batch.segment, error)
        return None


def _block_of(log: LogReader, batch: RecordBatch) -> IndexBlock | None:
    builder = IndexBlockBuilder()
    for ref in batch.records:
        try:
            builder.add(ref, log.read(ref))
        except StoreRecordGone as error:
            _logger.info("store.gone %s", error)
        except StoreCorrupt as error:
            builder.add_damage(ref, str(error))
    block = builder.build()
    for damage in block.damaged:
        _logger.warning("store.undecodable %s", damage)
    return block if len(batch.records) else None
