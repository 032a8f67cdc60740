"""The experience store: every chunk of every episode, once, and what people said about it afterwards.

Durability is the log's (`user_sys.store.log`): a chunk is acknowledged when `StoreWriter.sync` has returned, and
survives kills and power cuts from then on. Ingestion is idempotent by (episode, index): a chunk that is sent again is
recognised, also by a writer that was started anew, and also when its episode was deleted and its space is taken. An
episode belongs to the robot of its first chunk: another's chunks never get into it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.episode import Chunk, PackedChunk, decode_chunk, open_chunk
from user_sys.errors import StoreCorrupt, StoreGone, WireError
from user_sys.store.block import CHUNK, LABEL, Block, BlockBuilder, decode_block, summarise_records
from user_sys.store.files import REAL, Files
from user_sys.store.frame import Damage, RecordRef
from user_sys.store.index import Change, Index
from user_sys.store.known import KnownChunks
from user_sys.store.labels import Label, encode_label
from user_sys.store.log import SEGMENT_BYTES, Batch, LogReader, LogWriter, Ticket, segment_numbers
from user_sys.store.manifest import Entry
from user_sys.store.summary import EpisodeSummary, summarise_episodes

POLL_S = 0.05

_logger = logging.getLogger(__name__)


class StoreWriter:
    """The one writer of a store. Obtain it with `open`.

    One thread calls it, but for `sync` with a ticket, `sealed` and `rewrite`, which any thread may call beside it.
    """

    def __init__(self, path: Path, log: LogWriter, known: KnownChunks) -> None:
        self.path, self._log, self._known = path, log, known

    @classmethod
    def open(
        cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES, background: bool = True, files: Files = REAL
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
        known = KnownChunks()
        try:
            with LogReader.open(path, files=files) as reader:
                known.take(_news(reader).blocks)
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

    def append(self, packet: bytes | memoryview, checked: PackedChunk | None = None) -> bool:
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
        chunk = open_chunk(packet) if checked is None else checked
        header, known = chunk.header, self._known
        if (owner := known.robot_of(header.episode)) not in (None, header.robot):
            raise WireError(f"the episode {header.episode} is {owner}'s; {header.robot} cannot write to it")
        if known.has(header.episode, header.index):
            return False
        if header.episode in known.deleted and not known.has_some(header.episode):
            return False
        self._log.append(CHUNK, packet, schema=chunk.schema)
        known.add(header)
        return True

    def append_label(self, label: Label) -> None:
        """Adds a label, of an episode that may still be unknown. Raises as `append`."""
        self._log.append(LABEL, encode_label(label))
        self._known.add_label(label)

    def flush(self) -> Ticket:
        """Writes out all that was appended; `sync` with the ticket makes it durable. Raises as `append`."""
        return self._log.flush()

    def sync(self, ticket: Ticket | None = None) -> None:
        """Makes all that was appended, or flushed by the time of `ticket`, durable: one fdatasync, however many chunks.

        Raises as `LogWriter.sync`.
        """
        self._log.sync(ticket)

    # Giving space back

    @property
    def deletions(self) -> int:
        """How many episodes labels delete, those whose space was taken long ago included. Any thread may ask."""
        return len(self._known.deleted)

    def rotate(self) -> None:
        """Begins a new segment, so that those before can be rewritten; they are sealed by the time `close` returns."""
        self._log.rotate()

    def sealed(self) -> tuple[Entry, ...]:
        """The segments that are sealed by now, in order."""
        return self._log.sealed()

    def rewrite(self, segments: Sequence[int], keep: Callable[[RecordRef], bool]) -> Entry:
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
    def open(cls, path: Path, *, wait_s: float = 0.0, files: Files = REAL) -> Self:
        """A reader that has read nothing yet; waits at most `wait_s` seconds for a writer to create the store.

        Raises:
            StoreError: there is no store at `path`.
            StoreVersion: another format version wrote it.
        """
        deadline = time.monotonic() + wait_s
        while not segment_numbers(path, files) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return cls(LogReader.open(path, files=files))

    def refresh(self) -> Change:
        """Takes what was stored since the last call into `index` and says what came and changed. Never waits.

        Raises:
            StoreVersion, StoreError: as `LogReader.refresh`.
        """
        news = _news(self._log)
        for block in news.blocks:
            self._damaged += block.damaged
        return self.index.take(news.blocks, news.dropped)

    def read(self, chunk: int) -> Chunk:
        """The chunk of row `chunk`; its arrays are read-only views of the file, its checksum is verified.

        They are as recorded; what labels say of success by then stands in ``header.end``.

        Raises:
            StoreCorrupt: the bytes are no longer what was stored.
            StoreGone: the record was dropped; `refresh` says so too.
            StoreError: the file cannot be read.
        """
        found = decode_chunk(self._log.read(self.index.record(chunk)))
        if found.header.end is None:
            return found
        episodes, row = self.index.episodes, int(self.index.chunks.episode[chunk])
        end = msgspec.structs.replace(
            found.header.end,
            success=None if episodes.success[row] < 0 else bool(episodes.success[row]),
            reward_source=episodes.reward_sources.names[episodes.reward_source[row]],
        )
        return Chunk(msgspec.structs.replace(found.header, end=end), found.columns, found.final)

    def packed(self, chunk: int, *, verified: bool = True) -> PackedChunk:
        """The chunk of row `chunk`, not unpacked; any thread may call it.

        Args:
            verified: check the record's checksum; else only that it is a chunk, for callers with sums of their own.

        Raises:
            StoreCorrupt, StoreError: as `read`.
            WireError: it is no longer a chunk.
        """
        ref = self.index.record(chunk)
        return open_chunk(self._log.read(ref) if verified else self._log.read_range(ref, 0, ref.length))

    def read_into(self, chunk: int, start: int, out: Sequence[memoryview], *, wait: bool = True) -> bool:
        """Fills buffers with a chunk's packet from byte `start` on, not verified. Any thread may.

        Args:
            wait: for the disk. Else False where it would have to; the disk begins to read then.

        Raises:
            StoreError: the record is gone, or not that long.
        """
        return self._log.read_into(self.index.record(chunk), start, out, wait=wait)

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


class _News(NamedTuple):
    """What a log has that was not told of before: blocks in order, and the numbers of records that are gone."""

    blocks: list[Block]
    dropped: list[Array]


def _news(log: LogReader) -> _News:
    """What is new; of segments that are sealed only the footers are read. Raises as `LogReader.refresh`."""
    news = _News([], [])
    for batch in log.refresh():
        news.dropped.append(batch.dropped)
        if block := _summary(batch) or _block_of(log, batch):
            news.blocks.append(_readable(block, log.quarantined(batch.segment)))
    return news


def _readable(block: Block, quarantined: Sequence[range]) -> Block:
    """The block without chunks that were damaged and set aside: they may come again, and are then stored again."""
    offset = block.chunks["offset"]
    lost = np.zeros(len(offset), bool)
    for each in quarantined:
        lost |= (offset >= each.start) & (offset < each.stop)
    return block.without(lost) if lost.any() else block


def _summary(batch: Batch) -> Block | None:
    if not batch.summary:
        return None
    try:
        return decode_block(batch.summary)
    except WireError as error:
        _logger.warning("store.no-summary segment=%d: its records are read instead: %s", batch.segment, error)
        return None


def _block_of(log: LogReader, batch: Batch) -> Block | None:
    builder = BlockBuilder()
    for ref in batch.records:
        try:
            builder.add(ref, log.read(ref))
        except StoreGone as error:
            _logger.info("store.gone %s", error)
        except StoreCorrupt as error:
            builder.add_damage(ref, str(error))
    block = builder.build()
    for damage in block.damaged:
        _logger.warning("store.undecodable %s", damage)
    return block if len(batch.records) else None
